"""Layer norms by calls of ours, and their gradients, are those of eager PyTorch."""

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from compile.own_calls import check
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import library_rules
from torch_xla_pp.compile.layer_norm import layer_norm
from torch_xla_pp.compile.lowering import Lowering
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

Norm = Callable[..., Tensor]


def both(norm: Norm, shape: Sequence[int], *args: Tensor) -> tuple[Tensor, ...]:
    """Return a layer norm and all its gradients; the last value is that of its own."""
    x, *others, grad = (value.detach() for value in args)
    leaves = [value.requires_grad_() for value in (x, *others)]
    y = norm(leaves[0], shape, *leaves[1:])
    return y.detach(), *torch.autograd.grad(y, leaves, grad)


def forward(norm: Norm, shape: Sequence[int], *args: Tensor) -> tuple[Tensor, ...]:
    return (norm(args[0], shape, *args[1:]),)


def shifted(x: Tensor, shape: Sequence[int], shift: Tensor) -> Tensor:
    """Return a layer norm without a factor."""
    return layer_norm(x, shape, None, shift)


def checked(
    shape: tuple[int, ...], dims: int, num_others: int, calls: tuple[int, int]
) -> None:
    """Compare a layer norm of a shape along its last dimensions."""
    own = shape[len(shape) - dims :]
    x, grad = 3 * torch.randn(shape) + 2, torch.randn(shape)
    others = [torch.randn(own) for _ in range(num_others)]
    run = functools.partial(forward, layer_norm, own)
    check(run, x, *others, num_calls=calls[0])
    run = functools.partial(both, layer_norm, own)
    # Gradients of the factor and the shift are sums over rows whose terms cancel.
    check(run, x, *others, grad, num_calls=calls[1], atol=5e-6)
    want = both(functional.layer_norm, own, x, *others, grad)
    for value, eager in zip(both(layer_norm, own, x, *others, grad), want, strict=True):
        torch.testing.assert_close(value, eager, rtol=2e-5, atol=2e-5)


def norms() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    # Forward and the input's gradient; the factor's; the shift's, if XLA leaves it.
    for shape, calls in (
        ((2, 40, 48), (2, 3, 4)),
        ((1, 40, 48), (2, 3, 4)),
        ((2, 1, 4, 70), (2, 3, 3)),
        ((3, 16), (2, 3, 3)),
    ):
        for num_others, own in enumerate(calls):
            checked(shape, 1, num_others, (1, own))
    checked((40, 6, 8), 2, 2, (1, 4))
    x, shift, grad = torch.randn(40, 48), torch.randn(48), torch.randn(40, 48)
    check(functools.partial(both, shifted, (48,)), x, shift, grad, num_calls=3)
    # Rows that are constant, and large ones.
    x[3], x[4] = 5.0, x[4] * 1e15
    run = functools.partial(both, layer_norm, (48,))
    check(run, x, shift, shift, grad, num_calls=4)


def test_layer_norms_and_their_gradients_are_those_of_eager(worlds: Worlds) -> None:
    worlds.run(norms, ranks=1, devices=1)


def beside(x: Tensor, factor: Tensor, shift: Tensor, grad: Tensor) -> tuple[Tensor]:
    """Return the gradient of an input that is also read beside the layer norm."""
    x = x.detach().requires_grad_()
    y = x + torch.sin(layer_norm(x, x.shape[-1:], factor, shift))
    return torch.autograd.grad(y, [x], grad)


def beside_without_factor(x: Tensor, grad: Tensor) -> tuple[Tensor]:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(layer_norm(x, x.shape[-1:]) * x, [x], grad)


def read_twice(x: Tensor, other: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of a layer norm, and its sum with another value."""
    x = x.detach().requires_grad_()
    (own,) = torch.autograd.grad(layer_norm(x, x.shape[-1:]), [x], grad)
    return own, own + other


def sums() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    for shape in ((40, 48), (2, 3, 33)):
        x, grad = torch.randn(shape), torch.randn(shape)
        factor, shift = torch.randn(shape[-1:]), torch.randn(shape[-1:])
        for call, args, num_adds in (
            (beside, (x, factor, shift, grad), 0),
            (beside_without_factor, (x, grad), 0),
            (read_twice, (x, shift, grad), 1),
            (read_twice, (x, grad, grad), 1),
        ):
            check(call, *args, num_calls=2)
            device = [value.to(xla_compat.device()) for value in args]
            lowering = Lowering(make_fx(call)(*args), "test", library_rules())
            text = xla_compat.hlo_text(list(lowering.run(*device)))
            assert text.count(" add(") == num_adds, text


def test_the_gradient_of_a_norm_is_added_to_that_beside_it(worlds: Worlds) -> None:
    worlds.run(sums, ranks=1, devices=1)


def own_norm(x: Tensor, gate: Tensor) -> Tensor:
    """Return a layer norm that a model writes itself, of which it uses each part."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    variance = centred.pow(2).mean(-1, keepdim=True)
    scale = torch.rsqrt(variance + 1e-3)
    return (x - mean) * scale * gate + centred + variance


def other_norms() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x = torch.randn(4, 40, 48)
    # Its factor differs by row, and so is none.
    check(lambda x, gate: (own_norm(x, gate),), x, torch.randn(4, 40, 48), num_calls=2)
    check(lambda x, gate: (own_norm(x, gate),), x, torch.randn(48), num_calls=2)
    # The sums of what is no layer norm are calls.
    check(lambda x: ((x - x.mean(-1, keepdim=True)) * x,), x, num_calls=1)
    check(lambda x: (x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5),), x, num_calls=1)
    check(lambda x: (layer_norm(x.double(), (48,)),), x, num_calls=0)
    check(lambda x: (layer_norm(x[:0], (48,)),), x, num_calls=0)

    def doubled(x: Tensor, alpha: float) -> tuple[Tensor, ...]:
        mean = x.mean(-1, keepdim=True)
        centred = torch.sub(x, mean, alpha=alpha)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (centred * scale,)

    check(functools.partial(doubled, alpha=2.0), x, num_calls=2)

    def along_another(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        mean = x.mean(0, keepdim=True)
        scale = torch.rsqrt((x - mean).pow(2).mean(0, keepdim=True) + 1e-5)
        normal = (x - mean) * scale
        along = (grad * normal).mean(0, keepdim=True)
        return ((grad - grad.mean(0, keepdim=True) - normal * along) * scale,)

    check(along_another, torch.randn(4, 48), torch.randn(4, 48), num_calls=0)


def test_what_is_no_layer_norm_is_computed_as_it_is_written(worlds: Worlds) -> None:
    worlds.run(other_norms, ranks=1, devices=1)


def repeated() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    norms = [nn.LayerNorm(48), nn.LayerNorm(48, bias=False)]
    own = [value for norm in norms for value in norm.parameters()]

    def run(x: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        y = layer_norm(x, (48,), own[0], own[1])
        return y, layer_norm(y + x, (48,), own[2]) + layer_norm(x, (48,), own[2])

    check(run, torch.randn(40, 48), *(x.detach() for x in own), num_calls=3)


def test_several_layer_norms_of_one_value(worlds: Worlds) -> None:
    worlds.run(repeated, ranks=1, devices=1)

"""Attention is that of PyTorch, whatever computes it."""

import math

import pytest
import torch
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD

pytestmark = pytest.mark.pure

SHAPE = (2, 3, 8, 4)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def operands(num_queries: int = 8) -> list[torch.Tensor]:
    first = drawn(2, 3, num_queries, 4, seed=0)
    return [first, *(drawn(*SHAPE, seed=seed) for seed in (1, 2))]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("num_queries", [8, 5])
def test_it_gives_what_pytorch_gives_and_its_gradients(
    is_causal: bool, scale: float | None, num_queries: int
) -> None:
    found = []
    for function in (xpp.attention, F.scaled_dot_product_attention):
        given = [x.requires_grad_() for x in operands(num_queries)]
        result = function(*given, is_causal=is_causal, scale=scale)  # type: ignore[operator]
        weight = drawn(*result.shape, seed=3)
        grads = torch.autograd.grad((result * weight).sum(), given)
        found.append((result, *grads))
    for own, expected in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_its_operators_are_sound() -> None:
    given = [x.requires_grad_() for x in operands()]
    options = (None, True, 0.5, ["batch", "", "", ""])
    torch.library.opcheck(ATTENTION, (*given, *options))
    result, sums, maxima = (x.detach() for x in ATTENTION(*given, *options))
    plain = [x.detach() for x in given]
    checked = (result, *plain, None, result, sums, maxima, *options[1:])
    names = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(ATTENTION_BACKWARD, checked, test_utils=names)


def test_what_is_kept_of_a_row_makes_its_probabilities() -> None:
    query, key, value = operands()
    _, sums, maxima = ATTENTION(query, key, value, None, False, 0.5, [""] * 4)
    scores = 0.5 * query @ key.transpose(-2, -1)
    combined = maxima + sums.log()
    torch.testing.assert_close(combined, scores.logsumexp(-1))


def test_vmap_adds_a_dimension() -> None:
    stacked = [torch.stack([x, 2 * x]).requires_grad_() for x in operands()]
    mapped = torch.vmap(lambda *x: xpp.attention(*x, is_causal=True))(*stacked)
    each = [xpp.attention(*(x[i] for x in stacked), is_causal=True) for i in range(2)]
    torch.testing.assert_close(mapped, torch.stack(each))
    grads = [
        torch.autograd.grad(result.square().sum(), stacked)
        for result in (mapped, torch.stack(each))
    ]
    for own, expected in zip(*grads, strict=True):
        torch.testing.assert_close(own, expected)


def test_half_precision_scores_are_exact_numbers() -> None:
    given = [x.to(torch.bfloat16) for x in operands()]
    found = xpp.attention(*given, is_causal=True)
    expected = F.scaled_dot_product_attention(*given, is_causal=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_work_is_counted_as_that_of_its_products() -> None:
    given = [x.requires_grad_() for x in operands()]
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        result = xpp.attention(*given)
        forward = counter.get_total_flops()
        result.sum().backward()
    product = 2 * math.prod(SHAPE) * SHAPE[2]
    assert (forward, counter.get_total_flops()) == (2 * product, 7 * product)


def test_what_does_not_go_together_is_refused() -> None:
    query, key, value = operands()
    with pytest.raises(ValueError, match="alike but for the length of the queries"):
        xpp.attention(query, key[:, :1], value[:, :1])
    with pytest.raises(ValueError, match="one floating-point dtype, got torch.float32"):
        xpp.attention(query, key.float(), value)
    with pytest.raises(ValueError, match="expected four logical axes"):
        xpp.attention(query, key, value, axes=("batch",))

"""Torch's own samples of its operators, as modules whose inputs are tensors.

Besides each sample itself there is one with its float values rounded, for the kinks
of functions and for equal values: activations of a model are exactly 0 often.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ops.checking import Case
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

# Torch leaves open which of equal values these take.
_CHOOSING = (
    "cummax",
    "cummin",
    "kthvalue",
    "masked.median",
    "median",
    "mode",
    "msort",
    "nanmedian",
    "sort",
    "topk",
)
# Rounded matrices are singular, or have equal eigenvalues.
_OF_MATRICES = (
    "cholesky",
    "linalg.",
    "logdet",
    "lu",
    "norm.nuc",
    "ormqr",
    "pinverse",
    "qr",
    "svd",
    "triangular_solve",
)
# Not for users, and other on each device.
_INTERNAL = {
    "_native_batch_norm_legit": "its statistics in eval mode are empty on CPUs alone"
}


def full_name(op: OpInfo) -> str:
    """Return the name that distinguishes an operator's variants."""
    variant = op.variant_test_name
    return f"{op.name}.{variant}" if variant else op.name


def differentiable() -> dict[str, OpInfo]:
    """Return the operators with float32 gradients by name."""
    return {
        full_name(op): op
        for op in op_db
        if op.supports_autograd and torch.float32 in op.dtypes
    }


class Calling(nn.Module):
    """A call of an operator on its input tensors and the rest of a sample."""

    def __init__(self, op: OpInfo, sample: SampleInput) -> None:
        super().__init__()
        self._call = (op.get_op(), sample.output_process_fn_grad)
        arguments = (sample.input, sample.args, sample.kwargs)
        self._leaves, self._spec = pytree.tree_flatten(arguments)

    def __deepcopy__(self, memo: Any) -> "Calling":
        return self

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self._leaves]
        first, args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        function, process = self._call
        results = pytree.tree_leaves(process(function(first, *args, **kwargs)))
        return tuple(_as_real(x) for x in results if isinstance(x, Tensor))


def _as_real(value: Tensor) -> Tensor:
    """Return a complex value as pairs of numbers, as which stages can exchange it."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """The reason why a sample cannot be the inputs of a stage."""

    text: str
    reason: str


def cases_of(name: str, most: int) -> Iterator[Case | Unfit]:
    """Return cases of an operator, of at most `most` samples that differ in shapes."""
    op = differentiable()[name]
    torch.manual_seed(0)
    seen: set[str] = set()
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        text = _described(sample)
        if text not in seen:
            yield from _cases(op, sample, text)
        seen.add(text)
        if len(seen) == most:
            return


def _cases(op: OpInfo, sample: SampleInput, text: str) -> Iterator[Case | Unfit]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    layouts = [str(x.layout) for x in tensors if x.layout is not torch.strided]
    if layouts:
        yield Unfit(text=text, reason=f"an input of layout {layouts[0]}")
        return
    if any(x.is_complex() for x in tensors):
        yield Unfit(text=text, reason="a complex input")
        return
    name = full_name(op)
    if name in _INTERNAL:
        yield Unfit(text=text, reason=_INTERNAL[name])
        return
    module = Calling(op, sample)
    yield Case(module=module, inputs=_leaves(tensors, tensors), text=text)
    is_open = name.partition(".")[0] in _CHOOSING or name in _CHOOSING
    if not is_open and not name.startswith(_OF_MATRICES):
        values = [x.round() if x.is_floating_point() else x for x in tensors]
        rounded = _leaves(values, tensors)
        yield Case(module=module, inputs=rounded, text=f"{text}, rounded")


def _leaves(values: Sequence[Tensor], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return copies that need gradients where `like` does."""
    kept = torch.contiguous_format
    return tuple(
        value.detach().clone(memory_format=kept).requires_grad_(x.requires_grad)
        for value, x in zip(values, like, strict=True)
    )


def _described(sample: SampleInput) -> str:
    """Return a sample's shapes and other arguments."""
    positional = pytree.tree_leaves((sample.input, sample.args))
    named = [
        f"{name}={'/'.join(map(_text, pytree.tree_leaves(value)))}"
        for name, value in sample.kwargs.items()
    ]
    return ", ".join([*map(_text, positional), *named])


def _text(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"

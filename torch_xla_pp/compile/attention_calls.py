"""The rule by which attention is a call of `csrc/`, see `lowering`.

For CPU devices. Queries, keys and values are read where they lie, as a rule
in the result of one product. Their gradients are written alike, where they fill a value
of that shape: what puts them together has nothing to copy then.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from torch_xla_pp import cpu, env
from torch_xla_pp.compile.view_rules import Stored, stored
from torch_xla_pp.cpu import Scores, Strided, attend, attend_grad, is_read_in_place
from torch_xla_pp.graph import ATTENTION, ATTENTION_BACKWARD

_CAT = torch.ops.aten.cat.default


def run_attention(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any], /
) -> Tensor | tuple[Tensor, ...] | None:
    """Run attention or its gradients; note how gradients lie that are put together."""
    if node.target is ATTENTION:
        given: Any = node.args
        heads = [_heads(x, values, notes) for x in given[:3]]
        return tuple(attend(_scores(heads, values, *given[3:6])))
    if node.target is ATTENTION_BACKWARD:
        return _gradients(node, values, notes)
    if node.target is _CAT:
        joined = _joined(node, values, notes)
        if joined is not None and joined.is_all:
            return joined.value.reshape(joined.view.shape)
        if joined is not None:
            notes[node] = joined
    return None


def has_call(*args: Any) -> bool:
    """Return whether a function of `csrc/` may compute this attention, or gradient.

    Args:
        args: Those of the operation.
    """
    *tensors, _, _, _ = args
    operands = [x for x in tensors if x is not None and x.dtype != torch.bool]
    is_there = cpu.has_attention() or cpu.has_attention_of_parts()
    is_cpu = env.device_kind() == "CPU"
    return is_cpu and is_there and all(map(cpu.fits_own_ops, operands))


def _heads(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: Mapping[fx.Node, Any]
) -> Stored:
    """Return where matrices lie that the op can read."""
    found = stored(node, values, notes)
    if found is not None and is_read_in_place(found.view):
        return found
    return Stored.whole(values[node])


def _scores(
    heads: Sequence[Stored],
    values: Mapping[fx.Node, Any],
    mask: fx.Node | None,
    is_causal: bool,
    scale: float,
) -> Scores:
    query, key, value = (Strided(x.value, x.view) for x in heads)
    own = None if mask is None else values[mask]
    return Scores(query, key, value, own, is_causal, scale)


class _Gradients(NamedTuple):
    """Where gradients are written.

    Attributes:
        shapes: Shapes of the values that hold them.
        places: For each gradient, which of these holds it.
        stored: How it lies there; of the value, only the shape counts.
    """

    shapes: list[Sequence[int]]
    places: list[int]
    stored: list[Stored]


def _gradients(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: dict[fx.Node, Any]
) -> tuple[Tensor, ...]:
    given: Any = node.args
    grad_node, *three, mask, output, sums, maxima, is_causal, scale, _ = given
    grad = stored(grad_node, values, notes)
    if grad is None or not is_read_in_place(grad.view.transpose(1, 2)):
        grad = Stored.whole(values[grad_node])
    heads = [_heads(x, values, notes) for x in three]
    written = _alike(heads) or _apart(heads)
    results = attend_grad(
        Strided(grad.value, grad.view.transpose(1, 2)),
        _scores(heads, values, mask, is_causal, scale),
        [values[x] for x in (output, sums, maxima)],
        written.shapes,
        [
            (place, x.view)
            for place, x in zip(written.places, written.stored, strict=True)
        ],
    )
    lie = [
        Stored(results[place], x.view, x.steps, is_noted=True)
        for place, x in zip(written.places, written.stored, strict=True)
    ]
    for user in node.users:
        if user.target is operator.getitem:
            notes[user] = lie[user.args[1]]  # type: ignore[index]
    return tuple(x.shown for x in lie)


def _alike(heads: Sequence[Stored]) -> _Gradients | None:
    """Let gradients lie as what they are of, if these are all of the values."""
    wholes = list({id(x.value): x.value for x in heads}.values())
    for whole in wholes:
        views = [x.view for x in heads if x.value is whole]
        if sum(view.numel() for view in views) != whole.numel():
            return None
        is_there = torch.zeros(whole.numel(), dtype=torch.bool)
        for view in views:
            layout = view.shape, view.stride(), view.storage_offset()
            is_there.as_strided(*layout).fill_(True)
        if not is_there.all():
            return None
    places = [next(i for i, x in enumerate(wholes) if x is y.value) for y in heads]
    return _Gradients([x.shape for x in wholes], places, list(heads))


def _apart(heads: Sequence[Stored]) -> _Gradients:
    """Let each gradient be a value, with the heads behind the length."""
    wholes = [torch.empty(_turn(x.view).shape, device="meta") for x in heads]
    lie = [Stored(whole, _turn(whole), (_turn,)) for whole in wholes]
    return _Gradients([x.shape for x in wholes], list(range(len(heads))), lie)


def _turn(value: Tensor) -> Tensor:
    return value.transpose(1, 2)


def _joined(
    node: fx.Node, values: Mapping[fx.Node, Any], notes: Mapping[fx.Node, Any]
) -> Stored | None:
    """Return how values lie that are put together as they lie in one value already."""
    given: Any = node.args
    parts = [stored(x, values, notes) for x in given[0]]
    dim = given[1] if len(given) > 1 else 0
    first, end = parts[0], None
    if first is None:
        return None
    for part in parts:
        if part is None or not part.is_noted or part.value is not first.value:
            return None
        view = part.view
        if view.stride() != first.view.stride():
            return None
        if end is not None and view.storage_offset() != end:
            return None
        end = view.storage_offset() + view.shape[dim] * view.stride(dim)
    shape = list(first.view.shape)
    shape[dim] = sum(part.view.shape[dim] for part in parts if part is not None)
    layout = shape, first.view.stride(), first.view.storage_offset()
    return first._replace(view=torch.as_strided(first.view, *layout), steps=())

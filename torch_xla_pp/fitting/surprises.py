"""Exchanges that nobody asked for, and what to write instead.

A dimension that is sharded is split over devices into equal parts. A cut at another
place, or a join with other dimensions, makes devices send each other the elements that
are then on the wrong device: by a collective-permute or an all-to-all, in forward and
backward. The usual case is one sharded weight for q, k and v, whose product is cut into
three.
"""

from collections.abc import Iterator, Mapping

from torch_xla_pp.accelerators import CompiledProgram

_KINDS = ("collective-permute", "all-to-all")
# Suffixes of operations' names that cut a dimension, or are gradients of such.
_CUTTING = ("split", "split_with_sizes", "slice", "select", "narrow", "unbind")
_JOINING = ("cat", "stack", "slice_backward", "select_backward", "constant_pad_nd")
_MIB = 2**20


def surprises_in(answer: CompiledProgram, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield exchanges that come from cutting a dimension that is split over devices.

    Args:
        answer: The program, compiled.
        origins: Beginning of the names of its operations → the operation of the model
            and its line.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for one in answer.collectives:
        scope, _, operation = one.origin.partition("/")
        name = operation.rpartition("/")[2].removeprefix("aten__")
        if one.kind in _KINDS and name in (*_CUTTING, *_JOINING):
            place = origins.get(scope, one.origin)
            found.setdefault((one.kind, place), []).append(one.num_bytes * one.times)
    for (kind, place), sizes in found.items():
        yield (
            f"{len(sizes)} {kind}, {sum(sizes) / _MIB:,.1f} MiB, as {place} cuts or "
            "joins a dimension that is split over devices. Give each part a layer of "
            "its own, such as q, k and v, or a dimension of its own that is not split."
        )

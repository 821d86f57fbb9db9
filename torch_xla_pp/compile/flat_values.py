"""Large values that a program writes into one flat value, and others read there.

What a forward saves is mostly results of our own calls, which calls of the backward
read. These write and read pieces of a larger value as well (`hlo.place_calls`), so that
the forward returns one value in place of many, and nothing is copied. XLA's loops do
not: so which values these are is known when the forward has been traced.

Sums of gradients of weights may be one from the begin of a step to its end: calls that
add products to them do so where they lie.

Small values become one by copying them, see `bundles`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.compile.bundles import Bundle
from torch_xla_pp.errors import PipelineError


class FlatPart(NamedTuple):
    """A value that lies in a flat one.

    Attributes:
        offset: How many numbers are before it.
        shape: Its shape.
    """

    offset: int
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """Return the value."""
        return whole.narrow(0, self.offset, math.prod(self.shape)).view(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatValue:
    """Values of float32 that the programs of a stage may exchange as one.

    Args:
        name: The name of the flat value.
        names: Names of the values that may be in it.

    Attributes:
        parts: Name of each value that is in it → where; empty until the program that
            makes it has been traced, and where nothing can be in it. Those of sums are
            known.
    """

    name: str
    names: Sequence[str]
    parts: dict[str, FlatPart] = field(default_factory=dict)

    @classmethod
    def of_sums(cls, bundle: Bundle, name_of: Callable[[str], str]) -> "FlatValue":
        """Return the flat value of sums of gradients.

        Args:
            bundle: The sums by role.
            name_of: Returns their names, and that of the flat value.
        """
        begins = accumulate(map(math.prod, bundle.shapes.values()), initial=0)
        parts = {
            name_of(role): FlatPart(begin, shape)
            for (role, shape), begin in zip(bundle.shapes.items(), begins, strict=False)
        }
        return cls(name=name_of(bundle.name), names=[*parts], parts=parts)

    def taken_apart(self, whole: Tensor) -> dict[str, Tensor]:
        """Return the values that are in it, by name."""
        return {name: part.of(whole) for name, part in self.parts.items()}

    def note(self, parts: Mapping[str, FlatPart]) -> None:
        """Note what is in it.

        Raises:
            PipelineError: Something else was in it when its maker was traced before.
        """
        if self.parts and self.parts != parts:
            raise PipelineError(
                f"{self.name}: expected it to hold {', '.join(self.parts)} as in the "
                f"programs before, got {', '.join(parts) or 'nothing'}. This is a "
                "defect of torch_xla_pp; please report it."
            )
        self.parts.update(parts)


class Flattened(NamedTuple):
    """Pending values of a program, some of which are one now.

    Attributes:
        values: Name of each value, flat ones first → the value.
        storages: Name of each flat value → what it takes the memory of, a value of its
            size that was made here.
    """

    values: dict[str, Tensor]
    storages: dict[str, Tensor]


def flatten(
    values: Mapping[str, Tensor],
    made: Sequence[FlatValue],
    parameters: Sequence[Tensor],
    read: Sequence[int],
    updated: Mapping[int, FlatValue],
) -> Flattened | None:
    """Let our own calls write pending values into flat ones, and read such operands.

    Args:
        values: What a program for one device returns, by name.
        made: What it may write to; notes what is in these.
        parameters: What it reads: tensors that torch_xla knows, not others of the same
            data, which it would take for new ones.
        read: Which of its parameters are flat values.
        updated: A flat parameter → the flat value that it returns in the same memory,
            with parts as large at the same places.

    Returns:
        What it returns then, None if that is the same and no call reads otherwise.
    """
    names = [*values]
    place_of = {name: place for place, name in enumerate(names)}
    pending = [*values.values()]
    found = cpu.placed_calls(
        xla_compat.hlo_module(pending),
        [[place_of[n] for n in flat.names if n in place_of] for flat in made],
        read,
        {
            number: {place_of[n]: part.offset for n, part in flat.parts.items()}
            for number, flat in updated.items()
        },
    )
    if found is None:
        return None
    for flat, pieces in zip(made, found.pieces, strict=True):
        flat.note(
            {
                names[place]: FlatPart(offset, tuple(pending[place].shape))
                for place, offset in pieces.items()
            }
        )
    sizes = dict(zip((flat.name for flat in made), found.sizes, strict=True))
    looks = {
        n: (torch.Size([size]), torch.float32) for n, size in sizes.items() if size
    }
    storages = xla_compat.new_values([*looks.values()])
    operands = [*parameters, *storages]
    results = xla_compat.call_module(found.module, operands[::-1], is_kept=False)
    gone = {name for flat in (*made, *updated.values()) for name in flat.parts}
    left = [*looks, *(flat.name for flat in updated.values())]
    left += [name for name in names if name not in gone]
    return Flattened(
        values=dict(zip(left, results, strict=True)),
        storages=dict(zip(looks, storages, strict=True)),
    )

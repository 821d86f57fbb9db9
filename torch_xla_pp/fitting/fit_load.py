"""What a compiled stage computes and exchanges on a device, for advice."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch_xla_pp.accelerators import CompiledProgram
from torch_xla_pp.advice import Exchange, StageLoad, when_of, whole_bytes

_STEP, _INFERENCE = "step", "inference"


class CompiledExchange(Protocol):
    """The equal exchanges of a compiled program."""

    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def axes(self) -> tuple[str, ...] | None: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102
    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def num_asynchronous(self) -> int: ...  # noqa: D102


class CompiledPart(Protocol):
    """A compiled program of a stage."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def compiled(self) -> CompiledProgram: ...  # noqa: D102
    @property
    def received_bytes(self) -> int: ...  # noqa: D102
    @property
    def collectives(self) -> Sequence[CompiledExchange]: ...  # noqa: D102


def load_of_stage(
    index: int, num_stages: int, parts: Sequence[CompiledPart], mesh: Mapping[str, int]
) -> StageLoad:
    """Return the load of a device for a microbatch of one stage.

    Values that one stage sends are counted at the stages that receive them.

    Args:
        index: Index of the stage.
        num_stages: Number of stages.
        parts: Its programs.
        mesh: Axes of a rank's devices → their sizes.
    """
    flops: dict[str, float] = {}
    accessed: dict[str, float] = {}
    exchanges: list[Exchange] = []
    for part in parts:
        when = when_of(part.name)
        if part.name == _INFERENCE:
            continue
        exchanges += _within(part, when, mesh)
        if when == _STEP:
            continue
        flops[when] = flops.get(when, 0.0) + part.compiled.flops
        accessed[when] = accessed.get(when, 0.0) + part.compiled.accessed_bytes
        comes = {"F": index > 0, "B": index < num_stages - 1}
        comes["I"] = comes["B"]
        if part.name != "loss" and comes.get(when) and part.received_bytes:
            exchanges.append(
                Exchange(
                    when=when,
                    kind="boundary",
                    axis="pp",
                    num_devices=1,
                    count=1,
                    num_bytes=part.received_bytes,
                )
            )
    return StageLoad(
        stage=index, flops=flops, accessed_bytes=accessed, exchanges=tuple(exchanges)
    )


def _within(
    part: CompiledPart, when: str, mesh: Mapping[str, int]
) -> Iterator[Exchange]:
    """Yield a program's exchanges, except those that are along no axes."""
    for found in part.collectives:
        if found.axes:
            size = math.prod(mesh[axis] for axis in found.axes)
            yield Exchange(
                when=when,
                kind=found.kind,
                axis="+".join(found.axes),
                num_devices=size,
                count=found.count,
                num_bytes=whole_bytes(found.kind, found.num_bytes, size),
                num_asynchronous=found.num_asynchronous,
            )

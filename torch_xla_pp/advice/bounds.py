"""What bounds a stage along an axis, and which changes would lift it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch_xla_pp.advice.exchanges import Exchange
from torch_xla_pp.advice.machine import PIPELINE, REPLICAS, Machine
from torch_xla_pp.advice.stage_loads import STEP, PipelineLoad, StageLoad, moved_in_step
from torch_xla_pp.text import seconds_text

MEMORY = "memory"
"""In the place of an axis: what a device reads and writes of its own memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A change to a pipeline, and its effect.

    Args:
        text: What to do.
        intensity: FLOP per byte with it, None if that is not known.
        is_enough: Whether products are then the bound.
    """

    text: str
    intensity: float | None = None
    is_enough: bool = False

    def __str__(self) -> str:
        if self.intensity is None:
            return self.text
        comes = f"{self.intensity:,.0f} FLOP per byte"
        return f"{self.text}: {comes}{', enough' if self.is_enough else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """An axis of a stage, and whether it or the products take longer.

    Args:
        stages: The stages of which that is true, alike.
        axis: The axis; "memory" for that of the device.
        strategy: What the axis is for, empty if not known.
        num_devices: Devices along it.
        intensity: Work of a step for each byte that goes along it.
        needed: What the machine does while it sends one.
        flops: That work.
        moved_bytes: These bytes.
        link_s: What the link takes in a step.
        work_s: What the products take meanwhile, at their peak.
        num_synchronous: Exchanges during which the device waits in any case.
        changes: What would help, if it is the bound.
    """

    stages: tuple[int, ...]
    axis: str
    strategy: str
    num_devices: int
    intensity: float
    needed: float
    flops: float
    moved_bytes: float
    link_s: float
    work_s: float
    num_synchronous: int = 0
    changes: tuple[Change, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Whether the link, and not the products, takes longer."""
        return self.intensity < self.needed

    @property
    def bound_by(self) -> str:
        """What takes longest."""
        if not self.is_bound:
            return "products"
        return "memory" if self.axis == MEMORY else "links"

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        name = f"{self.strategy} over {self.axis}" if self.strategy else self.axis
        size = f" ({self.num_devices} devices)" if self.num_devices > 1 else ""
        waits = (
            f"; products wait for {self.num_synchronous} of its exchanges"
            if self.num_synchronous
            else ""
        )
        yield (
            f"{name}{size}, {_numbered(self.stages)}: {self.intensity:,.0f} FLOP per "
            f"byte of {self.needed:,.0f}, bound by {self.bound_by}: "
            f"{seconds_text(self.link_s)} a step beside {seconds_text(self.work_s)} of "
            f"products{waits}"
        )
        yield from (f"  {change}" for change in self.changes)


def bound_of(
    load: PipelineLoad, stage: StageLoad, axis: str, machine: Machine
) -> Bound:
    """Return how an axis bounds a stage, and what would help."""
    exchanges = stage.over(axis)
    count = load.num_microbatches
    work = stage.work(exchanges, count)
    moved = sum(moved_in_step(exchange, count) for exchange in exchanges)
    found = Bound(
        stages=(stage.stage,),
        axis=axis,
        strategy=load.strategies.get(axis, "dp" if axis == REPLICAS else ""),
        num_devices=max(exchange.num_devices for exchange in exchanges),
        intensity=work / moved if moved else math.inf,
        needed=machine.intensity(axis),
        flops=work,
        moved_bytes=moved,
        link_s=moved / machine.bytes_per_s(axis),
        work_s=work / machine.flops_per_s,
        num_synchronous=sum(
            e.count - e.num_asynchronous
            for e in exchanges
            if e.num_asynchronous is not None
        ),
    )
    if not found.is_bound:
        return found
    case = _Case(
        load=load, stage=stage, exchanges=exchanges, bound=found, machine=machine
    )
    name = PIPELINE if axis == PIPELINE else found.strategy
    changes = [c for change in _CHANGES.get(name, _OF_ANY) for c in change(case)]
    changes += _faster_axis(case)
    return replace(found, changes=tuple(changes))


def memory_bound_of(
    load: PipelineLoad, stage: StageLoad, machine: Machine
) -> Bound | None:
    """Return how the device's memory bounds a stage, None if that is not known."""
    kinds = [kind for kind in stage.flops if stage.accessed_bytes.get(kind)]
    if not kinds:
        return None
    count = load.num_microbatches
    work = count * sum(stage.flops[kind] for kind in kinds)
    moved = count * sum(stage.accessed_bytes[kind] for kind in kinds)
    found = Bound(
        stages=(stage.stage,),
        axis=MEMORY,
        strategy="",
        num_devices=1,
        intensity=work / moved,
        needed=machine.memory_intensity,
        flops=work,
        moved_bytes=moved,
        link_s=moved / machine.memory_bytes_per_s,
        work_s=work / machine.flops_per_s,
    )
    if not found.is_bound:
        return found
    # The intensity of activations is the same for more rows; that of weights grows.
    text = "more rows in a microbatch, as each program reads all weights; or fused ops"
    return replace(found, changes=(Change(text=text),))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """An axis that is the bound."""

    load: PipelineLoad
    stage: StageLoad
    exchanges: tuple[Exchange, ...]
    bound: Bound
    machine: Machine

    def change(self, text: str, intensity: float) -> Change:
        # Room for the rounding of a factor that was found by a division.
        is_enough = intensity >= self.bound.needed * (1 - 1e-9)
        return Change(text=text, intensity=intensity, is_enough=is_enough)

    @property
    def factor(self) -> int:
        """How many times the work the bytes would need."""
        return math.ceil(self.bound.needed / self.bound.intensity - 1e-9)


def _more_rows(case: _Case) -> Iterator[Change]:
    """Multiply the rows between two exchanges of weights, or of their gradients.

    Source: MaxText's guide: the intensity of dp, fsdp and cp is the number of tokens
    on a device between two exchanges, whatever the model.
    """
    is_once = all(exchange.when == STEP for exchange in case.exchanges)
    what = (
        "rows in a step, by larger or by more microbatches"
        if is_once
        else "rows in a microbatch"
    )
    yield case.change(
        f"{case.factor} times the {what}", case.factor * case.bound.intensity
    )


def _gather_once(case: _Case) -> Iterator[Change]:
    """Gather weights once a step, and sum their gradients once.

    Source: MaxText's guide, `pipeline_fsdp_ag_once`.
    """
    gathers = [e for e in case.exchanges if e.kind == "all-gather" and e.when == "F"]
    sums = [e for e in case.exchanges if e.kind != "all-gather"]
    if not gathers or all(e.when == STEP for e in case.exchanges):
        return
    moved = sum(e.moved_bytes for e in [*gathers, *sums])
    # It runs beside any action of the step.
    work = case.load.num_microbatches * sum(case.stage.flops.values())
    if moved:
        held = sum(e.num_bytes for e in gathers)
        yield case.change(
            f"gather_once, which holds {held / 2**20:,.1f} MiB of weights and as much "
            "of gradients on each device",
            work / moved,
        )


def _smaller_axis(case: _Case) -> Iterator[Change]:
    """Take fewer devices for the axis, and more for another.

    A device then has more of the work, and sends as much or less: of n devices that
    gather or sum a value each sends (n - 1) / n of it, or twice that.
    """
    size = case.bound.num_devices
    needed = case.machine.line_intensity(case.bound.axis)
    for fewer in range(size - 1, 1, -1):
        found = _among(case, fewer)
        if size % fewer == 0 and found >= needed:
            text = f"an axis of {fewer} devices, and the others for another axis"
            yield Change(text=text, intensity=found, is_enough=True)
            return
    if size > 1:
        yield Change(text="no such axis: its devices for another one, or as ranks")


def _among(case: _Case, num_devices: int) -> float:
    """Return the intensity with fewer devices along the axis."""
    count = case.load.num_microbatches
    moved = sum(moved_in_step(e.among(num_devices), count) for e in case.exchanges)
    work = case.bound.flops * case.bound.num_devices / num_devices
    return work / moved if moved else math.inf


def _deeper_stages(case: _Case) -> Iterator[Change]:
    """Let stages have more layers: the work grows, what goes between them does not.

    Source: MaxText's guide: the intensity of a boundary is that of a layer times the
    layers of a stage.
    """
    factor, load = case.factor, case.load
    found = factor * case.bound.intensity
    if load.stages_per_rank >= factor:
        fewer = load.stages_per_rank // factor
        yield case.change(
            f"{fewer} stage{'s' * (fewer > 1)} on a rank in place of "
            f"{load.stages_per_rank}",
            load.stages_per_rank / fewer * case.bound.intensity,
        )
    elif load.num_ranks * load.stages_per_rank >= factor:
        yield case.change(
            f"stages of {factor} times the layers: fewer ranks in a pipeline, and more "
            "replicas",
            found,
        )
    else:
        yield Change(text="faster links between ranks, or no pipeline")


def _faster_axis(case: _Case) -> Iterator[Change]:
    """Exchange the axis with a faster one over which fewer bytes go."""
    own, machine = case.bound, case.machine
    if own.axis not in case.load.mesh:
        return
    rate = machine.bytes_per_s(own.axis)
    for axis, size in case.load.mesh.items():
        faster = machine.bytes_per_s(axis)
        if axis == own.axis or faster <= rate or size != own.num_devices:
            continue
        others = case.stage.over(axis)
        count = case.load.num_microbatches
        if sum(moved_in_step(e, count) for e in others) < own.moved_bytes:
            text = f"exchange it with {axis}, whose links are faster and less used"
            needed = machine.intensity(axis)
            yield Change(
                text=text,
                intensity=own.intensity,
                is_enough=own.intensity >= needed,
            )


_OF_ANY = (_smaller_axis,)
_CHANGES: Mapping[str, tuple[Callable[[_Case], Iterator[Change]], ...]] = {
    "dp": (_more_rows, _smaller_axis),
    "fsdp": (_gather_once, _more_rows, _smaller_axis),
    "fsdp_once": (_more_rows, _smaller_axis),
    "cp": (_more_rows, _smaller_axis),
    PIPELINE: (_deeper_stages,),
}


def _numbered(stages: tuple[int, ...]) -> str:
    """Write numbers, runs of them as 0..3."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    texts = [f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return f"stage{'s' * (len(stages) > 1)} {', '.join(texts)}"

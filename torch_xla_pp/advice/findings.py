"""From the work of stages and the figures of devices to what bounds the stages."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch_xla_pp.advice.bounds import Bound, bound_of, memory_bound_of
from torch_xla_pp.advice.machine import Machine
from torch_xla_pp.advice.stage_loads import PipelineLoad, StageLoad

# An exchange matters if it takes this share of the busiest stage's work.
_LEAST_SHARE = 0.05
_UNPROVEN = "from peaks; nothing was measured"


class Loaded(Protocol):
    """A source of the work of stages: a plan, a fit, a stage's explanation."""

    def load(self) -> PipelineLoad:
        """Return it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What bounds the stages of a pipeline; `print` shows all of it.

    Args:
        machine: The devices.
        bounds: Each axis, and the memory.
        busiest_s: What the products of the stage with most of them take in a step.
        bubble: Share of a step in which ranks wait, of equal stages.
        bubble_changes: What would shrink it, if it is large.
    """

    machine: Machine
    bounds: tuple[Bound, ...]
    busiest_s: float
    bubble: float
    bubble_changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        yield f"for {self.machine.name}, {_UNPROVEN}"
        yield from (f"  {line}" for line in self._lines(self.bounds))
        if not self.bubble_changes and self.bubble:
            yield f"  {self._bubble_text}"

    def faults(self) -> Iterator[str]:
        """Yield only the bounds that matter and could be lifted, as text."""
        least_s = _LEAST_SHARE * self.busiest_s
        found = (b for b in self.bounds if b.is_bound and b.link_s >= least_s)
        yield from self._lines(found)

    def _lines(self, bounds: Iterable[Bound]) -> Iterator[str]:
        for bound in bounds:
            yield from bound.lines()
        if self.bubble_changes:
            yield self._bubble_text
            yield from (f"  {text}" for text in self.bubble_changes)

    @property
    def _bubble_text(self) -> str:
        return (
            f"pipeline: ranks wait {100 * self.bubble:.1f} % of a step of equal stages"
            " with 1F1B"
        )


def advise(
    found: Loaded | PipelineLoad,
    *,
    device: str | Machine | None = None,
    links: Mapping[str, float] | None = None,
) -> Advice:
    """Find what bounds a pipeline on some devices, and what to change.

    Args:
        found: A `PipelinePlan`, a `Fit`, what `stage.explain()` returns, or the numbers
            themselves.
        device: "v4", "v5e", "v5p", "v6e", or the figures; None for those that a plan
            or a fit is for.
        links: Axis → bytes/s that a device sends along it, where these are others:
            "pp" between stages, "replicas" between pipelines.

    Raises:
        ValueError: No device is known.

    Example:
        >>> print(advise(plan, device="v5p", links={"replicas": 3e9}))
    """
    load = found if isinstance(found, PipelineLoad) else found.load()
    machine = _machine(load, device, links or {})
    bubble = bubble_of(load.num_ranks, load.stages_per_rank, load.num_microbatches)
    return Advice(
        machine=machine,
        bounds=tuple(_alike(_bounds(load, machine))),
        busiest_s=load.num_microbatches
        * max((sum(stage.flops.values()) for stage in load.stages), default=0.0)
        / machine.flops_per_s,
        bubble=bubble,
        bubble_changes=tuple(_against_bubble(load)),
    )


def bubble_of(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> float:
    """Return the share of a step in which ranks with equal stages wait.

    Source: MaxText's guide; Narayanan et al., "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", SC 2021, 2.2, as a share of all.
    """
    waiting = num_ranks - 1
    return waiting / (stages_per_rank * num_microbatches + waiting)


def _machine(
    load: PipelineLoad, device: str | Machine | None, links: Mapping[str, float]
) -> Machine:
    if isinstance(device, Machine):
        return device.with_links(links)
    if device is not None:
        return Machine.named(device, load.mesh, links)
    if load.machine is None:
        raise ValueError(
            "advise: expected a device, as these stages ran on none that has published "
            'figures, got none. Pass device="v5e", or a Machine.'
        )
    return load.machine.with_links(links)


def _bounds(load: PipelineLoad, machine: Machine) -> Iterator[Bound]:
    for axis in load.axes():
        for stage in load.stages:
            if stage.over(axis) and any(stage.flops.values()):
                yield bound_of(load, stage, axis, machine)
    for stage in load.stages:
        yield from _memory(load, stage, machine)


def _memory(load: PipelineLoad, stage: StageLoad, machine: Machine) -> Iterator[Bound]:
    found = memory_bound_of(load, stage, machine)
    if found is not None:
        yield found


def _alike(bounds: Iterator[Bound]) -> Iterator[Bound]:
    """Join bounds that are nearly equal on several stages into the worst of them."""
    joined: dict[object, list[Bound]] = {}
    for bound in bounds:
        key = bound.axis, bound.is_bound, f"{bound.intensity:.2g}"
        joined.setdefault(key, []).append(bound)
    for group in joined.values():
        worst = min(group, key=lambda bound: bound.intensity)
        stages = sorted(stage for bound in group for stage in bound.stages)
        yield replace(worst, stages=tuple(stages))


def _against_bubble(load: PipelineLoad) -> Iterator[str]:
    """Yield changes that shrink the bubble, below two microbatches for each rank.

    Source: MaxText's guide, which recommends twice as many microbatches as ranks.
    """
    wanted = 2 * load.num_ranks
    if load.num_ranks < 2 or load.num_microbatches >= wanted:
        return
    less = bubble_of(load.num_ranks, load.stages_per_rank, wanted)
    yield (
        f"{wanted} microbatches, two for each rank, in place of "
        f"{load.num_microbatches}: {100 * less:.1f} %"
    )
    more = bubble_of(load.num_ranks, 2 * load.stages_per_rank, load.num_microbatches)
    yield (
        f"{2 * load.stages_per_rank} stages on a rank (interleaved): "
        f"{100 * more:.1f} %, with as many more values between ranks"
    )

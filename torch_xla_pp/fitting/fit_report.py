"""Whether a pipeline fits its devices, program by program and rank by rank.

What a rank holds on a device at an action is

    parameters, buffers, gradients, optimizer      always
    saved activations of live microbatches         before the action
    values that the action receives                of one microbatch
    temporaries + outputs - outputs in buffers of arguments

The first three are bytes of values as they are sharded; of the padding of the device's
layout, that of the arguments of the action's own programs is added. The last is the
compiler's, in that layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.accelerators import Slice
from torch_xla_pp.advice import Machine, PipelineLoad, advise
from torch_xla_pp.fitting.fit_load import load_of_stage
from torch_xla_pp.fitting.stage_fit import (
    GATHERING,
    REDUCTION,
    StageFit,
    mib_text,
)
from torch_xla_pp.fitting.step_estimate import StepEstimate
from torch_xla_pp.schedule import Action, Schedule
from torch_xla_pp.simulate import Link
from torch_xla_pp.timeline import Timeline

_FORMAT = "torch_xla_pp fit 2"
_UNPROVEN = (
    "Nothing ran on a device. Bytes, FLOPs, cycles and collectives are the compiler's "
    "own, times of collectives come from published link speeds: no device has "
    "confirmed them. The optimizer's program is not compiled: its state is counted, "
    "and in the step the time to read and write it. Not counted: what the runtime "
    "holds, fragments of memory, padding of values that wait for their backward, "
    "starting programs."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFit:
    """The most that a rank holds on one device.

    Args:
        rank: The rank.
        stages: Its stages.
        state_bytes: Bytes that it holds all the time.
        peak_bytes: The most that it holds at once.
        peak_action: When that is: an action such as `0F3`, or what ends a step.
        num_live: How many microbatches are live then, of all its stages.
    """

    rank: int
    stages: tuple[int, ...]
    state_bytes: int
    peak_bytes: int
    peak_action: str
    num_live: int

    @classmethod
    def of(
        cls, rank: int, row: Sequence[Action], stages: Mapping[int, StageFit]
    ) -> "RankFit":
        """Add up the bytes of a rank, action by action.

        Args:
            rank: The rank.
            row: Its actions, in order.
            stages: Its stages by index.
        """
        state = sum(stage.state_bytes for stage in stages.values())
        moments = [*_moments(row, stages)]
        most, action, num_live = max(moments, key=lambda found: found[0])
        return cls(
            rank=rank,
            stages=tuple(sorted(stages)),
            state_bytes=state,
            peak_bytes=state + most,
            peak_action=action,
            num_live=num_live,
        )


def _moments(
    row: Sequence[Action], stages: Mapping[int, StageFit]
) -> Iterator[tuple[int, str, int]]:
    """Yield the bytes beside the state, their time, and the live microbatches then.

    Weights that are gathered once for a step are there until its end.
    """
    always = sum(
        p.extra_bytes
        for stage in stages.values()
        for p in stage.programs
        if p.name == GATHERING
    )
    kept, num_live = always, 0
    for action in row:
        stage, made = stages[action.stage], 0
        for program in stage.of_action(action.kind):
            yield kept + made + program.held_bytes, str(action), num_live
            # The loss reads the outputs of the forward.
            made += program.extra_bytes
        kept += stage.kept_by(action.kind)
        num_live += {"F": 1, "I": 0}.get(action.kind, -1)
    for stage in stages.values():
        for program in stage.programs:
            if program.name == REDUCTION:
                yield always + program.extra_bytes, program.name, 0
    yield always, "idle", 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Whether a pipeline fits its devices; `print` shows all of it.

    Args:
        topology: The devices of each rank, by the name that the compiler has for them.
        compiler: Version of the compiler.
        mesh: Axes of a rank's devices and their sizes.
        num_microbatches: Microbatches of a step.
        limit_bytes: The memory of a device that programs and values may use.
        stages: The stages.
        ranks: The memory of each rank.
        step: The time of a step, None unless all programs compile.
        strategies: Axis → what it is for, as far as rules show.
    """

    topology: str
    compiler: str
    mesh: Mapping[str, int]
    num_microbatches: int
    limit_bytes: int
    stages: tuple[StageFit, ...]
    ranks: tuple[RankFit, ...]
    step: StepEstimate | None = None
    strategies: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        stages: Sequence[StageFit],
        *,
        topology: str,
        compiler: str,
        mesh: Mapping[str, int],
        limit_bytes: int,
        link: Link | None = None,
        recorded: Timeline | None = None,
        strategies: Mapping[str, str] | None = None,
    ) -> "Fit":
        """Add up the memory of each rank under a schedule, and simulate a step.

        Args:
            schedule: The actions of each rank.
            stages: The stages.
            topology: As in the class, like the next three.
            compiler: See there.
            mesh: See there.
            limit_bytes: See there.
            link: As for `StepEstimate.of`.
            recorded: Likewise.
            strategies: As in the class, none if None.
        """
        known = {stage.index: stage for stage in stages}
        ranks = tuple(
            RankFit.of(rank, row, {i: known[i] for i in schedule.stages_of(rank)})
            for rank, row in enumerate(schedule.actions)
        )
        return cls(
            topology=topology,
            compiler=compiler,
            mesh=dict(mesh),
            num_microbatches=schedule.num_microbatches,
            limit_bytes=limit_bytes,
            stages=tuple(stages),
            ranks=ranks,
            step=None
            if any(stage.faults for stage in stages)
            else StepEstimate.of(
                schedule, stages, Slice.parse(topology), link=link, recorded=recorded
            ),
            strategies=dict(strategies or {}),
        )

    def load(self) -> PipelineLoad:
        """Return the work and the exchanges of a device, for `advise`."""
        count, devices = len(self.stages), Slice.parse(self.topology)
        links = {}
        if self.step is not None:
            # The devices of a rank share it.
            share = self.step.link_bytes_per_s / devices.num_devices
            links = {"pp": share, "replicas": share}
        return PipelineLoad(
            stages=tuple(
                load_of_stage(stage.index, count, stage.programs, self.mesh)
                for stage in self.stages
            ),
            num_microbatches=self.num_microbatches,
            num_ranks=len(self.ranks),
            stages_per_rank=max(len(rank.stages) for rank in self.ranks),
            mesh=self.mesh,
            strategies=self.strategies,
            machine=Machine.of_chip(devices.chip, self.mesh, links),
        )

    @property
    def compiles(self) -> bool:
        """Return whether all programs compile."""
        return not any(stage.faults for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Return whether all programs compile, and each rank has enough memory."""
        most = max(rank.peak_bytes for rank in self.ranks)
        return self.compiles and most <= self.limit_bytes

    def __str__(self) -> str:
        lines = [*self._summary(), "", *self._stage_lines(), ""]
        if self.compiles:
            lines += [*advise(self).lines(), ""]
        return "\n".join([*lines, _UNPROVEN])

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "Fit":
        """Read what `to_json` wrote: a file, or the text itself.

        Raises:
            ValueError: It is something else.
        """
        return record.from_json(cls, source, _FORMAT)

    def _summary(self) -> Iterator[str]:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        num_faults = sum(len(stage.faults) for stage in self.stages)
        num_programs = sum(len(stage.programs) for stage in self.stages)
        yield (
            f"{len(self.stages)} stages on {len(self.ranks)} ranks of {self.topology} "
            f"({axes}), {self.num_microbatches} microbatches, libtpu {self.compiler}"
        )
        yield f"{num_programs - num_faults} of {num_programs} programs compile"
        for rank in self.ranks:
            verdict = "fits" if rank.peak_bytes <= self.limit_bytes else "DOES NOT FIT"
            if any(self.stages[index].faults for index in rank.stages):
                verdict = "UNKNOWN, as not all of its programs compile; without them"
            stages = ", ".join(map(str, rank.stages))
            yield (
                f"rank {rank.rank}, stages {stages}: {verdict}: "
                f"{mib_text(rank.peak_bytes)} of {mib_text(self.limit_bytes)} per "
                f"device, at {rank.peak_action} with {rank.num_live} live "
                f"microbatches; {mib_text(rank.state_bytes)} always"
            )
        if self.step is not None:
            yield str(self.step)

    def _stage_lines(self) -> Iterator[str]:
        for stage in self.stages:
            yield from stage.lines()

"""The times of a model's works on chips that are not here, for a planner.

Every kind of work is compiled as a stage of its own for one chip; its time is that of
its programs by `ProgramTime`. Values between works then go through the chip's memory,
while within a stage many stay on the chip and operations of several works are fused:
the whole takes about half of the sum. So the whole model is compiled as one stage, too,
and the times of all F are scaled to add up to its F; those of B, I and W to its B.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_xla_pp.accelerators import CHIPS, AcceleratorCompiler, Slice
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting.abstract_stage import Loss
from torch_xla_pp.fitting.fit_pipeline import (
    check_devices,
    fitted_stages,
    stages_of_pipe,
)
from torch_xla_pp.fitting.stage_fit import StageFit
from torch_xla_pp.graph import GivenStages
from torch_xla_pp.launch import device
from torch_xla_pp.mesh import LogicalAxes
from torch_xla_pp.pipe import split_as
from torch_xla_pp.planner import MeasuredCosts, RowSeconds, WorkSeconds, with_rows
from torch_xla_pp.schedule import Kind, Schedule, gpipe
from torch_xla_pp.work import WorkGraph


def compile_work(
    work: WorkGraph,
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    *,
    chip: str,
    loss_fn: Callable[..., Any] | None = None,
    target: Tensor | None = None,
    activations: Mapping[str, LogicalAxes] | None = None,
    compiler: AcceleratorCompiler | None = None,
) -> MeasuredCosts:
    """Compile each kind of work of a model for one chip, and return its times.

    Nothing runs, and values may be on meta. The process has one CPU device in place of
    the chip. Each kind takes some seconds, for two numbers of rows: those of the
    example and half of them; so does the model as a whole, which takes minutes if it
    has dozens of layers: give one with fewer of them, as equal layers have equal works.
    If the whole does not compile, as it does not fit one chip, the times of works are
    not scaled, and `compiler` of the result says so.

    Args:
        work: What `trace_work` made of the model and this example.
        module: The model.
        mb_args: Positional arguments of a microbatch.
        mb_kwargs: Its keyword arguments.
        chip: Kind of the chip, such as "v5p".
        loss_fn: Computes the loss from output and target.
        target: The target of the microbatch.
        activations: As for `trace_work`.
        compiler: The compiler; None for the library that is installed.

    Raises:
        PipelineError: There is no compiler, or a work does not compile.
        ValueError: There is no such chip, or the process has several devices.
    """
    devices = one_chip(chip)
    compiler = compiler or AcceleratorCompiler(devices)
    device()
    check_devices(devices, {"data": 1})
    model = module, (mb_args, mb_kwargs or {}, target)
    setting = _Setting(work, model, loss_fn, dict(activations or {}), compiler)
    firsts = {item.digest: place for place, item in enumerate(work.works)}
    rows = tuple(sorted({max(1, work.rows // 2), work.rows}))
    apart = [setting.stages(count, set(firsts.values())) for count in rows]
    _check(apart, work)
    factors = setting.factors(apart[-1], firsts)

    def line(place: int, kind: Kind) -> RowSeconds:
        seconds = [stages[place].seconds(kind) for stages in apart]
        factor = factors.get("F" if kind == "F" else "B", 1.0)
        return RowSeconds.fitted(rows, [factor * s for s in seconds])

    name = f"libtpu {compiler.library.version}"
    return MeasuredCosts(
        device=chip,
        rows=rows,
        action_s=0.0,
        works=tuple(
            WorkSeconds(
                digest=digest,
                name=work.works[place].name,
                forward=line(place, "F"),
                backward=line(place, "B"),
                backward_input=line(place, "I"),
                backward_weight=line(place, "W"),
            )
            for digest, place in firsts.items()
        ),
        compiler=name if factors else f"{name}, works one by one",
    )


class _Setting(NamedTuple):
    """A model to compile, and its compiler."""

    work: WorkGraph
    model: tuple[nn.Module, Any]
    loss_fn: Callable[..., Any] | None
    activations: dict[str, LogicalAxes]
    compiler: AcceleratorCompiler

    def stages(
        self, rows: int, indices: set[int], *, is_whole: bool = False
    ) -> dict[int, StageFit]:
        """Compile some works as stages, or the whole as one."""
        works = self.work.works
        count = 1 if is_whole else len(works)
        homes = {op: n for n, item in enumerate(works) for op in item.ops}
        parts = GivenStages(
            names=tuple(f"work_{place}" for place in range(count)),
            stages=dict.fromkeys(homes, 0) if is_whole else homes,
        )
        module, example = self.model
        args, kwargs, labels = with_rows(example, rows)
        has_loss = self.loss_fn is not None and labels is not None
        pipe = split_as(module, args, kwargs, parts, activations=self.activations)
        found = fitted_stages(
            *stages_of_pipe(pipe),
            (args, kwargs),
            _all_kinds(count) if not is_whole else gpipe(1, 1),
            devices=self.compiler.topology,
            mesh={"data": 1},
            compiler=self.compiler,
            loss=Loss(self.loss_fn, labels) if self.loss_fn and has_loss else None,
            indices=indices,
        )
        return {stage.index: stage for stage in found}

    def factors(
        self, apart: Mapping[int, StageFit], firsts: Mapping[str, int]
    ) -> dict[Kind, float]:
        """Return the time of the whole over that of its works; none without it."""
        (whole,) = self.stages(self.work.rows, {0}, is_whole=True).values()
        if whole.faults:
            return {}
        found: dict[Kind, float] = {}
        kinds: tuple[Kind, ...] = ("F", "B")
        for kind in kinds:
            places = [firsts[item.digest] for item in self.work.works]
            sum_s = sum(apart[place].seconds(kind) for place in places)
            found[kind] = whole.seconds(kind) / sum_s if sum_s else 1.0
        return found


def one_chip(kind: str) -> Slice:
    """Return a slice of a single chip.

    Raises:
        ValueError: There is no such kind.
    """
    num_dims = CHIPS[kind].num_dims if kind in CHIPS else 1
    return Slice(kind=kind, shape=(1,) * num_dims)


def _all_kinds(num_stages: int) -> Schedule:
    """Return the order of one rank with all stages, with every kind of action."""
    stages = range(num_stages)
    rows = [("F", 0, stages), ("B", 0, reversed(stages)), ("F", 1, stages)]
    rows += [("I", 1, reversed(stages)), ("W", 1, reversed(stages))]
    cells = " ".join(f"{n}{kind}{mb}" for kind, mb, order in rows for n in order)
    return Schedule.from_cells([cells.split()])


def _check(apart: Sequence[Mapping[int, StageFit]], work: WorkGraph) -> None:
    """Refuse works that do not compile."""
    faults = [
        f"{work.works[stage.index].name}, {program.name}: {program.compiled.error}"
        for stages in apart
        for stage in stages.values()
        for program in stage.faults
    ]
    if faults:
        raise PipelineError(
            "compile_work: expected works that compile, got\n"
            + "\n".join(faults)
            + "\nWrite them with other operations, or plan by rooflines."
        )

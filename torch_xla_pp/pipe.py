"""From a model to stages: trace, split, place, compile, run.

`pipeline` does the first two steps and `Pipe.build_stage` the third; programs are
compiled when a schedule of torch.distributed.pipelining runs its first step.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint
from torch.utils import _pytree as pytree

from torch_xla_pp.collector import sparing_old_objects
from torch_xla_pp.compile import Remat
from torch_xla_pp.deferred import (
    back_to_meta,
    parameter_names,
    places_of,
    record_resets,
    shapes_of,
)
from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import (
    BakedModel,
    GivenStages,
    Prepared,
    add_mode,
    begin_modes,
    check_split_spec,
    describe_stages,
    finish_split,
    follow_mode,
    for_each_mode,
    has_mixed_mode,
    in_mode,
    inputs_in_shapes,
    keep_parameters,
    keep_persistence,
    prepare,
    reads_training,
    refuse_modes,
    tie_parameters,
)
from torch_xla_pp.launch import PipelineMesh, device
from torch_xla_pp.mesh import AxisRules, LogicalAxes, Sharding, unmatched
from torch_xla_pp.phases import phase
from torch_xla_pp.plan import StageInputs
from torch_xla_pp.planned import (
    check_example,
    check_parameters,
    given_stages,
    planned_rules,
    planned_schedule,
)
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.retracing import Retracing
from torch_xla_pp.runtime import (
    PipelineStage,
    TracedModel,
    check_plain_module,
)
from torch_xla_pp.torch_pipe import (
    SPLIT_MARK,
    move_factories_to,
    noting_code,
    trace_and_split,
)
from torch_xla_pp.torch_pipe import Pipe as _TracedPipe
from torch_xla_pp.tracing import tracing


class Pipe(_TracedPipe):
    """A model that was traced and split into stages.

    As `torch.distributed.pipelining.Pipe`, but its stages run on XLA devices. Made by
    `pipeline`. The first stage's module takes the model's arguments and the last one's
    returns the model's outputs; between them, modules take and
    return the tensors of `stage_graph`.

    Args:
        traced: The traced and split model; this object takes it over.
        prepared: Facts about the model before it was split.
        model: The model that was traced; stages have its parameters.
        names: All names of each parameter of the model.
        activations: The `AxisRules.activations` that the trace has.

    Attributes:
        stage_graph: The stages and the values that flow between them; with their
            shardings once a stage was built.
        plan: The plan by which the model was split, None if there is none.
    """

    def __init__(
        self,
        traced: _TracedPipe,
        prepared: Prepared,
        model: nn.Module,
        names: Sequence[tuple[str, ...]],
        activations: Mapping[str, LogicalAxes],
    ) -> None:
        self._activations = activations
        self._baked: BakedModel | None = None
        self._retracing: Retracing | None = None
        self.plan: PipelinePlan | None = None
        finish_split(traced.split_gm, prepared)
        super().__init__(
            traced.split_gm,
            traced.num_stages,
            traced.has_loss_and_backward,
            traced.loss_spec,
        )
        self.replicated_params = traced.replicated_params
        for index in range(self.num_stages):
            tie_parameters(names, self.get_stage_module(index))
            keep_parameters(model, self.get_stage_module(index))
            keep_persistence(model, self.get_stage_module(index))
        self.stage_graph = describe_stages(self.split_gm, prepared.names, names)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run all stages in this process, one after the other.

        Takes the model's arguments; returns the leaves of the model's outputs, as
        upstream does.
        """
        for index in range(self.num_stages):
            follow_mode(self.get_stage_module(index))
        results: dict[int, Any] = {0: self.get_stage_module(0)(*args, **kwargs)}
        for index in range(1, self.num_stages):
            inputs = StageInputs.of(index, self.stage_graph.sources(index))
            values, _ = inputs.arguments(results)
            results[index] = self.get_stage_module(index)(*values)
        return tuple(pytree.tree_leaves(results[self.num_stages - 1]))

    def build_stage(  # type: ignore[override]  # another class of stage
        self,
        stage_index: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: Any | None = None,
        sharding: Sharding | None = None,
        batch_axis: str | tuple[str, ...] | None = "auto",
        remat: Remat = "none",
        replicas: dist.ProcessGroup | None = None,
    ) -> PipelineStage:
        """Make the stage that this rank runs.

        Args:
            stage_index: Index of the stage.
            device: `xpp.device()`.
            group: Group of the pipeline's ranks; None for the default group.
            mesh: As for `PipelineStage`.
            sharding: As for `PipelineStage`; in a mapping the first match counts, and
                values without a match are replicated.
            batch_axis: As for `PipelineStage`.
            remat: As for `PipelineStage`.
            replicas: As for `PipelineStage`.

        Raises:
            ValueError: An argument does not fit.
        """
        if isinstance(sharding, AxisRules):
            sharding = self._without_activations(sharding)
        module: nn.Module = nn.Module()
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.num_stages):
            shapes |= shapes_of(self.get_stage_module(index))
        expected, sources, tied = None, None, None
        if 0 <= stage_index < self.num_stages:
            module = self.get_stage_module(stage_index)
            for_each_mode(module, lambda module: move_factories_to(module, device))
            expected = _traced_inputs(module)
            sources = self.stage_graph.sources(stage_index)
            tied = self.stage_graph.shared_of(stage_index)
            if self._baked is not None:
                self._baked.part_from(module)
        stage = PipelineStage(
            module,
            stage_index,
            self.num_stages,
            device,
            group=group,
            mesh=mesh,
            sharding=sharding,
            batch_axis=batch_axis,
            remat=remat,
            inputs_from=sources,
            tied=tied,
            replicas=replicas,
            input_args=None if expected is None else tuple(expected),
            traced=TracedModel(
                shapes=shapes,
                baked=self._baked,
                retracing=self._retracing,
                plan="" if self.plan is None else self.plan.digest,
            ),
        )
        if expected is not None:
            self._note_shardings(stage)
        return stage

    def build_stages(
        self, mesh: PipelineMesh, *, sharding: AxisRules | None = None
    ) -> list[PipelineStage]:
        """Make the stages that this rank runs by the plan.

        Args:
            mesh: The result of `init_device_mesh("xla", plan=plan)`.
            sharding: The logical axes of the model's parameters and activations; the
                plan's presets determine how these axes are split.

        Raises:
            ValueError: The model was not split by a plan, or an argument does not fit.
        """
        plan = self._planned("build_stages")
        rank = mesh.get_local_rank("pp")
        own = plan.ranks[rank]
        rules = planned_rules(plan, rank, sharding)
        replicas = mesh.get_group("dp") if plan.batch.replicas > 1 else None
        return [
            self.build_stage(
                index,
                device(),
                mesh.get_group("pp"),
                mesh=mesh[tuple(own.mesh)] if own.mesh else None,
                sharding=rules if own.rules else None,
                batch_axis=own.batch_axis,
                remat=_remat(stage.remat),
                replicas=replicas,
            )
            for index, stage in enumerate(plan.stages)
            if stage.rank == rank
        ]

    def make_schedule(
        self,
        stages: Sequence[PipelineStage],
        loss_fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> Any:
        """Make the schedule that runs stages in the order of the plan.

        It is torch's class where one has that order, else a `ScheduleFromTable`.

        Args:
            stages: The result of `build_stages`.
            loss_fn: As for the schedules of torch.distributed.pipelining.
            **options: Likewise.

        Raises:
            ValueError: The model was not split by a plan.
        """
        plan = self._planned("make_schedule")
        return planned_schedule(plan, stages, loss_fn, **options)

    def _planned(self, what: str) -> PipelinePlan:
        if self.plan is None:
            raise ValueError(
                f"{what}: expected a model that was split by a plan, got one that was "
                "not. Pass plan= to pipeline, or build each stage by build_stage."
            )
        return self.plan

    def _without_activations(self, rules: AxisRules) -> AxisRules:
        """Return axis rules without activations, which the trace has."""
        if rules.activations and rules.activations != self._activations:
            raise ValueError(
                "sharding: axis rules: expected the activations that the model was "
                f"traced with, got {dict(rules.activations)}. Pass them to pipeline, "
                "too: activations=rules.activations."
            )
        return replace(rules, activations={})

    def _note_shardings(self, stage: PipelineStage) -> None:
        """Write the shardings of values on this rank into the stage graph."""
        first = self.stage_graph.stages[0].inputs
        rows = next((value.shape[0] for value in first if value.shape), 1)
        layout = stage.model.world.layout

        def text(shape: tuple[int, ...], logical: LogicalAxes | None) -> str:
            axes = layout.partition_of(logical, shape, rows)
            return f"({', '.join(map(str, axes))})"

        self.stage_graph = self.stage_graph.with_shardings(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cuts:
    """The ways to choose where to split a model, of which at most one is given."""

    spec: dict[str, SplitPoint]
    policy: Callable[[fx.GraphModule], fx.GraphModule] | None
    given: GivenStages | None

    def __post_init__(self) -> None:
        given: dict[str, Any] = {"split_spec": self.spec, "split_policy": self.policy}
        given["plan"] = self.given
        names = [name for name, value in given.items() if value]
        if len(names) > 1:
            raise ValueError(
                "pipeline: expected at most one of split_spec, split_policy and plan, "
                f"got {' and '.join(names)}. Leave the others out."
            )


@sparing_old_objects()
def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    *,
    activations: Mapping[str, LogicalAxes] | None = None,
    plan: PipelinePlan | None = None,
) -> Pipe:
    """Trace a model and split it into stages.

    As `torch.distributed.pipelining.pipeline`, whose tracer does the work.

    Args:
        module: The model, on the host, on meta, or built under `deferred_init`.
        mb_args: Example of one microbatch's positional arguments.
        mb_kwargs: Example of its keyword arguments.
        split_spec: Name of a submodule → where to split at it.
        split_policy: Splits the traced graph in another way; runs before the marks of
            `pipeline_yield` are read.
        activations: Glob pattern on submodule names → logical axes of their outputs;
            `AxisRules.activations` of the rules for `Pipe.build_stage`.
        plan: A plan with the stages; marks in the model are then ignored.

    Raises:
        TypeError: The model is wrapped for data parallelism.
        ValueError: The example is not on the model's device; `split_spec` names
            unknown submodules; more than one of `split_spec`, `split_policy` and
            `plan` is given; or `activations` do not fit the model.
        PlanError: The model cannot be split at its marks, or is not the one that was
            planned.
        PipelineError: The model cannot be traced.

    Example:
        >>> pipe = pipeline(model, mb_args=(x,),
        ...                 split_spec={"layers.4": SplitPoint.BEGINNING})
    """
    check_plain_module("pipeline", module)
    _check_devices(module, (mb_args, mb_kwargs))
    check_split_spec(module, split_spec or {})
    given = None if plan is None else given_stages(plan)
    cuts = _Cuts(spec=split_spec or {}, policy=split_policy, given=given)
    if plan is not None:
        check_example(plan, (mb_args, mb_kwargs))
    activations = dict(activations or {})
    _check_activations(module, activations)
    record_resets(module)
    with noting_code() as codes:
        pipe = _traced(module, mb_args, mb_kwargs, cuts, activations)
    if plan is not None:
        check_parameters(plan, _parameter_bytes(pipe))
        pipe.plan = plan
    is_switched = reads_training(module, codes)
    names = {place.name for place in places_of(module)}
    for stage in _stage_modules(pipe):
        begin_modes(stage, module, is_switched=is_switched)
    missing = (True, False) if has_mixed_mode(module) else (not module.training,)
    for training in missing if is_switched else ():
        try:
            with in_mode(module, training):
                other = _traced(module, mb_args, mb_kwargs, cuts, activations)
            _add_mode(pipe, other, names, training)
        except Exception as error:
            for stage in _stage_modules(pipe):
                reason = (
                    f"The model cannot be traced so: {type(error).__name__}: {error}"
                )
                refuse_modes(stage, reason)
    dump("stage_graph.txt", pipe.stage_graph.__str__)
    pipe._baked = BakedModel(module)
    pipe._retracing = Retracing(
        module,
        (mb_args, mb_kwargs),
        parameters=list(inspect.signature(pipe.get_stage_module(0).forward).parameters),
        names=names,
        split=lambda model, args, kwargs: _traced(
            model, args, kwargs, cuts, activations
        ),
        stage_graph=pipe.stage_graph,
    )
    return pipe


def split_as(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
    given: GivenStages,
    *,
    activations: Mapping[str, LogicalAxes] | None = None,
) -> Pipe:
    """Trace a model in its present mode and split it into given stages."""
    record_resets(module)
    cuts = _Cuts(spec={}, policy=None, given=given)
    return _traced(module, mb_args, mb_kwargs, cuts, dict(activations or {}))


def _parameter_bytes(pipe: Pipe) -> int:
    """Return the size of all parameters of all stages, shared ones once."""
    stages = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    found = {id(value): value for stage in stages for value in stage.parameters()}
    return sum(value.numel() * value.element_size() for value in found.values())


def _stage_modules(pipe: Pipe) -> list[fx.GraphModule]:
    modules = [pipe.get_stage_module(index) for index in range(pipe.num_stages)]
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def _add_mode(pipe: Pipe, other: Pipe, names: Collection[str], training: bool) -> None:
    """Add the stages of another pipe to those of a pipe, as another mode."""
    if _interface(pipe) != _interface(other):
        raise PlanError("in this mode other values go between the stages")
    for stage, added in zip(_stage_modules(pipe), _stage_modules(other), strict=True):
        add_mode(stage, added, names, training=training)


def _interface(pipe: Pipe) -> tuple[Any, ...]:
    """Return the inputs of stages from each other and from outside."""
    graph = pipe.stage_graph
    values = [
        [(value.shape, value.dtype) for value in (*stage.inputs, *stage.outputs)]
        for stage in graph.stages
    ]
    return values, graph.edges, graph.shared


@phase("split")
def _traced(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None,
    cuts: _Cuts,
    activations: Mapping[str, LogicalAxes],
) -> Pipe:
    """Trace a model in its present mode and split it."""
    names = parameter_names(module)
    prepared: list[Prepared] = []

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        traced = traced if cuts.policy is None else cuts.policy(traced)
        prepared.append(prepare(traced, SPLIT_MARK, cuts.given))
        return traced

    with tracing(module, names, activations) as faked:
        mb_args, mb_kwargs = faked((mb_args, mb_kwargs))
        split = trace_and_split(module, mb_args, mb_kwargs, cuts.spec, policy)
    back_to_meta(split.split_gm)
    return Pipe(split, prepared[-1], module, names, activations)


def _remat(name: str) -> Remat:
    """Return the remat of a stage in the words of plans."""
    return "full" if name == "full" else "none"


def _check_devices(module: nn.Module, example: Any) -> None:
    """Refuse an example that is on another device than the model."""
    tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, torch.Tensor)]
    homes = {value.device.type for value in [*module.parameters(), *module.buffers()]}
    found = {value.device.type for value in tensors}
    if "meta" not in homes | found and homes and found - homes:
        raise ValueError(
            f"pipeline: expected the example on the model's device, "
            f"{', '.join(sorted(homes))}, got it on {', '.join(sorted(found))}. Leave "
            "the model where it was made, on the host: its stages are moved when they "
            "are built; or move mb_args, too."
        )


def _check_activations(
    module: nn.Module, activations: Mapping[str, LogicalAxes]
) -> None:
    """Refuse patterns that match no submodule."""
    missing = unmatched(activations, [name for name, _ in module.named_modules()])
    if missing:
        raise ValueError(
            "activations: expected patterns that match submodules of the model, got "
            f"{', '.join(map(repr, missing))}. Correct them or leave them out."
        )


def _traced_inputs(module: nn.Module) -> list[torch.Tensor] | None:
    """Return the inputs of a traced stage with the example."""
    return inputs_in_shapes(module, 0) if isinstance(module, fx.GraphModule) else None

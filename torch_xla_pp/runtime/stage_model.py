"""A stage's module on its rank: its values, its gradients, and its programs."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, fx, nn

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.channels import Endpoint, Links, Observer, StageValues
from torch_xla_pp.compile import (
    CompiledStage,
    Explanation,
    Remat,
    StageCompiler,
    StageKind,
    StageSource,
    StageTracer,
    bytes_of,
    check_remat,
    costs_of,
    device_bytes,
    input_role,
    name_in_module,
    parameter_role,
)
from torch_xla_pp.errors import StageShapeError
from torch_xla_pp.graph import (
    Baked,
    Captured,
    Template,
    follow_mode,
    in_shapes,
    inputs_in_shapes,
)
from torch_xla_pp.mesh import AxisRules, BatchAxis, Sharding, TensorSpec, Tiling
from torch_xla_pp.plan import (
    Arguments,
    InputsFrom,
    Mode,
    StageClaim,
    StageInputs,
    StagePlan,
    StagePlanner,
    Value,
    Wiring,
    autocast_dtype,
    check_no_grad,
    describe_all,
)
from torch_xla_pp.runtime.gradients.finish import StageGradients
from torch_xla_pp.runtime.gradients.replicas import Replicas, group_of_replicas
from torch_xla_pp.runtime.gradients.sums import GradientSums
from torch_xla_pp.runtime.gradients.tied import TiedParameters, separated
from torch_xla_pp.runtime.wrong_input import free_parameters, matched_patterns
from torch_xla_pp.state import ModuleState
from torch_xla_pp.transport import LinkedGroups, Message, XlaPpProcessGroup
from torch_xla_pp.world import World


class OtherShapes(Protocol):
    """A tracer of a model for other shapes than those of its example."""

    def number(self, call: Arguments) -> int:
        """Return the number of a model's arguments, 0 for its example."""

    def add_to(
        self,
        stage: nn.Module,
        index: int,
        number: int,
        placed: Callable[[Tensor], Tensor],
    ) -> None:
        """Add the graph for these to a stage, in its present mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModel:
    """Facts about the traced model that a stage was cut from.

    Args:
        shapes: Name → shape of what all stages have.
        baked: The values that the trace has built in, None if not known.
        retracing: Traces it for other shapes, None if nothing does.
        plan: Digest of the plan by which it was cut; empty if by none.
    """

    shapes: Mapping[str, tuple[int, ...]]
    baked: Baked | None
    retracing: OtherShapes | None = None
    plan: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """The options of a stage; see `PipelineStage` for the arguments."""

    mesh: Any | None
    sharding: Sharding | None
    batch_axis: BatchAxis
    remat: Remat
    inputs_from: InputsFrom | None
    tied: Mapping[str, str] | None
    input_args: Sequence[Tensor] | None
    output_args: Sequence[Tensor] | None
    traced: TracedModel | None


class StageModel:
    """A stage's module on its rank.

    Args:
        module: The module; moved to the device in place.
        stage: Index of the stage.
        num_stages: Number of stages of the pipeline.
        group: The ranks of the pipeline.
        replicas: The ranks that run the stage in each replica, None if there is one.
        options: The options of the stage.

    Attributes:
        module: As given.
        index: Index of the stage.
        num_stages: As given.
        is_first: Whether no stage comes before it.
        is_last: Whether no stage comes after it.
        world: The devices of its rank.
        state: Its parameters and buffers.
        sums: The gradients of a step.
        gradients: The same, with those from other stages and replicas.
        replicas: The same stage of other pipelines, None if there are none.
        planner: The facts that its plans follow from.
        mode: The mode that its module was in when it was last looked at.
    """

    def __init__(
        self,
        module: nn.Module,
        stage: int,
        num_stages: int,
        group: XlaPpProcessGroup,
        replicas: XlaPpProcessGroup | None,
        options: StageOptions,
    ) -> None:
        check_remat(options.remat)
        self.module = module
        self.index, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self._inputs = StageInputs.of(stage, options.inputs_from)
        sharding = {} if options.sharding is None else options.sharding
        tied, traced = options.tied or {}, options.traced
        rules = sharding if isinstance(sharding, AxisRules) else None
        shapes = None if traced is None else traced.shapes
        self.world = World(options.mesh, options.batch_axis, rules)
        # Before parameters are replaced on the device.
        self._patterns = matched_patterns(rules, module, shapes)
        self._mirrors = separated(module, tied)
        self.state = ModuleState(
            module, self.world, {} if sharding is None else sharding, shapes
        )
        self._transport = group.transport
        self._endpoint = Endpoint(group)
        self._tied = TiedParameters(stage, module, tied, self._endpoint)
        self.replicas = None if replicas is None else Replicas(stage, module, replicas)
        self.sums = GradientSums(self.state)
        self.gradients = StageGradients(
            sums=self.sums,
            group=group,
            tied=self._tied,
            replicas=self.replicas,
        )
        self.planner = StagePlanner(
            stage=stage,
            layout=self.world.layout,
            free_parameters=lambda *taken: free_parameters(module, *taken),
            expected_inputs=_texts(options.input_args),
        )
        self._input_args = options.input_args
        self._captured = Captured(module)
        self._tracer = StageTracer(module, self.world, self._in_shapes)
        self._source: StageSource[Links] = StageSource(
            tracer=self._tracer,
            captured=self._captured,
            world=self.world,
            fixed=self.state,
            link=self._link,
            remat=options.remat,
            is_last=self.is_last,
            is_recycling=cpu.is_recycling(),
            most_joined=cpu.most_joined_bytes(),
            expected_outputs=_texts(options.output_args),
        )
        self._retracing = traced.retracing if traced else None
        self.plan = traced.plan if traced else ""
        own = Baked(self._captured)
        self._baked = [traced.baked, own] if traced and traced.baked else []
        self._wiring: Wiring | None = None
        self.mode = Mode.of(self._captured)

    # Before the first step.

    def claim(self) -> StageClaim:
        """Return the claim of the stage, for the other ranks."""
        return StageClaim(
            index=self.index,
            inputs=self._inputs,
            shared=self._tied.describe(),
            tilings=self._tied.tilings(),
            patterns=self._patterns,
        )

    def connect(self, wiring: Wiring) -> None:
        """Prepare for messages of other stages, whose ranks are now known."""
        self._wiring = wiring
        me = self.index
        for producer in wiring.producers(me):
            message = Message("F", me, 0, producer)
            self._transport.expect(message, wiring.ranks[producer])
        for consumer in wiring.consumers(me):
            message = Message("B", me, 0, consumer)
            self._transport.expect(message, wiring.ranks[consumer])
        self._tied.connect(wiring)
        copies = self._tied.copies(wiring)
        self.state.copies = {parameter_role(name) for name in copies}

    # At the beginning of a step.

    def begin_step(self, observer: Observer | None) -> None:
        """Move values that the user has changed onto the device.

        Args:
            observer: The observer of messages through the host, None for none.
        """
        self._endpoint.observer = observer
        for mirror in self._mirrors:
            mirror.follow()
        self.state.begin_step()
        self.sums.begin_step()

    def drop_leftovers(self) -> None:
        """Drop the messages that a failed step has left."""
        self._endpoint.forget(self.index)
        if self.replicas is not None:
            self.replicas.forget()

    def look(self) -> Mode:
        """Look at the mode that the module is in."""
        follow_mode(self.module)
        for baked in self._baked:
            baked.check()
        self.mode = Mode.of(self._captured)
        return self.mode

    def kind_of_step(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Arguments, Mode]:
        """Return the key of a kind of step, for the first stage."""
        arguments, _ = Arguments.of(args, kwargs)
        return arguments, self.mode

    def call_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | None:
        """Return the arguments of the model, for the first stage of a traced one."""
        if self._retracing is None:
            return None
        free = self.planner.free_parameters(0, ())
        own = {k: v for k, v in kwargs.items() if free is None or k in free}
        return Arguments.of(args, own)[0]

    def shapes_of_call(self, call: Arguments | None) -> int:
        """Return the number of the shapes that the model is called with.

        The model is traced for them if it was not before.

        Raises:
            StageShapeError: It cannot be.
        """
        if self._retracing is None or call is None:
            return 0
        number = self._retracing.number(call)
        self._retrace(self._retracing, number)
        return number

    def planner_for(self, shapes: int) -> StagePlanner:
        """Return the planner of the stage for these shapes, under this autocast."""
        expected = self.planner.expected_inputs
        if shapes and isinstance(self.module, fx.GraphModule):
            expected = _texts(inputs_in_shapes(self.module, shapes))
        return replace(
            self.planner, expected_inputs=expected, autocast=autocast_dtype()
        )

    def trace_ahead(self, shapes: int) -> None:
        """Trace the stage before other stages have told what it takes.

        Only if it is known what that looks like, which depends on autocast.
        """
        if autocast_dtype() is not None:
            return
        examples = self._input_args
        if shapes and isinstance(self.module, fx.GraphModule):
            examples = inputs_in_shapes(self.module, shapes)
        if examples is not None and not self.is_first:
            self._tracer.trace_ahead(self.mode, shapes, examples)

    def compiler(self, plan: StagePlan, shapes: int) -> StageCompiler[Links]:
        """Return the compiler of the stage for a plan."""
        return StageCompiler(self._source, plan, shapes)

    def tilings(self, kind: StageKind[Links]) -> dict[Value, Tiling]:
        """Return the tilings of the stage's inputs and outputs over this rank."""
        held = kind.plan.held(kind.compiled(self.mode).outputs)
        layout = self.world.shard_layout
        return {value: layout(spec).tiling for value, spec in held.items()}

    # In a step.

    def publish(self) -> None:
        """Publish the gradients of the step as `.grad`, when it is done."""
        self.sums.publish()
        self.state.end_step()

    def roll_back(self) -> None:
        """Undo the effects of a failed step."""
        self.state.roll_back()
        self.sums.drop()

    def given(
        self,
        plan: StagePlan,
        microbatch: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Return the schedule's arguments for one microbatch, as device data.

        Raises:
            StageShapeError: They differ from those of this kind of step.
            ValueError: One needs a gradient.
        """
        own = {k: v for k, v in kwargs.items() if plan.takes(k)}
        outside = plan.given_arguments.tensors_of(args, own)
        if outside is None:
            arguments, _ = Arguments.of(args, own)
            raise StageShapeError(
                f"stage {self.index}, microbatch {microbatch}: expected "
                f"arguments {plan.given_arguments}, got {arguments}. "
                "Use a batch that divides into equal microbatches; arguments of a "
                "later stage may change only when the first stage's do."
            )
        check_no_grad(self.index, outside)
        given = [
            self.world.pin(value, spec.partition)
            for value, spec in zip(outside, plan.given, strict=True)
        ]
        if any(xla_compat.are_pending(given)):
            xla_compat.materialize(given)
        return {input_role(i): x for i, x in enumerate(given, len(plan.received))}

    # When asked.

    @property
    def tied(self) -> dict[str, str]:
        """Return name → group, for parameters that other stages have copies of."""
        return self._tied.groups()

    @property
    def replica(self) -> tuple[int, int]:
        """Return the number of this replica of the pipeline, and of replicas."""
        found = self.replicas
        return (0, 1) if found is None else (found.index, found.group.size())

    def explain(self, plan: StagePlan, compiled: CompiledStage[Links]) -> Explanation:
        """Return the costs of the stage on each device in a kind of step."""
        mesh = self.world.local
        programs = {
            **self.state.programs,
            **compiled.programs.compiled,
            **self.sums.compiled(compiled.programs),
        }
        return Explanation(
            stage=self.index,
            num_parameters=sum(p.numel() for p in self.module.parameters()),
            parameter_bytes=sum(device_bytes([*self.state.fixed.values()])),
            received_bytes=bytes_of(plan.received, mesh),
            sent_bytes=bytes_of(compiled.outputs, mesh),
            programs=costs_of(programs, mesh),
            reduced_per_microbatch={
                name_in_module(role): reason
                for role, reason in compiled.programs.reduced_per_microbatch.items()
            },
            moves=tuple(compiled.links.moves()),
            sends=not self.is_last,
            num_microbatches=plan.num_microbatches,
            mesh=mesh,
            rules=self.world.rules,
        )

    def _retrace(self, retracing: OtherShapes, shapes: int) -> None:
        def placed(value: Tensor) -> Tensor:
            return self.world.upload(value, (None,) * value.dim())

        retracing.add_to(self.module, self.index, shapes, placed)

    @contextlib.contextmanager
    def _in_shapes(self, shapes: int) -> Iterator[None]:
        """Put the module's graph for some shapes in place, in its present mode."""
        if self._retracing is not None:
            self._retrace(self._retracing, shapes)
        with in_shapes(self.module, shapes):
            yield

    def _link(
        self, plan: StagePlan, outputs: tuple[TensorSpec, ...], output: Template
    ) -> Links:
        """Return the channels to other stages."""
        if self._wiring is None:
            raise RuntimeError(f"stage {self.index}: its edges are not connected")
        consumers = {
            **plan.consumers,
            self.index: self._wiring.consumers_of_values(self.index, output),
        }
        values = StageValues(self.index, plan.values, plan.received, outputs, consumers)
        return Links(values, self._endpoint.open, self.world)


def linked_groups(
    group: XlaPpProcessGroup, replicas: dist.ProcessGroup | None
) -> tuple[LinkedGroups, XlaPpProcessGroup | None]:
    """Return the groups that a stage works with: its pipeline's and its replicas'.

    Raises:
        ValueError: The replicas are of the pipeline itself, or of another backend.
    """
    with group.rendezvous.reporting():
        others = group_of_replicas(replicas, group)
    return LinkedGroups(group, others), others


def _texts(values: Sequence[Tensor] | None) -> tuple[str, ...] | None:
    return None if values is None else describe_all(values)

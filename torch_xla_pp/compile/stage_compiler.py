"""From a stage's plan to its compiled programs, one set for each mode of its module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.collector import sparing_old_objects
from torch_xla_pp.compile.group_sums.grouping import grouping_of
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.names import input_role, tangent
from torch_xla_pp.compile.partition import Remat
from torch_xla_pp.compile.query_rows import shard_scores
from torch_xla_pp.compile.rank_rules import can_call_attention, joint_parts, rules_of
from torch_xla_pp.compile.stage_programs import StagePrograms, ValueSizes
from torch_xla_pp.compile.stage_specs import Borders
from torch_xla_pp.compile.stage_tracer import StageCall, StageTracer, example_like
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.graph import Captured, Template
from torch_xla_pp.hlo import OpShardingArgs
from torch_xla_pp.mesh import Partition, TensorSpec
from torch_xla_pp.plan import Mode, Offer, StagePlan, Tilings
from torch_xla_pp.world import World


class FixedValues(Protocol):
    """The shardings of a stage's parameters and buffers, by role."""

    def shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return the sharding of each."""

    def used_shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return the sharding in use of those that programs use in another sharding."""

    def layouts(self) -> dict[str, tuple[OpShardingArgs, int]]:
        """Return the sharding of each as programs get it, and its dimensions."""


class HasBorders(Protocol):
    """The exchange of a stage with others."""

    borders: Borders

    def agree(self, tilings: Tilings) -> None:
        """Receive the tilings of values on the ranks of other stages."""


LinksT = TypeVar("LinksT", bound=HasBorders)


class CompiledStage(NamedTuple, Generic[LinksT]):
    """A stage's programs for one mode.

    Attributes:
        programs: The programs.
        outputs: What the stage's outputs look like.
        links: Its channels to other stages.
        num_random: How many random operations the stage has.
        sizes: The bytes of values of the programs.
        without_gradients: Outputs that need gradients which other stages do not send,
            as the stage's offer says that they need none.
    """

    programs: StagePrograms
    outputs: tuple[TensorSpec, ...]
    links: LinksT
    num_random: int
    sizes: ValueSizes
    without_gradients: tuple[int, ...] = ()


class OfferedOutputs(NamedTuple):
    """The offer of a stage's outputs to other stages."""

    outputs: tuple[TensorSpec, ...]
    template: Template
    num_random: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSource(Generic[LinksT]):
    """What a stage is compiled from.

    Args:
        tracer: Traces the stage's module.
        captured: The Python values that its forward reads.
        world: The devices of its rank.
        fixed: Its parameters and buffers.
        link: Makes the channels to other stages, for a plan and its outputs.
        remat: Which forward values the backward computes again.
        is_last: Whether no stage comes after this one.
        is_recycling: See `StagePrograms`.
        most_joined: See there.
        expected_outputs: Texts of what the outputs must look like, None if anything
            goes.
    """

    tracer: StageTracer
    captured: Captured
    world: World
    fixed: FixedValues
    link: Callable[[StagePlan, tuple[TensorSpec, ...], Template], LinksT]
    remat: Remat
    is_last: bool
    is_recycling: bool = False
    most_joined: int = 0
    expected_outputs: tuple[str, ...] | None = None


class StageCompiler(Generic[LinksT]):
    """A stage's programs for one plan, by mode.

    The stage's own mode may change without the other stages. All modes make the outputs
    of the first one, which were offered to other stages; an output that needs no
    gradient any more still receives one.

    Args:
        source: What the stage is compiled from.
        plan: Its plan.
        shapes: Number of the shapes that the model is called with, 0 if it was not
            traced.

    Attributes:
        plan: As given.
        shapes: As given.
    """

    def __init__(
        self, source: StageSource[LinksT], plan: StagePlan, shapes: int
    ) -> None:
        self.plan, self.shapes = plan, shapes
        self._source = source
        self._tilings: Tilings | None = None
        self._compiled: dict[
            tuple[Mode, OfferedOutputs | None], CompiledStage[LinksT]
        ] = {}
        self._left_by_trace: int | None = None

    def agree(self, tilings: Tilings) -> None:
        """Receive the tilings of values on all ranks, before anything is run."""
        self._tilings = tilings
        for compiled in self.compiled:
            compiled.links.agree(tilings)

    @property
    def compiled(self) -> list[CompiledStage[LinksT]]:
        """Return all that has been compiled."""
        return list({id(x): x for x in self._compiled.values()}.values())

    def compile(
        self, mode: Mode, offered: OfferedOutputs | None
    ) -> CompiledStage[LinksT]:
        """Return the programs for the module's present mode; traced when new.

        Args:
            mode: The mode.
            offered: What was offered to other stages, None if nothing yet.

        Raises:
            StageShapeError: The module cannot run on the inputs, or its outputs are
                not what was declared, or what other stages were offered.
            PipelineError: The module's forward changes what it reads.
            ValueError: A call of `shard` does not fit its value or the rules.
        """
        if (mode, offered) not in self._compiled:
            made = self._traced(mode, offered)
            self._compiled[mode, offered] = made
            self._compiled[mode, offered or offered_by(made)] = made
        return self._compiled[mode, offered]

    @sparing_old_objects()
    def _traced(
        self, mode: Mode, offered: OfferedOutputs | None
    ) -> CompiledStage[LinksT]:
        """Trace the module in its present mode and make its programs."""
        joint = self._export(mode)
        known = partial(self._partitions, joint)
        if not can_call_attention(self._source.world, joint, known):
            joint = self._export(mode, has_kernels=False)
        shard_scores(joint, lambda: joint_parts(self._source.world, joint, known()))
        self._check_written(mode)
        return self._made(joint, offered)

    def _made(
        self, joint: JointGraph, offered: OfferedOutputs | None
    ) -> CompiledStage[LinksT]:
        """Make the programs of a joint graph."""
        source, plan = self._source, self.plan
        world = source.world
        self._check_constraints(joint)
        made = self._outputs_of(joint)
        self._check_outputs(made)
        given = made
        if offered is not None and not source.is_last:
            found = OfferedOutputs(made, joint.output_template, joint.num_random)
            _check_offered(plan.stage, offered, found)
            given = offered.outputs
        links = source.link(plan, given, joint.output_template)
        if self._tilings is not None:
            links.agree(self._tilings)
        programs = StagePrograms(
            joint,
            [world.sharding(spec.partition) for spec in made],
            [world.sharding(spec.partition) for spec in plan.inputs],
            source.fixed.shardings(),
            links.borders,
            remat=source.remat,
            rules=rules_of(world, [axes for axes, _ in joint.constraints]),
            used=source.fixed.used_shardings(),
            grouping=grouping_of(world, plan.inputs, made, source.fixed.layouts()),
            is_recycling=source.is_recycling,
            most_joined=source.most_joined if source.is_last else 0,
        )
        without_gradients = tuple(
            index
            for index, (old, new) in enumerate(zip(given, made, strict=True))
            if new.requires_grad and not old.requires_grad
        )
        return CompiledStage(
            programs, given, links, joint.num_random, ValueSizes(), without_gradients
        )

    def _outputs_of(self, joint: JointGraph) -> tuple[TensorSpec, ...]:
        partition_of, rows = self._source.world.layout.partition_of, self.plan.rows
        return tuple(
            TensorSpec.of(
                value, partition_of(axes, tuple(value.shape), rows), needs_grad, axes
            )
            for (value, needs_grad), axes in zip(
                joint.example_outputs, joint.output_axes, strict=True
            )
        )

    def _partitions(self, joint: JointGraph) -> dict[str, Partition | None]:
        """Return how inputs, gradients of outputs and the stage's values are split."""
        world, plan = self._source.world, self.plan
        outputs = self._outputs_of(joint)
        known: dict[str, Partition | None] = {
            role(index): spec.partition
            for role, specs in ((input_role, plan.inputs), (tangent, outputs))
            for index, spec in enumerate(specs)
        }
        fixed = self._source.fixed
        used = fixed.used_shardings()
        for role, (args, count) in fixed.layouts().items():
            sharding = used.get(role) or xla_compat.sharding_from_args(*args)
            known[role] = world.partition_of(sharding, count)
        return known

    def _export(self, mode: Mode, *, has_kernels: bool = True) -> JointGraph:
        plan = self.plan
        received = [example_of(spec) for spec in plan.received]
        given = [example_of(spec) for spec in plan.given]
        args, kwargs = plan.arguments.fill(received)
        more_args, more_kwargs = plan.given_arguments.fill(given)
        call = StageCall(
            mode=mode,
            shapes=self.shapes,
            args=[*args, *more_args],
            kwargs={**kwargs, **more_kwargs},
            tensors=[*received, *given],
        )
        try:
            return self._source.tracer.trace(call, has_kernels=has_kernels)
        except PipelineError:
            raise
        except Exception as error:
            inputs = ", ".join(map(str, plan.inputs))
            where = " ".join(getattr(error, "__notes__", ()))
            raise StageShapeError(
                f"stage {plan.stage}: its module cannot run on inputs ({inputs}): "
                f"{type(error).__name__} {where}: {error}\nCheck that the stages "
                "before make what this one takes; if they do, write the operation with "
                "others."
            ) from error

    def _check_written(self, mode: Mode) -> None:
        """Refuse a forward that changes the values that it reads in every run.

        Once is accepted, for values that a module computes when it is first called.
        """
        captured = self._source.captured
        state = captured.number()
        if state == mode.state:
            return
        if mode.state == self._left_by_trace:
            raise PipelineError(
                f"stage {self.plan.stage}: expected a forward that leaves Python "
                "values as they are, got changes: "
                f"{captured.difference(mode.state, state)}. "
                "Programs do not run Python: count in a buffer, or between steps."
            )
        self._left_by_trace = state

    def _check_constraints(self, joint: JointGraph) -> None:
        faults = self._source.world.layout.constraint_faults(
            (axes, tuple(value.shape)) for axes, value in joint.constraints
        )
        if faults:
            raise ValueError(
                f"stage {self.plan.stage}: expected calls of shard that fit the axis "
                "rules and the shapes, got:\n  " + "\n  ".join(faults) + "\nCorrect "
                "the calls, or add the names to AxisRules.axes."
            )

    def _check_outputs(self, specs: Sequence[TensorSpec]) -> None:
        expected = self._source.expected_outputs
        got = tuple(map(str, specs))
        if expected is not None and expected != got:
            raise StageShapeError(
                f"stage {self.plan.stage}: expected outputs {', '.join(expected)}, "
                f"got {', '.join(got)}. Correct output_args or the module."
            )


@dataclass(kw_only=True, slots=True)
class StageKind(Generic[LinksT]):
    """A stage in one kind of step.

    Args:
        plan: Its plan.
        compiler: Its programs; kinds that differ in nothing else share one.
        offered: What was offered to other stages, None if nothing yet.
        is_described: Whether its costs were written to the dump folder.
    """

    plan: StagePlan
    compiler: StageCompiler[LinksT]
    offered: OfferedOutputs | None = None
    is_described: bool = False
    _current: tuple[Mode, CompiledStage[LinksT]] | None = field(default=None)

    def compiled(self, mode: Mode) -> CompiledStage[LinksT]:
        """Return the programs for the mode that the module is in, see `compile`."""
        if self._current is not None and self._current[0] == mode:
            return self._current[1]
        found = self.compiler.compile(mode, self.offered)
        if self.offered is None:
            self.offered = offered_by(found)
        self._current = mode, found
        return found

    def offer(self, mode: Mode) -> Offer:
        """Return the stage's offer to later ones."""
        compiled = self.compiled(mode)
        return Offer(
            output=compiled.programs.output_template,
            values=compiled.outputs,
            rows=self.plan.rows,
            num_random=self.plan.random_before + compiled.num_random,
        )


def offered_by(compiled: CompiledStage[LinksT]) -> OfferedOutputs:
    """Return the offer of compiled programs to other stages."""
    template = compiled.programs.output_template
    return OfferedOutputs(compiled.outputs, template, compiled.num_random)


def example_of(spec: TensorSpec) -> Tensor:
    """Return a tensor whose metadata alone may be used."""
    return example_like(spec.shape, spec.dtype, spec.requires_grad)


def _check_offered(stage: int, offered: OfferedOutputs, found: OfferedOutputs) -> None:
    """Refuse outputs that differ from those that were offered to other stages."""
    faults = []
    if (old := list(map(_without_grad, offered.outputs))) != (
        new := list(map(_without_grad, found.outputs))
    ) or offered.template != found.template:
        faults.append(
            f"outputs {', '.join(map(str, old))}, got {', '.join(map(str, new))}"
        )
    if offered.num_random != found.num_random:
        faults.append(
            f"{offered.num_random} random operations, by which those of later stages "
            f"are numbered, got {found.num_random}"
        )
    if faults:
        raise StageShapeError(
            f"stage {stage}: what its forward makes has changed, but not the "
            f"first stage, which says what kind of step comes: expected "
            f"{' and '.join(faults)}. Change the mode of all stages, or make a new "
            "schedule on every rank."
        )


def _without_grad(spec: TensorSpec) -> TensorSpec:
    return replace(spec, requires_grad=False)

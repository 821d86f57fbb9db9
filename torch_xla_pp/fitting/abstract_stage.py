"""A stage without values: the metadata of its values, and its programs as HLO.

Parameters are placeholders without buffers, so that a stage of any size takes no
memory, and nothing is run. Values between stages go through the host: no other compiler
knows the calls by which programs on CPU devices send and receive.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.accelerators import (
    AcceleratorCompiler,
    CompiledProgram,
    DeviceLayout,
    ProgramTime,
    Slice,
    result_bytes,
    with_plain_origins,
)
from torch_xla_pp.compile import (
    AbstractValue,
    Borders,
    CompiledStage,
    LossProgram,
    Program,
    Remat,
    StageCompiler,
    StageKind,
    StageSource,
    StageTracer,
    accumulator,
    buffer_role,
    example_of,
    input_role,
    is_constrained,
    is_tangent,
    output_name,
    parameter_role,
    rules_of,
    tangent,
    tangent_name,
)
from torch_xla_pp.deferred import PARAMETER, places_of, shapes_of, state_of
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.fitting.program_collectives import collectives_by_kind
from torch_xla_pp.fitting.stage_fit import ProgramFit, StageFit, ValueBytes
from torch_xla_pp.fitting.surprises import surprises_in
from torch_xla_pp.graph import Captured, Template, follow_mode, in_shapes
from torch_xla_pp.hlo import (
    REPLICATED,
    OpShardingArgs,
    parse_sharding,
)
from torch_xla_pp.mesh import (
    LocalMesh,
    Partition,
    Sharding,
    TensorSpec,
    assign_partitions,
    noted_partition,
)
from torch_xla_pp.plan import (
    Mode,
    Offer,
    StagePlan,
    StagePlanner,
    Tilings,
    Wiring,
)
from torch_xla_pp.runtime import SumPrograms
from torch_xla_pp.simulate import Flow
from torch_xla_pp.state import GatheredWeights
from torch_xla_pp.world import World

AbstractValues = dict[str, AbstractValue]


class AbstractState:
    """The parameters and buffers of a stage's module, as placeholders.

    Args:
        module: The module; its values are replaced.
        world: The devices of its rank.
        sharding: How parameters are sharded.
        whole_model: Name → shape of what all stages have.

    Attributes:
        values: Role → the placeholder that the module holds.
        gathered: The program that makes copies of weights once a step.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        sharding: Sharding,
        whole_model: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._world = world
        noted = {p.name: noted_partition(p.tensor) for p in places_of(module)}
        partitions = {n: p for n, p in noted.items() if p is not None}
        partitions |= assign_partitions(
            sharding, shapes_of(module), world.local, whole_model=whole_model
        )
        self.values: AbstractValues = {}
        self.trained: set[str] = set()
        _empty(module)
        for place in state_of(module):
            value, is_kept = place.tensor, place.holding == PARAMETER
            role = (parameter_role if is_kept else buffer_role)(place.name)
            partition = partitions.get(place.name, (None,) * value.dim())
            args = world.sharding_args(partition)
            self.values[role] = AbstractValue(tuple(value.shape), value.dtype, args)
            if value.requires_grad:
                self.trained.add(role)
        used = _used(module, world, partitions)
        is_once = world.rules is not None and world.rules.gather_once
        self._used_once = used if is_once else {}
        self._used_each_time = {} if is_once else used
        self.gathered = GatheredWeights(self._shardings(self._used_once))

    def shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return the sharding of every parameter and buffer, by role."""
        return {
            role: xla_compat.sharding_from_args(*value.sharding)
            for role, value in self.values.items()
        }

    def used_shardings(self) -> dict[str, xla_compat.OpSharding]:
        """Return shardings of weights in use, where they are kept in others."""
        used = self._used_each_time if is_constrained(self._world) else {}
        return self._shardings(used)

    def layouts(self) -> dict[str, tuple[OpShardingArgs, int]]:
        """Return shardings of parameters as programs get them, and their dimensions."""
        return {
            role: (value.sharding, len(value.shape))
            for role, value in self.passed().items()
        }

    def passed(self) -> AbstractValues:
        """Return the values that programs get: copies, where a step makes some."""
        args = self._world.sharding_args
        return {
            role: value._replace(sharding=args(self._used_once[role]))
            if role in self._used_once
            else value
            for role, value in self.values.items()
        }

    def num_bytes(self, roles: Callable[[str], bool]) -> int:
        """Return the bytes of some values on one device."""
        return sum(v.num_bytes for role, v in self.values.items() if roles(role))

    def _shardings(
        self, partitions: Mapping[str, Partition]
    ) -> dict[str, xla_compat.OpSharding]:
        return {r: self._world.sharding(p) for r, p in partitions.items()}


def _used(
    module: nn.Module, world: World, partitions: Mapping[str, Partition]
) -> dict[str, Partition]:
    """Return shardings of weights in use, where they are kept in others."""
    if world.rules is None:
        return {}
    names = [name for name, _ in module.named_parameters()]
    used = world.rules.used(names, partitions)
    return {parameter_role(name): partition for name, partition in used.items()}


def _empty(module: nn.Module) -> None:
    """Replace a module's values by placeholders, keeping ties."""
    made: dict[int, Tensor] = {}
    for place in places_of(module):
        old = place.tensor
        if id(old) not in made:
            value = xla_compat.placeholder(old.shape, old.dtype)
            if isinstance(old, nn.Parameter):
                value = nn.Parameter(value, requires_grad=old.requires_grad)
            made[id(old)] = value
            # An object that is freed may give its id to another one.
            made[id(value)] = value
        place.put(made[id(old)])


@dataclass(slots=True)
class HostBorders:
    """The borders of a stage whose programs exchange nothing themselves.

    Args:
        borders: Which outputs others use.
    """

    borders: Borders

    def agree(self, tilings: Tilings) -> None:
        """Do nothing: values are whole on the host."""


class Loss(NamedTuple):
    """The loss that the last stage is trained with.

    Attributes:
        function: Takes the output and the target.
        target: Example of a microbatch's target.
    """

    function: Callable[..., Any]
    target: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSetting:
    """The settings that all stages have in common.

    Args:
        devices: The devices of a rank that programs are compiled for.
        world: The CPU devices in their place.
        wiring: What stages take from each other.
        sharding: How parameters are sharded.
        shapes: Name → shape of what all stages have.
        remat: Which forward values backwards compute again.
        optimizer_ratio: Bytes of an optimizer's state for a byte of parameters.
    """

    devices: Slice
    world: World
    wiring: Wiring
    sharding: Sharding
    shapes: Mapping[str, tuple[int, ...]]
    remat: Remat
    optimizer_ratio: float


class AbstractStage:
    """A stage whose values are known by shape, dtype and sharding alone.

    Args:
        index: Index of the stage.
        module: Its module, which loses its values.
        setting: The settings that all stages have in common.
    """

    def __init__(self, index: int, module: nn.Module, setting: StageSetting) -> None:
        self.index = index
        self._setting = setting
        follow_mode(module)
        world = setting.world
        self._state = AbstractState(module, world, setting.sharding, setting.shapes)
        self._is_last = index == len(setting.wiring.ranks) - 1
        captured = Captured(module)
        self._mode = Mode.of(captured)
        self._source = StageSource(
            tracer=StageTracer(module, world, functools.partial(in_shapes, module)),
            captured=captured,
            world=world,
            fixed=self._state,
            link=self._link,
            remat=setting.remat,
            is_last=self._is_last,
        )
        self._kind: StageKind[HostBorders] | None = None

    def offer(
        self,
        offers: Mapping[int, Offer],
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Offer:
        """Plan the stage, trace it, and return its offer to later ones.

        Args:
            offers: The offers of earlier stages.
            num_microbatches: Microbatches of a step.
            args: Arguments that the schedule passes in.
            kwargs: Likewise.
        """
        planner = StagePlanner(
            stage=self.index,
            layout=self._setting.world.layout,
            free_parameters=lambda *_: None,
        )
        wiring = self._setting.wiring
        plan = planner.plan(wiring, offers, num_microbatches, args, kwargs)
        compiler = StageCompiler(self._source, plan, 0)
        self._kind = StageKind(plan=plan, compiler=compiler)
        return self._kind.offer(self._mode)

    def fit(
        self, compiler: AcceleratorCompiler, kinds: str, loss: Loss | None
    ) -> StageFit:
        """Compile the stage's programs; after `offer`.

        Args:
            compiler: The compiler.
            kinds: Of the actions that run it.
            loss: The loss of the last stage, None if not known.
        """
        if self._kind is None:
            raise RuntimeError(f"stage {self.index}: it has not been planned")
        plan, stage = self._kind.plan, self._kind.compiled(self._mode)
        setting = self._setting
        programs = _Programs(compiler, setting.world.local, setting.devices)
        values = programs.values
        values |= self._state.values
        if self._state.gathered.program is not None:
            programs.add("gathering of weights", self._state.gathered.program)
        values |= self._state.passed()
        for role, tensor in stage.programs.constants.items():
            values[role] = _whole(tensor)
        sums = self._sums(stage)
        values |= sums
        programs.held |= set(values)
        fixed = set(values)
        values |= self._borders(plan, stage)
        is_trained = stage.programs.has_backward and kinds != "F"
        programs.add_one("forward" if is_trained else "inference", stage)
        kept = stage.programs.kept - fixed if is_trained else frozenset()
        saved = {name for name in kept if not is_tangent(name)}
        saved_bytes = sum(values[n].num_bytes for n in saved if n in values)
        if self._is_last and loss is not None:
            programs.add_loss(self._loss(plan, stage, loss), stage)
        programs.held |= saved
        passed = stage.programs.residual - fixed if "I" in kinds else frozenset()
        for kind, name in (
            ("B", "backward"),
            ("I", "backward input"),
            ("W", "backward weight"),
        ):
            if kind in kinds and is_trained:
                programs.add_one(name, stage)
            if kind == "I":
                programs.held |= passed
        if stage.programs.summed.groups and is_trained:
            own = SumPrograms(stage.programs.summed)
            programs.add("gradient reduction", own.reduction())
        passed_bytes = sum(values[n].num_bytes for n in passed if n in values)
        both = saved_bytes, passed_bytes
        return self._report(tuple(programs.found), sums, both, stage)

    def _report(
        self,
        programs: tuple[ProgramFit, ...],
        sums: AbstractValues,
        both: tuple[int, int],
        stage: CompiledStage[HostBorders],
    ) -> StageFit:
        state = self._state
        trained = state.num_bytes(lambda role: role in state.trained)
        parameters = state.num_bytes(lambda role: role.startswith(parameter_role("")))
        constants = stage.programs.constants.values()
        return StageFit(
            index=self.index,
            parameter_bytes=parameters,
            buffer_bytes=state.num_bytes(lambda _: True)
            - parameters
            + sum(tensor.nbytes for tensor in constants),
            gradient_bytes=sum(value.num_bytes for value in sums.values()),
            optimizer_bytes=int(trained * self._setting.optimizer_ratio),
            saved_bytes=both[0],
            passed_bytes=both[1],
            programs=programs,
            flows=self._flows(stage),
        )

    def _flows(self, stage: CompiledStage[HostBorders]) -> tuple[Flow, ...]:
        """Return the flows to other stages, one for each value."""
        consumers = stage.links.borders.consumers
        return tuple(
            Flow(
                producer=self.index,
                consumers=tuple(sorted(consumers[index])),
                num_bytes=math.prod(spec.shape) * spec.dtype.itemsize,
                has_gradient=spec.requires_grad,
            )
            for index, spec in enumerate(stage.outputs)
            if consumers.get(index)
        )

    def _sums(self, stage: CompiledStage[HostBorders]) -> AbstractValues:
        """Return the sums of gradients, some of them per group of rows."""
        summed = stage.programs.summed
        found = {}
        for role, sharding in summed.sums.items():
            value = self._state.values[role]
            shape = value.shape
            if role in summed.groups:
                shape = (summed.groups[role], *shape)
            text = xla_compat.sharding_text(sharding, len(shape))
            args = parse_sharding(text)
            found[accumulator(role)] = AbstractValue(shape, value.dtype, args)
        return found

    def _borders(
        self, plan: StagePlan, stage: CompiledStage[HostBorders]
    ) -> AbstractValues:
        """Return the values that come in: inputs, and gradients of outputs."""
        found = {input_role(i): self._of(s) for i, s in enumerate(plan.inputs)}
        consumers = stage.links.borders.consumers
        for index, spec in enumerate(stage.outputs):
            found[tangent(index)] = self._of(spec)
            for consumer in consumers.get(index, ()):
                name = tangent_name(index, consumer, consumers[index])
                found[name] = self._of(spec)
        return found

    def _loss(
        self, plan: StagePlan, stage: CompiledStage[HostBorders], loss: Loss
    ) -> tuple[LossProgram, AbstractValues]:
        """Return the loss, and the inputs of its program."""
        world = self._setting.world
        shape = tuple(loss.target.shape)
        partition = world.layout.batch_partition(shape, plan.rows)
        target = TensorSpec.of(loss.target, partition, False)
        specs = (*stage.outputs, target)
        program = LossProgram(
            loss.function,
            stage.programs.output_template,
            [example_of(spec) for spec in specs],
            [world.sharding(spec.partition) for spec in specs],
            rules_of(world),
        )
        given = {input_role(i): self._of(spec) for i, spec in enumerate(specs)}
        given[tangent(0)] = AbstractValue((), program.dtype, REPLICATED)
        given |= {role: _whole(t) for role, t in program.constants.items()}
        return program, given

    def _of(self, spec: TensorSpec) -> AbstractValue:
        args = self._setting.world.sharding_args(spec.partition)
        return AbstractValue(tuple(spec.shape), spec.dtype, args)

    def _link(
        self, plan: StagePlan, outputs: tuple[TensorSpec, ...], output: Template
    ) -> HostBorders:
        own = self._setting.wiring.consumers_of_values(self.index, output)
        consumers = {i: own.consumers_of(i) for i in range(len(outputs))}
        used = frozenset(output_name(i) for i, stages in consumers.items() if stages)
        returned = None if self._is_last else used
        return HostBorders(Borders(consumers=consumers, returned=returned))


class _Programs:
    """The programs of a stage, compiled one after the other.

    The shardings of a program's results are known once it is compiled; other programs
    take the results.

    Attributes:
        values: Metadata of values, as far as it is known.
        held: Names of the values that the rank holds anyway.
        found: The compiler's answers.
    """

    def __init__(
        self, compiler: AcceleratorCompiler, mesh: LocalMesh, devices: Slice
    ) -> None:
        self._compiler = compiler
        self._mesh = mesh
        self._devices = devices
        self.values: AbstractValues = {}
        self.held: set[str] = set()
        self.found: list[ProgramFit] = []

    def add_one(self, name: Any, stage: CompiledStage[HostBorders]) -> None:
        """Compile one of the stage's programs, if it has it."""
        program = stage.programs.all_programs.get(name)
        if program is not None:
            self.add(name, program)

    def add_loss(
        self,
        loss: tuple[LossProgram, AbstractValues],
        stage: CompiledStage[HostBorders],
    ) -> None:
        """Compile the loss, which takes the outputs of the forward."""
        program, given = loss
        target = given[input_role(len(stage.outputs))]
        received = target.num_bytes
        self.found.append(self._compiled("loss", program.program, given, received))

    def add(self, name: str, program: Program) -> None:
        """Compile a program, and note its results."""
        missing = [n for n in program.inputs if n not in self.values]
        if missing:
            error = f"not tried: what makes its {missing[0]} does not compile"
            answer = CompiledProgram(error=error)
            self.found.append(ProgramFit(name=name, compiled=answer))
            return
        given = {n: self.values[n] for n in program.inputs}
        received = sum(v.num_bytes for n, v in given.items() if n not in self.held)
        self.found.append(self._compiled(name, program, given, received))

    def _compiled(
        self, name: str, program: Program, given: AbstractValues, received: int
    ) -> ProgramFit:
        try:
            lowered = program.lowered(given)
        except PipelineError as error:
            answer = CompiledProgram(error=str(error))
            return ProgramFit(name=name, compiled=answer)
        answer = self._compiler.compile(
            with_plain_origins(lowered.hlo),
            shardings=lowered.shardings,
            donated=lowered.donated,
        )
        if answer.error:
            return ProgramFit(name=name, compiled=answer)
        texts = answer.output_shardings or ("{replicated}",) * len(lowered.outputs)
        made = {
            name: AbstractValue(*look, parse_sharding(text))
            for (name, look), text in zip(lowered.outputs.items(), texts, strict=True)
        }
        self.values |= made
        taken = [given.get(name) for name in lowered.parameters]
        return ProgramFit(
            name=name,
            compiled=answer,
            received_bytes=received,
            collectives=tuple(collectives_by_kind(answer, self._mesh)),
            values=_value_bytes(
                answer, taken, list(made.values()), self._devices.chip.table_bytes
            ),
            time=ProgramTime.of(answer, self._devices),
            surprises=tuple(surprises_in(answer, lowered.origins)),
        )


def _value_bytes(
    answer: CompiledProgram,
    taken: Sequence[AbstractValue | None],
    made: Sequence[AbstractValue],
    table_bytes: int,
) -> ValueBytes:
    """Return the bytes of a program's values.

    Args:
        answer: The compiler's answer, of which layouts alone are read.
        taken: Its arguments, None for numbers that are built in.
        made: Its results.
        table_bytes: As `Chip.table_bytes`.
    """
    arguments = _sizes(answer.argument_layouts, taken)
    results = _sizes(answer.result_layouts, made)
    own, whole = (sum(sizes[place] for sizes in arguments) for place in (0, 1))
    outputs = sum(size for size, _ in results)
    held = result_bytes([padded for _, padded in results], table_bytes)
    return ValueBytes(
        arguments=own,
        argument_padding=whole - own,
        outputs=outputs,
        output_padding=held - outputs,
    )


def _sizes(
    layouts: Sequence[DeviceLayout], values: Sequence[AbstractValue | None]
) -> list[tuple[int, int]]:
    """Return the bytes of values as they are, and in the tiles of their layouts."""
    found = []
    for place, value in enumerate(values):
        shape = () if value is None else value.sharding.shard_shape(value.shape)
        layout = layouts[place] if place < len(layouts) else None
        num_bytes = value.num_bytes if value is not None else 0
        if value is None and layout is not None:
            num_bytes = layout.bits // 8
        found.append((num_bytes, layout.num_bytes(shape) if layout else num_bytes))
    return found


def _whole(tensor: Tensor) -> AbstractValue:
    """Return the metadata of a tensor that every device holds."""
    return AbstractValue(tuple(tensor.shape), tensor.dtype, REPLICATED)


def offers_of(
    stages: Sequence[AbstractStage],
    num_microbatches: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    """Plan and trace all stages, each with the offers of those before it."""
    offers: dict[int, Offer] = {}
    for stage in stages:
        is_first = stage.index == 0
        given = (args, kwargs) if is_first else ((), {})
        offers[stage.index] = stage.offer(offers, num_microbatches, *given)

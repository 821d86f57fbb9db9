"""What a stage knows about its inputs and outputs under one schedule.

A plan is made before the first step of its kind and never changes; programs are added
to it as they are needed, one set per mode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import JointGraph, Remat, StagePrograms, export_joint
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.graph import Captured, Template, sharding_outputs
from torch_xla_pp.mesh import AxisRules, LogicalAxes, Partition, TensorSpec, Tiling
from torch_xla_pp.plan import Fan, Value
from torch_xla_pp.runtime.gradients.sums import grouping_of
from torch_xla_pp.runtime.links import Links
from torch_xla_pp.runtime.memory import Sizes
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.world import World


@dataclass(frozen=True, slots=True)
class _TensorMark:
    """Stand for a tensor in a signature."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """Describe arguments from outside: tensors by shape and dtype, others by value."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.leaves))})"

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> tuple["Signature", list[Tensor]]:
        """Return the signature of arguments, and the tensors among them."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
        marks = tuple(
            _TensorMark(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x
            for x in leaves
        )
        return cls(spec, marks), [x for x in leaves if isinstance(x, Tensor)]

    def fill(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return arguments that have this signature, with `tensors` in place."""
        values = iter(tensors)
        leaves = [
            next(values) if isinstance(leaf, _TensorMark) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


class Mode(NamedTuple):
    """State what changes a module's forward besides its inputs.

    Attributes:
        state: Number of the Python values that it reads, see `Captured`: training
            mode, hooks, numbers, `requires_grad` and more.
        autocast: The dtype of autocast, None where it is off.
    """

    state: int
    autocast: torch.dtype | None

    @classmethod
    def of(cls, captured: Captured) -> "Mode":
        """Return the present mode of a module."""
        return cls(captured.number(), autocast_dtype())


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast, None where it is off."""
    is_on = torch.is_autocast_enabled("xla")
    return torch.get_autocast_dtype("xla") if is_on else None


class Variant(NamedTuple):
    """Hold a stage's programs for one mode.

    Attributes:
        programs: The compiled programs.
        outputs: What the stage's outputs look like.
        links: What is exchanged with other stages.
        num_random: How many random operations the stage has.
        sizes: Bytes of the values that the programs exchange.
        lacking: Outputs that need gradients which other stages do not give, as they
            were told otherwise.
    """

    programs: StagePrograms
    outputs: tuple[TensorSpec, ...]
    links: Links
    num_random: int
    sizes: Sizes
    lacking: tuple[int, ...] = ()


class _Offered(NamedTuple):
    """Keep what other stages were told of the outputs of a stage."""

    outputs: tuple[TensorSpec, ...]
    template: Template
    num_random: int


_Variants: TypeAlias = dict[tuple[Mode, _Offered | None], Variant]


@dataclass(kw_only=True, eq=False, slots=True)
class StagePlan:
    """Hold what a stage agreed on for one kind of step.

    The stage's own mode may change without the other stages: there is a variant for
    each. All variants make what the first one did, which other stages were told of;
    an output that needs no gradient any more is still given one.

    Args:
        stage: Index of the stage.
        num_microbatches: Microbatches per step.
        rows: Rows of a microbatch.
        arguments: Structure of what other stages give.
        values: The values that they give, by slot of `arguments`.
        received: What these look like.
        parameters: Names of the keyword arguments that the schedule may pass in, None
            for any.
        fans: How the values of each producer reach their consumers.
        random_before: How many random operations earlier stages have.
        remat: Which forward values the backward computes again.
        given: Tensors that the schedule passes in.
        signature: What the schedule's arguments must look like.
        is_last: Whether no stage comes after this one.
        expected_outputs: What the outputs must look like, None if anything goes.
        tilings: Stage → how what it takes and makes lies on its rank, of all stages;
            known once all have their plans.
        is_described: Whether what it costs was written down.
    """

    stage: int
    num_microbatches: int
    rows: int
    arguments: Template
    values: tuple[Value, ...]
    received: tuple[TensorSpec, ...]
    parameters: frozenset[str] | None
    fans: Mapping[int, Fan]
    random_before: int
    remat: Remat
    given: tuple[TensorSpec, ...]
    signature: Signature
    is_last: bool
    expected_outputs: Sequence[Tensor] | None
    tilings: dict[int, Mapping[Value, Tiling]] = field(default_factory=dict)
    is_described: bool = False
    _offered: _Offered | None = None
    _variants: _Variants = field(default_factory=dict)
    _current: tuple[Mode, Variant] | None = None
    _left_by_trace: int | None = None

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all tensor inputs, received ones first."""
        return self.received + self.given

    def held(self, outputs: Sequence[TensorSpec]) -> dict[Value, TensorSpec]:
        """Return what the stage takes from others and makes."""
        made = {Value(self.stage, slot): spec for slot, spec in enumerate(outputs)}
        return {**dict(zip(self.values, self.received, strict=True)), **made}

    def is_like(self, other: "StagePlan") -> bool:
        """Return whether the same programs do for another kind of step."""
        return self._takes() == other._takes()

    def _takes(self) -> tuple[Any, ...]:
        return (
            *(self.num_microbatches, self.rows, self.arguments, self.values),
            *(self.received, self.given, self.signature, self.parameters, self.fans),
        )

    def share(self, other: "StagePlan") -> None:
        """Use the programs of a plan that is like this one."""
        self._variants = other._variants
        self.tilings = other.tilings
        self._left_by_trace = other._left_by_trace

    @property
    def variants(self) -> list[Variant]:
        """Return the variants so far, of plans that share them, too."""
        return list({id(x): x for x in self._variants.values()}.values())

    def takes(self, name: str) -> bool:
        """Return whether the schedule may pass in a keyword argument."""
        return self.parameters is None or name in self.parameters

    def variant(
        self,
        mode: Mode,
        captured: Captured,
        module: nn.Module,
        world: World,
        state: ModuleState,
        link: Callable[[tuple[TensorSpec, ...], Template], Links],
    ) -> Variant:
        """Return what the module is in a mode, traced when new.

        Args:
            mode: The mode, in which the module is now.
            captured: What the module reads.
            module: The stage's module.
            world: How its values lie on the devices.
            state: Its parameters and buffers.
            link: Says for its outputs what is exchanged with other stages.

        Raises:
            StageShapeError: The module cannot run on the inputs, or its outputs are
                not what was declared, or what other stages were told.
            PipelineError: The module's forward changes what it reads.
            ValueError: A call of `shard` does not fit its value or the rules.
        """
        if self._current is not None and self._current[0] == mode:
            return self._current[1]
        key = mode, self._offered
        if key not in self._variants:
            joint = self._export(module, world.rules)
            self._check_written(mode, captured)
            self._variants[key] = self._made(joint, world, state, link)
        variant = self._variants[key]
        if self._offered is None:
            template = variant.programs.output_template
            self._offered = _Offered(variant.outputs, template, variant.num_random)
            self._variants[mode, self._offered] = variant
        self._current = mode, variant
        return variant

    def _made(
        self,
        joint: JointGraph,
        world: World,
        state: ModuleState,
        link: Callable[[tuple[TensorSpec, ...], Template], Links],
    ) -> Variant:
        """Return what a trace of the module makes."""
        self._check_constraints(world, joint)
        outputs = tuple(
            spec_of(
                value,
                world.layout_of(axes, tuple(value.shape), self.rows),
                needs_grad,
                axes,
            )
            for (value, needs_grad), axes in zip(
                joint.example_outputs, joint.output_axes, strict=True
            )
        )
        self._check_outputs(outputs)
        found = _Offered(outputs, joint.output_template, joint.num_random)
        told = outputs
        if self._offered is not None and not self.is_last:
            self._check_offered(self._offered, found)
            told = self._offered.outputs
        links = link(told, joint.output_template)
        programs = StagePrograms(
            joint,
            [world.sharding(spec.partition) for spec in outputs],
            [world.sharding(spec.partition) for spec in self.inputs],
            state.shardings(),
            links.borders,
            remat=self.remat,
            constraints=state.constraints(),
            grouping=grouping_of(world, self.inputs, outputs, state.layouts()),
        )
        lacking = tuple(
            index
            for index, (old, new) in enumerate(zip(told, outputs, strict=True))
            if new.requires_grad and not old.requires_grad
        )
        return Variant(programs, told, links, joint.num_random, Sizes(), lacking)

    def _check_offered(self, told: _Offered, found: _Offered) -> None:
        """Refuse outputs that differ from those that other stages were told of."""
        faults = []
        if (old := list(map(_without_grad, told.outputs))) != (
            new := list(map(_without_grad, found.outputs))
        ) or told.template != found.template:
            faults.append(
                f"outputs {', '.join(map(str, old))}, got {', '.join(map(str, new))}"
            )
        if told.num_random != found.num_random:
            faults.append(
                f"{told.num_random} random operations, by which those of later stages "
                f"are numbered, got {found.num_random}"
            )
        if faults:
            raise StageShapeError(
                f"stage {self.stage}: what its forward makes has changed, but not the "
                f"first stage, which says what kind of step comes: expected "
                f"{' and '.join(faults)}. Change the mode of all stages, or make a new "
                "schedule on every rank."
            )

    def _check_written(self, mode: Mode, captured: Captured) -> None:
        """Refuse a forward that changes what it reads whenever it runs.

        Once is accepted, for values that a module computes when it is first called.
        """
        state = captured.number()
        if state == mode.state:
            return
        if mode.state == self._left_by_trace:
            raise PipelineError(
                f"stage {self.stage}: expected a forward that leaves Python values as "
                f"they are, got changes: {captured.difference(mode.state, state)}. "
                "Programs do not run Python: count in a buffer, or between steps."
            )
        self._left_by_trace = state

    def _check_constraints(self, world: World, joint: JointGraph) -> None:
        faults = world.constraint_faults(
            (axes, tuple(value.shape)) for axes, value in joint.constraints
        )
        if faults:
            raise ValueError(
                f"stage {self.stage}: expected calls of shard that fit the axis rules "
                "and the shapes, got:\n  " + "\n  ".join(faults) + "\nCorrect the "
                "calls, or add the names to AxisRules.axes."
            )

    def _export(self, module: nn.Module, rules: AxisRules | None) -> JointGraph:
        received = [example_of(spec) for spec in self.received]
        given = [example_of(spec) for spec in self.given]
        args, kwargs = self.arguments.fill(received)
        more_args, more_kwargs = self.signature.fill(given)
        activations = {} if rules is None else rules.activations
        try:
            with sharding_outputs(module, activations):
                return export_joint(
                    module,
                    [*args, *more_args],
                    {**kwargs, **more_kwargs},
                    [*received, *given],
                )
        except PipelineError:
            raise
        except Exception as error:
            inputs = ", ".join(map(str, self.inputs))
            where = " ".join(getattr(error, "__notes__", ()))
            raise StageShapeError(
                f"stage {self.stage}: its module cannot run on inputs ({inputs}): "
                f"{type(error).__name__} {where}: {error}\nCheck that the stages "
                "before make what this one takes; if they do, write the operation with "
                "others."
            ) from error

    def _check_outputs(self, specs: Sequence[TensorSpec]) -> None:
        if self.expected_outputs is None:
            return
        expected = describe_all(self.expected_outputs)
        got = [str(spec) for spec in specs]
        if expected != got:
            raise StageShapeError(
                f"stage {self.stage}: expected outputs {', '.join(expected)}, got "
                f"{', '.join(got)}. Correct output_args or the module."
            )


def _without_grad(spec: TensorSpec) -> TensorSpec:
    return replace(spec, requires_grad=False)


def spec_of(
    value: Tensor,
    partition: Partition,
    requires_grad: bool,
    axes: LogicalAxes | None = None,
) -> TensorSpec:
    """Describe a value by its metadata."""
    return TensorSpec(
        shape=tuple(value.shape),
        dtype=value.dtype,
        partition=partition,
        requires_grad=requires_grad,
        axes=axes,
    )


def describe_all(values: Sequence[Tensor]) -> list[str]:
    """Return the texts that specs of `values` have."""
    return [str(spec_of(value, (None,) * value.dim(), False)) for value in values]


def example_of(spec: TensorSpec) -> Tensor:
    """Return a tensor of which only the metadata may be used."""
    value = torch.empty(spec.shape, dtype=spec.dtype, device=xla_compat.device())
    return value.requires_grad_(spec.requires_grad)

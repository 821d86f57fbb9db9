"""What a stage knows about its inputs and outputs under one schedule.

A plan is made before the first step of its kind and never changes; programs are added
to it as they are needed, one set per mode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import JointGraph, Remat, StagePrograms, export_joint
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.graph import Template, sharding_outputs
from torch_xla_pp.mesh import AxisRules, LogicalAxes, Partition, TensorSpec, Tiling
from torch_xla_pp.plan import Fan, Value
from torch_xla_pp.runtime.grad_groups import grouping_of
from torch_xla_pp.runtime.links import Links
from torch_xla_pp.runtime.memory import Sizes
from torch_xla_pp.runtime.module_state import ModuleState
from torch_xla_pp.runtime.placement import Placement


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
        training: Whether the module is in training mode.
        autocast: The dtype of autocast, None where it is off.
        hooks: The forward hooks of the module and of what is in it.
    """

    training: bool
    autocast: torch.dtype | None
    hooks: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> "Mode":
        """Return the present mode."""
        hooks = tuple(
            hook
            for submodule in module.modules()
            for known in (submodule._forward_pre_hooks, submodule._forward_hooks)
            for hook in known.values()
        )
        return cls(module.training, autocast_dtype(), hooks)


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
    """

    programs: StagePrograms
    outputs: tuple[TensorSpec, ...]
    links: Links
    num_random: int
    sizes: Sizes


@dataclass(kw_only=True, eq=False, slots=True)
class StagePlan:
    """Hold what a stage agreed on for one schedule.

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
    expected_outputs: Sequence[Tensor] | None
    tilings: dict[int, Mapping[Value, Tiling]] = field(default_factory=dict)
    is_described: bool = False
    _variants: dict[Mode, Variant] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all tensor inputs, received ones first."""
        return self.received + self.given

    def held(self, outputs: Sequence[TensorSpec]) -> dict[Value, TensorSpec]:
        """Return what the stage takes from others and makes."""
        made = {Value(self.stage, slot): spec for slot, spec in enumerate(outputs)}
        return {**dict(zip(self.values, self.received, strict=True)), **made}

    def takes(self, name: str) -> bool:
        """Return whether the schedule may pass in a keyword argument."""
        return self.parameters is None or name in self.parameters

    def variant(
        self,
        mode: Mode,
        module: nn.Module,
        placement: Placement,
        state: ModuleState,
        link: Callable[[tuple[TensorSpec, ...], Template], Links],
    ) -> Variant:
        """Return what the module is in a mode, traced when new.

        Args:
            mode: The mode, in which the module is now.
            module: The stage's module.
            placement: How its values lie on the devices.
            state: Its parameters and buffers.
            link: Says for its outputs what is exchanged with other stages.

        Raises:
            StageShapeError: The module cannot run on the inputs, or its outputs are
                not what was declared.
            ValueError: A call of `shard` does not fit its value or the rules.
        """
        if mode not in self._variants:
            joint = self._export(module, placement.rules)
            self._check_constraints(placement, joint)
            outputs = tuple(
                spec_of(
                    value,
                    placement.layout_of(axes, tuple(value.shape), self.rows),
                    needs_grad,
                    axes,
                )
                for (value, needs_grad), axes in zip(
                    joint.example_outputs, joint.output_axes, strict=True
                )
            )
            self._check_outputs(outputs)
            links = link(outputs, joint.output_template)
            programs = StagePrograms(
                joint,
                [placement.sharding(spec.partition) for spec in outputs],
                [placement.sharding(spec.partition) for spec in self.inputs],
                state.shardings(),
                links.borders,
                remat=self.remat,
                constraints=state.constraints(),
                grouping=grouping_of(placement, self.inputs, outputs, state.layouts()),
            )
            self._variants[mode] = Variant(
                programs, outputs, links, joint.num_random, Sizes()
            )
        return self._variants[mode]

    def _check_constraints(self, placement: Placement, joint: JointGraph) -> None:
        faults = placement.constraint_faults(
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

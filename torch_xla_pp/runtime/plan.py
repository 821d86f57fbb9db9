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
from torch_xla_pp.compile import Borders, JointGraph, Remat, StagePrograms, export_joint
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.mesh import Partition, TensorSpec
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
    """

    training: bool
    autocast: torch.dtype | None

    @classmethod
    def of(cls, module: nn.Module) -> "Mode":
        """Return the present mode."""
        return cls(module.training, autocast_dtype())


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype of autocast, None where it is off."""
    is_on = torch.is_autocast_enabled("xla")
    return torch.get_autocast_dtype("xla") if is_on else None


class Variant(NamedTuple):
    """Hold a stage's programs for one mode.

    Attributes:
        programs: The compiled programs.
        outputs: What the stage's outputs look like.
        borders: What the programs exchange with other ranks themselves.
        num_random: How many random operations the stage has.
        sizes: Bytes of the values that the programs exchange.
    """

    programs: StagePrograms
    outputs: tuple[TensorSpec, ...]
    borders: Borders
    num_random: int
    sizes: Sizes


@dataclass(kw_only=True, eq=False, slots=True)
class StagePlan:
    """Hold what a stage agreed on for one schedule.

    Args:
        stage: Index of the stage.
        num_microbatches: Microbatches per step.
        rows: Rows of a microbatch.
        received: What the previous stage sends; empty on the first stage.
        random_before: How many random operations earlier stages have.
        remat: Which forward values the backward computes again.
        given: Tensors that the schedule passes in.
        signature: What the schedule's arguments must look like.
        expected_outputs: What the outputs must look like, None if anything goes.
    """

    stage: int
    num_microbatches: int
    rows: int
    received: tuple[TensorSpec, ...]
    random_before: int
    remat: Remat
    given: tuple[TensorSpec, ...]
    signature: Signature
    expected_outputs: Sequence[Tensor] | None
    _variants: dict[Mode, Variant] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return all tensor inputs, received ones first."""
        return self.received + self.given

    def variant(
        self,
        module: nn.Module,
        placement: Placement,
        state: ModuleState,
        borders: Callable[[tuple[TensorSpec, ...]], Borders],
    ) -> Variant:
        """Return what the module is in its present mode, traced when new.

        Args:
            module: The stage's module.
            placement: How its values lie on the devices.
            state: Its parameters and buffers.
            borders: Says for its outputs what the programs exchange with other ranks.

        Raises:
            StageShapeError: The module cannot run on the inputs, or its outputs are
                not what was declared.
        """
        mode = Mode.of(module)
        if mode not in self._variants:
            joint = self._export(module)
            outputs = tuple(
                spec_of(
                    value,
                    placement.batch_partition(tuple(value.shape), self.rows),
                    needs_grad,
                )
                for value, needs_grad in joint.example_outputs
            )
            self._check_outputs(outputs)
            own = borders(outputs)
            programs = StagePrograms(
                joint,
                [placement.sharding(spec.partition) for spec in outputs],
                [placement.sharding(spec.partition) for spec in self.inputs],
                state.shardings(),
                own,
                remat=self.remat,
            )
            self._variants[mode] = Variant(
                programs, outputs, own, joint.num_random, Sizes()
            )
        return self._variants[mode]

    def _export(self, module: nn.Module) -> JointGraph:
        received = [example_of(spec) for spec in self.received]
        args, kwargs = self.signature.fill([example_of(spec) for spec in self.given])
        try:
            return export_joint(module, [*received, *args], kwargs)
        except PipelineError:
            raise
        except Exception as error:
            inputs = ", ".join(map(str, self.inputs))
            raise StageShapeError(
                f"stage {self.stage}: its module cannot run on inputs ({inputs}): "
                f"{type(error).__name__}: {error}\nCheck that the previous stage "
                "makes what this one takes."
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


def spec_of(value: Tensor, partition: Partition, requires_grad: bool) -> TensorSpec:
    """Describe a value by its metadata."""
    return TensorSpec(
        shape=tuple(value.shape),
        dtype=value.dtype,
        partition=partition,
        requires_grad=requires_grad,
    )


def describe_all(values: Sequence[Tensor]) -> list[str]:
    """Return the texts that specs of `values` have."""
    return [str(spec_of(value, (None,) * value.dim(), False)) for value in values]


def example_of(spec: TensorSpec) -> Tensor:
    """Return a tensor of which only the metadata may be used."""
    value = torch.empty(spec.shape, dtype=spec.dtype, device=xla_compat.device())
    return value.requires_grad_(spec.requires_grad)

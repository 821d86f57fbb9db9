"""A stage's module as a joint graph, traced when its plan is known, or ahead of that.

A stage is planned when the stages before it have told what they make, which they know
when they were traced. If each waited for that, the stages of a job would be traced one
after the other. So a stage whose inputs are known but for `requires_grad` is traced
while it would wait, as if all inputs that can have gradients needed them. A trace that
turns out to be another than the plan's is dropped.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.collector import sparing_old_objects
from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.rank_rules import kept_attention
from torch_xla_pp.graph import Template, sharding_outputs
from torch_xla_pp.plan import Mode
from torch_xla_pp.world import World

_logger = logging.getLogger(__name__)


class StageCall(NamedTuple):
    """What a stage's module is traced with.

    Attributes:
        mode: The mode that it is in.
        shapes: Number of the shapes that the model is called with.
        args: Positional arguments; only the metadata of tensors counts.
        kwargs: Keyword arguments, likewise.
        tensors: The tensors among them, in the order of their roles.
    """

    mode: Mode
    shapes: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: Sequence[Tensor]

    def is_like(self, other: "StageCall") -> bool:
        """Return whether the same joint graph serves another call."""
        return self._look() == other._look()

    def _look(self) -> tuple[Any, ...]:
        tree = tuple(self.args), dict(self.kwargs)
        template, tensors = Template.of(tree, self.tensors)
        specs = [(x.shape, x.dtype, x.requires_grad) for x in tensors]
        return self.mode, self.shapes, template, specs


class StageTracer:
    """The traces of a stage's module, in its present mode.

    Args:
        module: The stage's module.
        world: The devices of its rank; its rules give results of submodules axes.
        in_shapes: Lets the module be that for the shapes of a number for a while.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        in_shapes: Callable[[int], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._module, self._world = module, world
        self._activations = {} if world.rules is None else world.rules.activations
        self._in_shapes = in_shapes
        self._ahead: tuple[StageCall, JointGraph] | None = None

    def trace(self, call: StageCall, *, has_kernels: bool = True) -> JointGraph:
        """Return the joint graph for a call; the caller may change it.

        Args:
            call: The call.
            has_kernels: Whether operations stay that the devices' kernels compute.
        """
        ahead, self._ahead = self._ahead, None
        if has_kernels and ahead is not None and ahead[0].is_like(call):
            return ahead[1]
        return self._export(call, has_kernels)

    @sparing_old_objects()
    def trace_ahead(self, mode: Mode, shapes: int, examples: Sequence[Tensor]) -> None:
        """Trace the module for the call that is likely to come.

        Args:
            mode: The mode that it is in.
            shapes: Number of the shapes that the model is called with.
            examples: Positional arguments, of which only shapes and dtypes count.
        """
        args = [example_like(x.shape, x.dtype, _may_need_grad(x)) for x in examples]
        call = StageCall(mode, shapes, args, {}, args)
        try:
            self._ahead = call, self._export(call)
        except Exception:
            # If it is the module's fault, the trace that is planned raises again.
            _logger.debug("a stage cannot be traced ahead of its plan", exc_info=True)

    def _export(self, call: StageCall, has_kernels: bool = True) -> JointGraph:
        with (
            self._in_shapes(call.shapes),
            sharding_outputs(self._module, self._activations),
        ):
            return export_joint(
                self._module,
                call.args,
                call.kwargs,
                call.tensors,
                stays=kept_attention(self._world) if has_kernels else _never,
            )


def example_like(
    shape: Sequence[int], dtype: torch.dtype, requires_grad: bool
) -> Tensor:
    """Return a tensor of which only the metadata may be used."""
    value = torch.empty(shape, dtype=dtype, device=xla_compat.device())
    return value.requires_grad_(requires_grad)


def _never(*args: Any) -> bool:
    return False


def _may_need_grad(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()

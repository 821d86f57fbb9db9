"""One program for a microbatch's loss and its gradient with respect to the outputs.

A loss function may return metrics beside the loss: they are outputs of the same
program, without a gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.attention_calls import has_call
from torch_xla_pp.compile.export import export_joint
from torch_xla_pp.compile.joint_graph import JointGraph
from torch_xla_pp.compile.lowering import LoweringRule
from torch_xla_pp.compile.names import (
    buffer_role,
    input_role,
    of_loss,
    parameter_role,
    tangent,
)
from torch_xla_pp.compile.partition import Function, value_and_grads
from torch_xla_pp.compile.program import Constants, Program
from torch_xla_pp.compile.program_spec import ProgramSpec
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.graph import Template

_SCALE = tangent(0)
_LOSS_SCALE = of_loss(_SCALE)


class _LossModule(nn.Module):
    """A loss function of tensors, which puts together the arguments of the user's."""

    def __init__(self, function: Callable[..., Any], output: Template) -> None:
        super().__init__()
        self.function = function
        self._output = output

    def forward(self, *tensors: Tensor) -> Any:
        """Take the tensors of the outputs, then the target and what follows it."""
        count = self._output.num_slots
        output = self._output.fill(tensors[:count])
        return split_loss(self.function(output, *tensors[count:]))


def split_loss(result: Any) -> tuple[Any, Any]:
    """Return the loss and the metrics that a loss function has returned.

    Args:
        result: The loss; or a tuple or list of it and metrics, tensors in any pytree.
            Several items after the loss are a tuple of metrics.
    """
    if not isinstance(result, (tuple, list)):
        return result, ()
    loss, *others = result
    metrics = others[0] if len(others) == 1 else tuple(others)
    return loss, pytree.tree_map_only(Tensor, Tensor.detach, metrics)


def of_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that counts the rows of a microbatch by weights.

    Args:
        function: A loss that is a mean or a sum over rows.

    Returns:
        Takes a weight of each row behind the target; returns the weighted sum of the
        rows' losses; and the sum of the metrics of rows whose weight is not zero, and
        the losses of the rows, and of all of them together.
    """

    def weighted(output: Any, target: Tensor, weights: Tensor) -> tuple[Any, Any]:
        def loss_of_row(output: Any, target: Tensor) -> tuple[Any, Any]:
            one = pytree.tree_map_only(Tensor, _as_row, output)
            return split_loss(function(one, _as_row(target)))

        found: tuple[Tensor, Any]
        found = torch.vmap(loss_of_row, randomness="different")(output, target)
        losses, metrics = found
        is_counted = weights != 0

        def total(values: Tensor) -> Tensor:
            shape = (-1,) + (1,) * (values.dim() - 1)
            return (values * is_counted.view(shape).to(values.dtype)).sum(0)

        loss = (losses * weights.to(losses.dtype)).sum()
        whole, _ = split_loss(function(output, target))
        return loss, (pytree.tree_map(total, metrics), losses, whole)

    return weighted


def _as_row(value: Tensor) -> Tensor:
    return value.unsqueeze(0)


class LossProgram:
    """One program for a loss, and for its gradient scaled by a factor.

    The function is traced at the first call. Tensors that it captures are read again
    when they have been written to; everything else that it reads from outside is built
    in.

    Args:
        function: Takes the stage's output, the target and what follows it, returns a
            scalar, or what `split_loss` takes.
        output: How the stage's outputs are put together.
        inputs: Examples of the outputs' tensors, of the target and of what follows it;
            only metadata counts.
        shardings: Sharding of each of them; gradients get the same.
        rules: How operations are run, see `compile.lowering`.

    Raises:
        PipelineError: The loss is not a scalar, or has parameters of its own to train.
        Exception: The function cannot be traced.

    Attributes:
        dtype: The dtype of the loss.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        output: Template,
        inputs: Sequence[Tensor],
        shardings: Sequence[xla_compat.OpSharding],
        rules: Sequence[LoweringRule] = (),
    ) -> None:
        module = _LossModule(function, output)
        joint = export_joint(module, inputs, {}, stays=has_call)
        if any(value.requires_grad for value in inputs):
            _check(joint)
        state: dict[str, Tensor] = {
            parameter_role(n): value for n, value in module.named_parameters()
        }
        state |= {buffer_role(n): value for n, value in module.named_buffers()}
        self._constants = Constants({**joint.constants, **state})
        piece = value_and_grads(joint)
        self._values = piece.outputs[: len(joint.outputs)]
        self._template = joint.output_template
        # Whether there are no metrics.
        _, metrics = self._template.fill(self._template.slots)
        self._is_alone = isinstance(metrics, tuple) and not metrics
        self._grads = {
            i: joint.roles.get(node, node.name)
            for i, node in joint.input_grads.items()
            if node is not None
        }
        names = [input_role(i) for i in range(len(inputs))]
        pins = {name: shardings[i] for i, name in self._grads.items()}
        pins |= dict.fromkeys(self._values, xla_compat.replicated_sharding())
        self._program = Program(
            ProgramSpec(function=piece, pins=pins, checked=names, rules=rules)
        )
        # What it reads behind the outputs, as a part of another program.
        self._others = [of_loss(name) for name in names[output.num_slots :]]
        self._is_random = joint.num_random > 0
        self.dtype = joint.example_outputs[0][0].dtype

    @property
    def program(self) -> Program:
        """Return the program; it takes `input_role`s, constants and the scale."""
        return self._program

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Return the tensors that it reads from elsewhere, by role."""
        return self._constants.sources

    @property
    def extra(self) -> xla_compat.ExtraBytes:
        """Return a run's bytes on a device beside its arguments, zero if unknown."""
        return self._program.extra

    def __call__(
        self,
        inputs: Sequence[Tensor],
        scale: Tensor,
        marks: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[int, Tensor], Any]:
        """Enqueue the program.

        Args:
            inputs: The outputs' tensors, the target and what follows it, on the device.
            scale: What to multiply the gradient by, a scalar of the loss's dtype on
                the device.
            marks: The `MARK` of the action that it is part of, nothing if that is not
                recorded.

        Returns:
            The loss, input index → gradient, and the metrics.
        """
        values = {input_role(i): value for i, value in enumerate(inputs)}
        values |= {_SCALE: scale, **marks}
        values |= self._program({**self._constants.values(), **values})
        loss, metrics = self.filled([values[name] for name in self._values])
        return loss, {i: values[n] for i, n in self._grads.items()}, metrics

    def filled(self, results: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Return the loss and the metrics that are made of the first results."""
        if self._is_alone:
            return results[0], ()
        loss, metrics = self._template.fill(results)
        return loss, metrics

    # As a part of another program.

    @property
    def is_joinable(self) -> bool:
        """Return whether it can be a part of a program.

        It draws no random numbers, as the program draws those of the stage, and it
        computes each gradient.
        """
        names = [*self._grads.values()]
        is_computed = {*names} <= {*self._program.outputs} and len({*names}) == len(
            names
        )
        return is_computed and not self._is_random

    @property
    def num_results(self) -> int:
        """Return how many results are the loss and metrics, the first ones."""
        return len(self._values)

    def function_of(self, outputs: Sequence[str]) -> Function:
        """Return its function, with names among those of a stage.

        Args:
            outputs: Names of the stage's outputs. The gradients that it returns have
                the names that the stage's backward reads them by.
        """
        function = self._program.spec.function
        named = {input_role(i): name for i, name in enumerate(outputs)}
        named |= {name: tangent(i) for i, name in self._grads.items()}
        return replace(
            function,
            inputs=tuple(named.get(n, of_loss(n)) for n in function.inputs),
            outputs=tuple(named.get(n, of_loss(n)) for n in function.outputs),
        )

    def operands(self, others: Sequence[Tensor], scale: Tensor) -> dict[str, Tensor]:
        """Return the operands of that function by name, but for the outputs.

        Args:
            others: The target and what follows it, on the device.
            scale: As in a call.
        """
        constants = self._constants.values()
        values = {of_loss(name): value for name, value in constants.items()}
        values |= zip(self._others, others, strict=True)
        return {**values, _LOSS_SCALE: scale}


def _check(joint: JointGraph) -> None:
    shapes = [list(value.shape) for value, _ in joint.example_outputs[:1]]
    if shapes != [[]]:
        raise PipelineError(
            f"loss_fn: expected a loss of shape [], got {', '.join(map(str, shapes))}. "
            "Take the mean or the sum over the microbatch."
        )
    trained = [*joint.parameter_grads, *joint.buffer_updates]
    if trained:
        raise PipelineError(
            "loss_fn: expected nothing that is trained or updated in the loss, got "
            f"{', '.join(trained)}. Put it into the module of the last stage."
        )

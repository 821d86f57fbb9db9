"""Traces of a model for other shapes than those of its example.

XLA compiles a program for each shape anyway, so a model is traced for each, too: values
that it computes from sizes are then those of eager mode, while one trace with dynamic
sizes would refuse code that depends on them. Every rank traces the whole model, of
which it has kept only the structure, and takes the part of its own stages.
"""

import contextlib
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from traceback import format_tb
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from torch_xla_pp.compile import place_of
from torch_xla_pp.deferred import skeleton_of, value_of
from torch_xla_pp.errors import PlanError, StageShapeError
from torch_xla_pp.graph import (
    Slot,
    StageGraph,
    add_shapes,
    has_shapes,
    in_mode,
    mode_to_trace,
)
from torch_xla_pp.launch import device
from torch_xla_pp.plan import Arguments
from torch_xla_pp.torch_pipe import move_factories_to

_MOST_LINES = 12
_OF_SIZES = (
    "If the model has a size built in, let it read sizes from its input, as in "
    "position[: x.shape[1]]; or fill batches up to sizes that it takes: rows by "
    "xpp.pad_batch, lengths by xpp.LengthBuckets."
)
_OF_COPIES = (
    "For other shapes a copy of the model is traced: take out of it what cannot be "
    "copied, or fill batches up to the example's shapes by xpp.pad_batch."
)


class SplitModel(Protocol):
    """A traced model that is split into stages."""

    stage_graph: StageGraph

    def get_stage_module(self, index: int) -> nn.Module:
        """Return the module of a stage."""


class Retracing:
    """The traces of a model for other shapes, each made once in each mode.

    Args:
        model: The model; only its structure is kept.
        example: Positional and keyword arguments that it was traced with.
        parameters: Names of its first stage's inputs.
        names: Names of its parameters and buffers.
        split: Traces it in its present mode with other arguments, and splits it.
        stage_graph: The stages with the example.
    """

    def __init__(
        self,
        model: nn.Module,
        example: tuple[Sequence[Any], Mapping[str, Any] | None],
        *,
        parameters: Sequence[str],
        names: Collection[str],
        split: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], SplitModel],
        stage_graph: StageGraph,
    ) -> None:
        self._parameters = tuple(parameters)
        self._names = frozenset(names)
        self._split = split
        self._between = _between(stage_graph)
        self._calls = [Arguments.of(*example)[0]]
        # The last one, as another stage of this rank is likely to need it next.
        self._latest: tuple[tuple[int, bool | None], SplitModel] | None = None
        self._model: nn.Module | None = None
        self._reason = ""
        try:
            self._model = skeleton_of(model)
        except Exception as error:
            self._reason = f"the model cannot be copied: {_told(error)}"

    def number(self, call: Arguments) -> int:
        """Return the number of a model's arguments, 0 for its example."""
        known = [self._named(other) for other in self._calls]
        named = self._named(call)
        if named not in known:
            self._calls.append(call)
            return len(known)
        return known.index(named)

    def add_to(
        self,
        stage: nn.Module,
        index: int,
        number: int,
        placed: Callable[[Tensor], Tensor],
    ) -> None:
        """Add the graph for a model's arguments to a stage, in its mode.

        Args:
            stage: The stage's module.
            index: Its index.
            number: The result of `number`.
            placed: Puts a host tensor on the devices.

        Raises:
            StageShapeError: The model cannot be traced with it.
        """
        if not isinstance(stage, fx.GraphModule) or has_shapes(stage, number):
            return
        call = self._calls[number]
        try:
            other = self._traced(call, number, mode_to_trace(stage))
            module = other.get_stage_module(index)
            if not isinstance(module, fx.GraphModule):
                raise PlanError("its stage is not a graph")
            move_factories_to(module, device())
            add_shapes(
                stage, module, self._names, number, lambda x: placed(_value_of(x))
            )
        except Exception as error:
            advice = _OF_COPIES if self._model is None else _OF_SIZES
            raise StageShapeError(
                "pipeline: expected a batch that the model can be traced with, as its "
                f"example {self._calls[0]}, got microbatches {call}:\n"
                f"{textwrap.indent(self._reason or _told(error), '  ')}\n{advice}"
            ) from error

    def _traced(
        self, call: Arguments, number: int, training: bool | None
    ) -> SplitModel:
        if self._latest is not None and self._latest[0] == (number, training):
            return self._latest[1]
        if self._model is None:
            raise PlanError(self._reason)
        slots = call.template.slots
        tensors = [torch.zeros(x.shape or (), dtype=x.dtype) for x in slots]
        args, kwargs = call.fill(tensors)
        with contextlib.ExitStack() as stack:
            if training is not None:
                stack.enter_context(in_mode(self._model, training))
            found = self._split(self._model, tuple(args), kwargs)
        if _between(found.stage_graph) != self._between:
            raise PlanError(
                "other values go between the stages than with the example, or of other "
                "dtypes"
            )
        self._latest = (number, training), found
        return found

    def _named(self, call: Arguments) -> dict[str, Any]:
        """Return arguments by name, whether they are positional or not."""
        args, kwargs = call.fill([_look(slot) for slot in call.template.slots])
        rest = {"": args[len(self._parameters) :]}
        return {**dict(zip(self._parameters, args, strict=False)), **kwargs, **rest}


def _look(slot: Slot) -> Any:
    return slot.shape, slot.dtype


def _between(graph: StageGraph) -> Any:
    """Return the inputs of stages from each other, without shapes."""
    values = [
        [value.dtype for value in (*stage.inputs, *stage.outputs)]
        for stage in graph.stages
    ]
    edges = [(x.producer, x.output, x.consumer, x.input) for x in graph.edges]
    return values, edges, graph.shared


def _value_of(tensor: Tensor) -> Tensor:
    """Return the value of a constant of a trace."""
    value = value_of(tensor) if tensor.is_meta else tensor
    if value is None:
        raise PlanError("a tensor that it makes while it is traced has no value")
    return value.detach()


def _told(error: Exception) -> str:
    """Return the first lines of an error, and the line of the model that raised it."""
    cause = error.__cause__ or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    where = place_of("".join([*format_tb(cause.__traceback__), str(cause)]))
    return "\n".join([f"{type(cause).__name__} ({where}):", *lines[:_MOST_LINES]])

"""The user's loss function on the last stage, compiled.

A schedule calls its `loss_fn` for each microbatch right after the forward of the last
stage. `StageLoss` replaces the function there: it runs the loss and its gradient as one
program, and keeps the gradient for the backward of that microbatch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile.loss_program import LossProgram, of_rows, split_loss
from torch_xla_pp.compile.rank_rules import rules_of
from torch_xla_pp.compile.stage_compiler import example_of
from torch_xla_pp.errors import PipelineError, StageShapeError
from torch_xla_pp.graph import Captured, Template
from torch_xla_pp.mesh import Partition, TensorSpec
from torch_xla_pp.plan import autocast_dtype
from torch_xla_pp.world import World

_logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    """The key of a compiled loss."""

    inputs: tuple[TensorSpec, ...]
    output: Template
    autocast: torch.dtype | None
    captured: int
    is_weighted: bool


class RowWeights(NamedTuple):
    """The weight of each row of a batch.

    Attributes:
        values: The weights, `(rows,)`.
        reduction: What the loss function does over rows, as declared: "mean" or "sum".
    """

    values: Tensor
    reduction: str


class PreparedLoss(NamedTuple):
    """A compiled loss, and its operands for one microbatch but for the outputs.

    Attributes:
        program: The loss.
        others: The target, and the weights of rows if there are some, on the device.
        scale: What the gradient is multiplied by, likewise.
    """

    program: LossProgram
    others: list[Tensor]
    scale: Tensor


class StageLoss:
    """A loss function on the outputs of the last stage.

    The function is traced once for each of: shapes, autocast, and what it reads from
    outside (numbers and the like; tensors count by identity, what is written into
    them is read again). A function that cannot be traced runs eagerly, with a warning.

    Args:
        function: The user's loss function.
        world: The devices of this rank.
        scale: What the gradient of each microbatch is multiplied by.

    Attributes:
        function: As given.
        scale: As given.
        extra: What the last loss took on a device beside its arguments, zero if that is
            not known.
        losses: Microbatch → its loss in the last step, without a graph.
        metrics: The other results of the function for each of them.
        next_weights: The weight of each row of the next batch, None for none.
    """

    def __init__(
        self, function: Callable[..., Any], world: World, scale: float
    ) -> None:
        self.function = function
        self._world = world
        self.scale = scale
        self._scales: dict[torch.dtype, Tensor] = {}
        self._programs: dict[_Key, LossProgram | None] = {}
        self._state = Captured(function)
        self._captured = 0
        # The shape of the first target of a step.
        self._shape: torch.Size | None = None
        # What the last microbatch of the step looked like, how its target is split,
        # and its program.
        self._looks: tuple[Any, ...] = ()
        self._found: tuple[Partition, LossProgram | None] = ((), None)
        self.extra = xla_compat.ExtraBytes()
        self.losses: dict[int, Tensor] = {}
        self.metrics: dict[int, Any] = {}
        self.next_weights: RowWeights | None = None
        self._weights: RowWeights | None = None
        # For each microbatch: the losses of its rows, and of all of them together.
        self._by_row: list[tuple[Tensor, Tensor]] = []

    def begin_step(self) -> None:
        """Look at the values that the function reads from outside; takes some µs."""
        self._captured = self._state.number()
        self._shape, self._looks = None, ()
        self.losses, self.metrics = {}, {}
        self._weights, self.next_weights = self.next_weights, None
        self._by_row = []

    def check_rows(self) -> None:
        """Refuse a loss whose reduction over rows is not the declared one.

        Waits for the losses of the step, if there were weights.

        Raises:
            PipelineError: It is not the mean or the sum over rows, as declared.
        """
        if self._weights is None:
            return
        reduction = self._weights.reduction
        for losses, whole in self._by_row:
            exact = losses.dtype in (torch.float32, torch.float64)
            rows, got = losses.cpu().double(), whole.cpu().double()
            reduce = torch.mean if reduction == "mean" else torch.sum
            wanted, size = reduce(rows), reduce(rows.abs())
            error = (wanted - got).abs()
            if not got.isnan() and not error <= (1e-4 if exact else 2e-2) * size:
                raise PipelineError(
                    f"pad_batch: expected a loss_fn that is a {reduction} over rows, "
                    f"got {got:.6g} for a microbatch of rows whose {reduction} is "
                    f"{wanted:.6g}. As where a mean leaves out ignored tokens: take "
                    'reduction="sum" in loss_fn and pad_batch, scale_grads=False in '
                    "the schedule, and divide gradients by the count."
                )

    def __call__(
        self,
        output: Any,
        specs: Sequence[TensorSpec],
        target: Any,
        rows: int,
        marks: Mapping[str, Tensor],
        microbatch: int,
    ) -> tuple[Any, dict[int, Tensor] | None]:
        """Compute the loss of one microbatch.

        Args:
            output: The stage's output, of leaves on the device.
            specs: What its tensors look like.
            target: The microbatch's target, on the host or the device.
            rows: Rows of the microbatch.
            marks: The mark of its forward, nothing if that is not recorded.
            microbatch: Its index.

        Returns:
            The loss, and output index → gradient; None in place of the gradients if
            the loss was computed eagerly and is yet to be differentiated by autograd.

        Raises:
            StageShapeError: The target is not like that of the first microbatch.
        """
        self.extra = xla_compat.ExtraBytes()
        template, outputs = Template.of(output)
        known = self.prepare(template, specs, target, rows, microbatch)
        if known is None:
            is_one = isinstance(target, Tensor)
            weights = self._weights_of(microbatch, rows) if is_one else []
            return self._run_eagerly(microbatch, output, target, *weights), None
        leaves = [value.detach() for value in outputs]
        program = known.program
        loss, grads, metrics = program([*leaves, *known.others], known.scale, marks)
        self.extra = program.extra
        self.keep(microbatch, loss, metrics)
        return loss, grads

    def prepare(
        self,
        template: Template,
        specs: Sequence[TensorSpec],
        target: Any,
        rows: int,
        microbatch: int,
    ) -> PreparedLoss | None:
        """Return the program for the loss of a microbatch, with its operands.

        Args:
            template: How the stage's outputs are put together.
            specs: As in a call, as are the others.
            target: See there.
            rows: See there.
            microbatch: See there.

        Returns:
            The program, None if the loss is computed eagerly.

        Raises:
            StageShapeError: See there.
        """
        if not isinstance(target, Tensor):
            return None
        self._check_shape(target)
        weights = self._weights_of(microbatch, rows)
        looks = template, specs, rows, target.dtype
        if looks != self._looks:
            self._found = self._find(template, specs, target, rows, weights)
            self._looks = looks
        partition, program = self._found
        if program is None:
            return None
        others = [self._world.place(target, partition)]
        others += [self._world.place(value, (None,)) for value in weights]
        return PreparedLoss(program, others, self._scale(program.dtype))

    def _find(
        self,
        template: Template,
        specs: Sequence[TensorSpec],
        target: Tensor,
        rows: int,
        weights: Sequence[Tensor],
    ) -> tuple[Partition, LossProgram | None]:
        """Return how a target is split, and the program for it, None for none."""
        partition = self._world.layout.batch_partition(tuple(target.shape), rows)
        wanted = (*specs, TensorSpec.of(target, partition, False))
        wanted += tuple(TensorSpec.of(value, (None,), False) for value in weights)
        key = _Key(wanted, template, autocast_dtype(), self._captured, bool(weights))
        if key not in self._programs:
            self._programs[key] = self._compile(key)
        return partition, self._programs[key]

    def _run_eagerly(
        self, microbatch: int, output: Any, target: Any, *weights: Tensor
    ) -> Any:
        function = of_rows(self.function) if weights else self.function
        given = [value.to(target.device) for value in weights]
        loss, metrics = split_loss(function(output, target, *given))
        self.keep(microbatch, loss.detach(), metrics)
        return loss

    def keep(self, microbatch: int, loss: Tensor, metrics: Any) -> None:
        """Keep the results of a microbatch for the end of the step."""
        if self._weights is not None:
            metrics, *by_row = metrics
            self._by_row.append((by_row[0], by_row[1]))
        self.losses[microbatch], self.metrics[microbatch] = loss, metrics

    def _weights_of(self, microbatch: int, rows: int) -> list[Tensor]:
        """Return the weights of a microbatch's rows, nothing if all are equal."""
        if self._weights is None:
            return []
        return [self._weights.values[microbatch * rows : (microbatch + 1) * rows]]

    def _check_shape(self, target: Tensor) -> None:
        """Refuse the remainder of a batch, before the loss function gets it."""
        if self._shape is None:
            self._shape = target.shape
        if target.shape != self._shape:
            raise StageShapeError(
                f"target: expected {[*self._shape]}, as in the first microbatch, got "
                f"{[*target.shape]}. Use a batch that divides into equal microbatches."
            )

    def _compile(self, key: _Key) -> LossProgram | None:
        examples = [example_of(spec) for spec in key.inputs]
        shardings = [self._world.sharding(spec.partition) for spec in key.inputs]
        try:
            rules = rules_of(self._world)
            function = of_rows(self.function) if key.is_weighted else self.function
            return LossProgram(function, key.output, examples, shardings, rules)
        except PipelineError:
            raise
        except Exception as error:
            _logger.warning(
                "loss_fn cannot be compiled and runs eagerly, which is slower: %s: %s",
                type(error).__name__,
                error,
            )
            return None

    def _scale(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._scales:
            scale = torch.tensor(self.scale, dtype=dtype)
            self._scales[dtype] = xla_compat.replicate(scale)
        return self._scales[dtype]

"""The outputs of the last stage for a schedule, and their gradients.

Law: an output that the schedule does not return lives until its loss is known, and no
longer. A schedule still has it in a local variable then, so its memory is taken away.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.channels import Marks
from torch_xla_pp.compile import CompiledStage, StageLoss, output_name, tangent
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.plan import StagePlan
from torch_xla_pp.state import SavedKind, SavedValues
from torch_xla_pp.world import World


class StageOutputs:
    """The outputs of a last stage, until their gradients are there.

    Args:
        world: The devices of this rank.
        saved: The saved values of the stage.

    Attributes:
        is_wanted: Whether the schedule returns the outputs at the end of this step.
        last: The microbatch of the latest output.
    """

    def __init__(self, world: World, saved: SavedValues) -> None:
        self._world = world
        self._saved = saved
        self.is_wanted = True
        self.last = 0
        # Microbatch → the tensors that its loss may be computed from.
        self._leaves: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self._leaves)

    def clear(self) -> None:
        """Drop everything."""
        self._leaves.clear()

    def keep(
        self,
        compiled: CompiledStage[Any],
        microbatch: int,
        outputs: Mapping[int, Tensor],
        *,
        is_scored: bool,
        is_trained: bool,
    ) -> tuple[Any, Any]:
        """Keep the outputs of a forward.

        Args:
            compiled: Has their specs.
            microbatch: Index of the microbatch.
            outputs: Its outputs, by index.
            is_scored: Whether its loss will be computed.
            is_trained: Whether it has a backward.

        Returns:
            The output for the end of the step, if wanted, and the one for now, whose
            tensors are leaves.
        """
        self.last = microbatch
        template = compiled.programs.output_template
        values = [outputs[index] for index in range(len(outputs))]
        leaves = [
            value.detach().requires_grad_(is_trained and spec.requires_grad)
            for value, spec in zip(values, compiled.outputs, strict=True)
        ]
        if is_scored:
            self._leaves[microbatch] = leaves
        if is_scored or self.is_wanted:
            named = {output_name(i): value for i, value in enumerate(values)}
            kind: SavedKind = "kept" if self.is_wanted else "output"
            self._saved.put(kind, microbatch, named, compiled.sizes)
        kept = [value.detach() for value in values] if self.is_wanted else None
        return None if kept is None else template.fill(kept), template.fill(leaves)

    def score(
        self,
        loss: StageLoss,
        plan: StagePlan,
        compiled: CompiledStage[Any],
        output: Any,
        target: Any,
        *,
        is_trained: bool,
        marks: Marks,
    ) -> Any:
        """Compute the loss of the microbatch of the latest output.

        Args:
            loss: Computes it.
            plan: Has the number of its rows.
            compiled: Has the specs of the output.
            output: The output.
            target: The target.
            is_trained: Whether the loss has a backward.
            marks: The marks of its forward.

        Returns:
            The loss, a scalar on the device.
        """
        specs = compiled.outputs
        if not is_trained:
            specs = tuple(replace(spec, requires_grad=False) for spec in specs)
        value, grads = loss(output, specs, target, plan.rows, marks, self.last)
        if grads is None:
            return self._differentiate(compiled, self.last, value, loss.scale)
        self._take_output(self.last)
        self._saved.note_run(loss.extra)
        self._put_grads(compiled, self.last, grads)
        return value

    def take_grads(
        self, compiled: CompiledStage[Any], microbatch: int, loss: Any, scale: float
    ) -> dict[str, Tensor]:
        """Return the gradients of a loss; none where the stage is not the last one.

        Args:
            compiled: Has the specs of the outputs.
            microbatch: Index of the microbatch.
            loss: Its loss, which is differentiated now if the schedule has computed it
                itself.
            scale: Factor of the gradients.
        """
        if loss is not None and microbatch in self._leaves:
            self._differentiate(compiled, microbatch, loss, scale)
        if not self._saved.has("loss", microbatch):
            return {}
        return self._saved.take("loss", microbatch)

    def _put_grads(
        self,
        compiled: CompiledStage[Any],
        microbatch: int,
        grads: Mapping[int, Tensor],
    ) -> None:
        """Keep the gradients that a compiled loss has computed, by output."""
        leaves = self._leaves.pop(microbatch)
        for leaf in [] if self.is_wanted else leaves:
            leaf.data = self._nothing
        tangents = {tangent(index): grad for index, grad in grads.items()}
        self._replace_output(compiled, microbatch, tangents)

    def _differentiate(
        self, compiled: CompiledStage[Any], microbatch: int, loss: Any, scale: float
    ) -> Any:
        """Keep the gradients of a loss that could not be compiled, if it is trained.

        Returns:
            The loss, without the graph, which would keep the outputs alive.
        """
        leaves = self._leaves.pop(microbatch, [])
        if not any(leaf.requires_grad for leaf in leaves):
            self._replace_output(compiled, microbatch, {})
            return loss
        found = self._differentiated(loss * scale, leaves, compiled.outputs)
        xla_compat.materialize([loss, *found.values()])
        self._replace_output(compiled, microbatch, found)
        return loss.detach()

    def _replace_output(
        self,
        compiled: CompiledStage[Any],
        microbatch: int,
        tangents: dict[str, Tensor],
    ) -> None:
        """Replace a kept output by its gradients."""
        self._take_output(microbatch)
        if tangents:
            self._saved.put("loss", microbatch, tangents, compiled.sizes)

    def _take_output(self, microbatch: int) -> None:
        """Release an output as soon as the next program does not need it."""
        if self._saved.has("output", microbatch):
            self._saved.take("output", microbatch)

    @functools.cached_property
    def _nothing(self) -> Tensor:
        return xla_compat.replicate(torch.zeros(0))

    def _differentiated(
        self, loss: Tensor, leaves: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> dict[str, Tensor]:
        """Return the gradients of outputs by a loss that was not compiled."""
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        grads = torch.autograd.grad(
            loss, [leaves[i] for i in wanted], allow_unused=True
        )
        return {
            tangent(i): self._world.pin(grad, specs[i].partition)
            for i, grad in zip(wanted, grads, strict=True)
            if grad is not None
        }

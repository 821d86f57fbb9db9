"""The outputs that a schedule gets of the last stage, and the gradients for them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import tangent
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.runtime.memory import Shelf
from torch_xla_pp.runtime.placement import Placement
from torch_xla_pp.runtime.plan import Variant
from torch_xla_pp.runtime.torch_compat import Schedule, grad_scale


class Outlet:
    """Keep the outputs of a last stage until their gradients are there.

    Args:
        placement: The devices of this rank.
        shelf: Where microbatches wait.
    """

    def __init__(self, placement: Placement, shelf: Shelf) -> None:
        self._placement = placement
        self._shelf = shelf
        # Microbatch → what its loss may be computed from.
        self._leaves: dict[int, list[Tensor]] = {}

    def clear(self) -> None:
        """Drop everything."""
        self._leaves.clear()

    def keep(
        self,
        variant: Variant,
        microbatch: int,
        outputs: Mapping[int, Tensor],
        *,
        is_trained: bool,
    ) -> tuple[Any, Any]:
        """Keep the outputs of a forward.

        Returns:
            The output for the end of the step, and that for now: if it is trained,
            its tensors are leaves that a loss may be computed from.
        """
        template = variant.programs.output_template
        values = [outputs[index].detach() for index in range(len(outputs))]
        kept = template.fill(values)
        named = {f"output:{i}": value for i, value in enumerate(values)}
        self._shelf.put("output", microbatch, named, variant.sizes)
        if not is_trained:
            return kept, kept
        self._leaves[microbatch] = [
            value.detach().requires_grad_(spec.requires_grad)
            for value, spec in zip(values, variant.outputs, strict=True)
        ]
        return kept, template.fill(self._leaves[microbatch])

    def put_grads(
        self, variant: Variant, microbatch: int, grads: Mapping[int, Tensor]
    ) -> None:
        """Keep the gradients that a compiled loss has computed, by output."""
        tangents = {tangent(index): grad for index, grad in grads.items()}
        self._shelf.put("loss", microbatch, tangents, variant.sizes)
        del self._leaves[microbatch]

    def take_grads(
        self, variant: Variant, microbatch: int, loss: Tensor | None, schedule: Schedule
    ) -> dict[str, Tensor]:
        """Return the gradients of a loss; none where the stage is not the last one.

        Args:
            variant: Says what the outputs look like.
            microbatch: Index of the microbatch.
            loss: Its loss, which is differentiated now unless it was compiled.
            schedule: Says how to scale gradients.
        """
        if self._shelf.has("loss", microbatch):
            return self._shelf.take("loss", microbatch)
        leaves = self._leaves.pop(microbatch, [])
        if loss is None or not any(leaf.requires_grad for leaf in leaves):
            return {}
        scaled = loss * grad_scale(schedule)
        found = self._differentiated(scaled, leaves, variant.outputs)
        xla_compat.materialize([loss, *found.values()])
        return found

    def _differentiated(
        self, loss: Tensor, leaves: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> dict[str, Tensor]:
        """Differentiate a loss that could not be compiled by the outputs."""
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        grads = torch.autograd.grad(
            loss, [leaves[i] for i in wanted], allow_unused=True
        )
        return {
            tangent(i): self._placement.pin(grad, specs[i].partition)
            for i, grad in zip(wanted, grads, strict=True)
            if grad is not None
        }

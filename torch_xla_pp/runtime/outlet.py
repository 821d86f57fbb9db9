"""The outputs that a schedule gets of the last stage, and the gradients for them.

Law: an output that nobody is to return lives until its loss is known, and no longer.
A schedule still has it in a local variable then, so it is emptied.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import output_name, tangent
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.runtime.memory import Kind, Shelf
from torch_xla_pp.runtime.plan import Variant
from torch_xla_pp.runtime.torch_compat import Schedule, grad_scale
from torch_xla_pp.runtime.world import World


class Outlet:
    """Keep the outputs of a last stage until their gradients are there.

    Args:
        world: The devices of this rank.
        shelf: Where microbatches wait.

    Attributes:
        is_wanted: Whether the schedule returns the outputs at the end of this step.
    """

    def __init__(self, world: World, shelf: Shelf) -> None:
        self._world = world
        self._shelf = shelf
        self.is_wanted = True
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
        is_scored: bool,
        is_trained: bool,
    ) -> tuple[Any, Any]:
        """Keep the outputs of a forward.

        Args:
            variant: Says what they look like.
            microbatch: Index of the microbatch.
            outputs: Its outputs, by index.
            is_scored: Whether its loss will be computed.
            is_trained: Whether it has a backward.

        Returns:
            The output for the end of the step if it is wanted, and that for now, whose
            tensors are leaves.
        """
        template = variant.programs.output_template
        values = [outputs[index] for index in range(len(outputs))]
        leaves = [
            value.detach().requires_grad_(is_trained and spec.requires_grad)
            for value, spec in zip(values, variant.outputs, strict=True)
        ]
        if is_scored:
            self._leaves[microbatch] = leaves
        if is_scored or self.is_wanted:
            named = {output_name(i): value for i, value in enumerate(values)}
            kind: Kind = "kept" if self.is_wanted else "output"
            self._shelf.put(kind, microbatch, named, variant.sizes)
        kept = [value.detach() for value in values] if self.is_wanted else None
        return None if kept is None else template.fill(kept), template.fill(leaves)

    def put_grads(
        self, variant: Variant, microbatch: int, grads: Mapping[int, Tensor]
    ) -> None:
        """Keep the gradients that a compiled loss has computed, by output."""
        leaves = self._leaves.pop(microbatch)
        for leaf in [] if self.is_wanted else leaves:
            leaf.data = self._nothing
        tangents = {tangent(index): grad for index, grad in grads.items()}
        self._replace_output(variant, microbatch, tangents)

    def differentiate(
        self, variant: Variant, microbatch: int, loss: Any, schedule: Schedule
    ) -> Any:
        """Keep the gradients of a loss that could not be compiled, if it is trained.

        Args:
            variant: Says what the outputs look like.
            microbatch: Index of the microbatch.
            loss: Its loss.
            schedule: Says how to scale gradients.

        Returns:
            The loss, without the graph, which would keep the outputs.
        """
        leaves = self._leaves.pop(microbatch, [])
        if not any(leaf.requires_grad for leaf in leaves):
            self._replace_output(variant, microbatch, {})
            return loss
        scaled = loss * grad_scale(schedule)
        found = self._differentiated(scaled, leaves, variant.outputs)
        xla_compat.materialize([loss, *found.values()])
        self._replace_output(variant, microbatch, found)
        return loss.detach()

    def take_grads(
        self, variant: Variant, microbatch: int, loss: Any, schedule: Schedule
    ) -> dict[str, Tensor]:
        """Return the gradients of a loss; none where the stage is not the last one.

        Args:
            variant: Says what the outputs look like.
            microbatch: Index of the microbatch.
            loss: Its loss, which is differentiated now if the schedule has computed it
                in a way of its own.
            schedule: Says how to scale gradients.
        """
        if loss is not None and microbatch in self._leaves:
            self.differentiate(variant, microbatch, loss, schedule)
        if not self._shelf.has("loss", microbatch):
            return {}
        return self._shelf.take("loss", microbatch)

    def _replace_output(
        self, variant: Variant, microbatch: int, tangents: dict[str, Tensor]
    ) -> None:
        """Keep gradients in the place of the output that they are for."""
        if self._shelf.has("output", microbatch):
            self._shelf.take("output", microbatch)
        if tangents:
            self._shelf.put("loss", microbatch, tangents, variant.sizes)

    @functools.cached_property
    def _nothing(self) -> Tensor:
        return xla_compat.replicate(torch.zeros(0))

    def _differentiated(
        self, loss: Tensor, leaves: Sequence[Tensor], specs: Sequence[TensorSpec]
    ) -> dict[str, Tensor]:
        """Differentiate a loss that could not be compiled by the outputs."""
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        grads = torch.autograd.grad(
            loss, [leaves[i] for i in wanted], allow_unused=True
        )
        return {
            tangent(i): self._world.pin(grad, specs[i].partition)
            for i, grad in zip(wanted, grads, strict=True)
            if grad is not None
        }

"""Pipelines of the benchmarks: ours and upstream's, in one form.

The schedules are torch's own, unmodified. A peer is upstream's stage on eager CPU
PyTorch, whose modules may be torch.compile'd, in a group of backend gloo.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gpt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

NUM_RANKS = 2
ONE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble",)
SCHEDULES = (*ONE_STAGE, "Interleaved1F1B", "InterleavedZeroBubble", *V_SHAPED)

MakeStage = Callable[[nn.Module, int, int], Any]


class PeerStage(PipelineStage):
    """Upstream's stage without its handshake, which fails on gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


class Side:
    """This rank's part of a pipeline that is trained step by step."""

    def __init__(
        self,
        make: MakeStage,
        schedule: str,
        indices: Sequence[int],
        num_stages: int,
        microbatches: int,
        size: dict[str, int],
    ) -> None:
        parts = {index: gpt.make_part(index, num_stages, size) for index in indices}
        self.stages = [make(part, i, num_stages) for i, part in parts.items()]
        kind: Any = get_schedule_class(schedule)
        driven = self.stages[0] if schedule in ONE_STAGE else self.stages
        self._runner = kind(driven, microbatches, loss_fn=gpt.loss_fn)
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.01)
        tokens, target = gpt.make_batch(microbatches, size)
        self._inputs = (tokens,) if 0 in indices else ()
        self._target = target if num_stages - 1 in indices else None

    def step(self) -> None:
        """Do one training step; ours may still run on the device."""
        losses: list[Tensor] = []
        self._runner.step(*self._inputs, target=self._target, losses=losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for loss in losses[-1:]:
            assert torch.isfinite(loss.detach()).item()


def ours(group: dist.ProcessGroup | None = None) -> MakeStage:
    """Return what makes a stage of this package."""
    import torch_xla_pp as xpp

    def make(module: nn.Module, index: int, num_stages: int) -> Any:
        return xpp.PipelineStage(module, index, num_stages, xpp.device(), group=group)

    return make


def peer(group: dist.ProcessGroup, *, is_compiled: bool = False) -> MakeStage:
    """Return what makes a stage of upstream's."""

    def make(module: nn.Module, index: int, num_stages: int) -> Any:
        module = torch.compile(module) if is_compiled else module
        cpu = torch.device("cpu")
        return PeerStage(module, index, num_stages, cpu, group=group)

    return make


def stage_indices(schedule: str, rank: int) -> list[int]:
    """Return the stages of a rank; V-shaped schedules have the last one on rank 0."""
    if schedule in ONE_STAGE:
        return [rank]
    is_v = schedule in V_SHAPED
    return [rank, 2 * NUM_RANKS - 1 - rank if is_v else rank + NUM_RANKS]


def num_stages_of(schedule: str) -> int:
    """Return the number of stages of all ranks."""
    return NUM_RANKS * len(stage_indices(schedule, 0))

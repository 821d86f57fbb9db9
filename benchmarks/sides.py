"""Pipelines of the benchmarks: ours and upstream's, in one form.

The schedules are torch's own classes. A peer is upstream's stage on eager CPU
PyTorch, whose modules may be torch.compile'd, in a group of backend gloo.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import gpt
import torch
import torch.distributed as dist
from pinning import pin
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime,
    get_schedule_class,
)

NUM_RANKS = 2
ONE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
SCHEDULES = (*ONE_STAGE, *LOOPED, *V_SHAPED)

MakeStage = Callable[[nn.Module, int, int], Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of what is timed."""
    return torch.optim.SGD(parameters, lr=0.01)


class PeerStage(PipelineStage):
    """Upstream's stage without its handshake, which fails on gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


class Side:
    """This rank's part of a pipeline that is trained step by step.

    Args:
        rows: Which rows of each microbatch are its own.

    Attributes:
        losses: Those of the last step, where the last stage is.
    """

    def __init__(
        self,
        make: MakeStage,
        schedule: str,
        indices: Sequence[int],
        num_stages: int,
        microbatches: int,
        size: dict[str, int],
        optimizer: MakeOptimizer = sgd,
        rows: slice = slice(None),
    ) -> None:
        parts = {index: gpt.make_part(index, num_stages, size) for index in indices}
        self.stages = [make(part, i, num_stages) for i, part in parts.items()]
        self.runner = make_runner(schedule, self.stages, microbatches)
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self._optimizer = optimizer(parameters)
        tokens, target = (
            values.unflatten(0, (microbatches, -1))[:, rows].flatten(0, 1)
            for values in gpt.make_batch(microbatches, size)
        )
        self.losses: list[Tensor] = []
        self._inputs = (tokens,) if 0 in indices else ()
        self._target = target if num_stages - 1 in indices else None

    def step(self) -> None:
        """Do one training step; ours may still run on the device."""
        self.losses = []
        self.runner.step(*self._inputs, target=self._target, losses=self.losses)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for loss in self.losses[-1:]:
            assert torch.isfinite(loss.detach()).item()


def make_runner(schedule: str, stages: list[Any], microbatches: int) -> Any:
    """Return torch's schedule for the stages of this rank.

    In torch 2.9 the schedule class of a V sends from a rank to itself, which gloo
    refuses. A peer's V has its order of actions, run by torch's other runtime, which
    hands values over.
    """
    kind: Any = get_schedule_class(schedule)
    driven = stages[0] if schedule in ONE_STAGE else stages
    runner = kind(driven, microbatches, loss_fn=gpt.loss_fn)
    is_peers_v = schedule in V_SHAPED and isinstance(stages[0], PeerStage)
    if not is_peers_v or isinstance(runner, _PipelineScheduleRuntime):
        return runner
    runtime = _PipelineScheduleRuntime(stages, microbatches, loss_fn=gpt.loss_fn)
    runtime._prepare_schedule_with_comms(runner.pipeline_order)
    return runtime


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


def join(cores: Sequence[int]) -> int:
    """Give this rank a core of its own, start XLA and join the job.

    Returns:
        The core, to which all threads are bound.
    """
    core = cores[int(os.environ["RANK"]) % len(cores)]
    pin(core)
    import torch_xla_pp as xpp

    xpp.device()
    dist.init_process_group("xla_pp")
    return core


def our_side(
    schedule: str,
    microbatches: int,
    size: dict[str, int],
    optimizer: MakeOptimizer = sgd,
) -> Side:
    """Return this rank's part of our pipeline."""
    indices, num_stages = (
        stage_indices(schedule, dist.get_rank()),
        num_stages_of(schedule),
    )
    return Side(ours(), schedule, indices, num_stages, microbatches, size, optimizer)


def stage_indices(schedule: str, rank: int) -> list[int]:
    """Return the stages of a rank; V-shaped schedules have the last one on rank 0."""
    if schedule in ONE_STAGE:
        return [rank]
    is_v = schedule in V_SHAPED
    return [rank, 2 * NUM_RANKS - 1 - rank if is_v else rank + NUM_RANKS]


def num_stages_of(schedule: str) -> int:
    """Return the number of stages of all ranks."""
    return NUM_RANKS * len(stage_indices(schedule, 0))

"""What torch's own schedule classes run, found by running them on recording stages."""

from typing import Any

import torch
from torch import nn

from torch_xla_pp.schedule import Action, Schedule


class Recorder:
    """A stage that computes nothing and records the calls of its schedule."""

    def __init__(self, stage: int, num_stages: int, rank: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.submod = nn.Identity()
        self.log: list[Action] = []
        self.output_chunks: list[torch.Tensor] = []

    def _write(self, kind: Any, microbatch: int) -> None:
        self.log.append(
            Action(stage=self.stage_index, kind=kind, microbatch=microbatch)
        )

    def forward_one_chunk(self, microbatch: int, args: Any, kwargs: Any) -> Any:
        self._write("F", microbatch)
        self.output_chunks.append(torch.zeros(1))
        return self.output_chunks[-1]

    def backward_one_chunk(
        self, microbatch: int, full_backward: bool = True, **kwargs: Any
    ) -> None:
        self._write("B" if full_backward else "I", microbatch)

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool) -> None:
        self._write("W", microbatch)

    def __getattr__(self, name: str) -> Any:
        """Answer all questions about communication with nothing."""
        if name.startswith(("get_", "set_", "_", "scale_", "clear_")):
            return lambda *args, **kwargs: []
        raise AttributeError(name)


def recorders(num_ranks: int, rank: int, style: str, per_rank: int) -> list[Recorder]:
    num_stages = num_ranks * per_rank
    stages = range(rank, num_stages, num_ranks)
    if style == "v":
        stages = (rank, num_stages - 1 - rank)
    log: list[Action] = []
    made = [Recorder(stage, num_stages, rank, num_ranks) for stage in stages]
    for stage in made:
        stage.log = log
    return made


def make(
    cls: Any,
    num_ranks: int,
    num_microbatches: int,
    *,
    rank: int = 0,
    style: str = "single",
    per_rank: int = 1,
) -> tuple[Any, list[Recorder]]:
    """Make a schedule of class `cls` on recording stages, as on one rank."""
    stages = recorders(num_ranks, rank, style, per_rank)
    argument = stages[0] if style == "single" else stages
    return cls(argument, num_microbatches, loss_fn=lambda out, target: out), stages


def executed(cls: Any, num_ranks: int, num_microbatches: int, **options: Any) -> Any:
    """Return the schedule that the class runs, by running it on every rank."""
    rows = []
    for rank in range(num_ranks):
        schedule, stages = make(cls, num_ranks, num_microbatches, rank=rank, **options)
        schedule.step(target=torch.zeros(num_microbatches))
        rows.append(tuple(stages[0].log))
    return Schedule(actions=tuple(rows))

"""A schedule class that runs any table of actions.

It is used like the schedule classes of torch.distributed.pipelining. Its loop has no
communication: the stages' programs receive and send by themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.utils import _pytree as pytree

from torch_xla_pp.runtime.rank import RankPipeline
from torch_xla_pp.runtime.stage import PipelineStage
from torch_xla_pp.schedule import Action, Schedule, verify
from torch_xla_pp.torch_compat import (
    ScheduleMulti,
    StepCall,
    begin_microbatches,
    compute_loss,
    end_microbatches,
    has_backward,
    loss_of,
    set_order,
)
from torch_xla_pp.transport import of_group


class ScheduleFromTable(ScheduleMulti):
    """A schedule that runs the actions of a table, in its order.

    All ranks must make it, from the same table. `eval` runs the forwards alone.

    Args:
        stages: This rank's stages, made by `Pipe.build_stage` or as `PipelineStage`.
        schedule: The table, or what `Schedule.from_csv` takes: a file, or its text.
        loss_fn: Computes the loss of a microbatch from output and target.
        args_chunk_spec: How positional inputs are cut into microbatches.
        kwargs_chunk_spec: How keyword inputs are.
        output_merge_spec: How outputs are put together again.
        scale_grads: Whether gradients are averaged over the microbatches.

    Raises:
        TypeError: A stage is not one of this package.
        ValueError: The stages are not those that the table has on this rank.
        ScheduleError: The table breaks a law of `torch_xla_pp.schedule.verify`; laws
            about the values between stages are verified before the first step.
    """

    def __init__(
        self,
        stages: list[Any],
        schedule: Schedule | str | Path,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
    ) -> None:
        _check_types(stages)
        with of_group(stages[0].group).rendezvous.reporting():
            if not isinstance(schedule, Schedule):
                schedule = Schedule.from_csv(schedule)
            _check_stages(stages, schedule)
            verify(schedule, edges=())
        super().__init__(
            stages,
            schedule.num_microbatches,
            loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self.table = schedule
        set_order(self, [[str(action) for action in row] for row in schedule.actions])
        self._actions = schedule.actions[stages[0].group_rank]
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self._last_of = _last_backwards(self._actions)

    @classmethod
    def from_csv(
        cls, stages: list[Any], path: str | Path, *args: Any, **kwargs: Any
    ) -> "ScheduleFromTable":
        """Read the table from a file, compute-only or lowered.

        Args:
            stages: This rank's stages.
            path: The file.
            *args: As for the class, from `loss_fn` on.
            **kwargs: Likewise.
        """
        return cls(stages, Path(path), *args, **kwargs)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one batch, see `torch.distributed.pipelining`.

        Args:
            *args: Positional arguments of the model.
            target: Second argument of the loss function.
            losses: Receives the loss of each microbatch.
            return_outputs: Whether the rank of the last stage is to return the
                outputs; they are kept until the end of the step for that.
            **kwargs: Keyword arguments of the model.
        """
        batch = pytree.tree_leaves((args, kwargs, target))
        rank = RankPipeline.of(self)
        rank.begin_step(StepCall(self, batch, return_outputs))
        with rank.reporting():
            return super().step(*args, target=target, losses=losses, **kwargs)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
    ) -> None:
        """Run this rank's actions for one batch; called by `step` and `eval`."""
        args, kwargs = begin_microbatches(self, arg_mbs, kwarg_mbs, target_mbs, losses)
        trains = has_backward(self)
        for action in self._actions:
            if action.kind != "F" and not trains:
                continue
            if action.kind == "F":
                self._run_forward(action, args, kwargs, target_mbs)
            else:
                self._run_backward(action)
        end_microbatches(self, losses)
        RankPipeline.of(self).end_step()

    def _run_forward(
        self,
        action: Action,
        args: list[Any],
        kwargs: list[Any],
        targets: list[Any] | None,
    ) -> None:
        stage, index = self._stage_of[action.stage], action.microbatch
        output = stage.forward_one_chunk(index, args[index], kwargs[index])
        compute_loss(self, stage, output, targets, index)

    def _run_backward(self, action: Action) -> None:
        stage, index = self._stage_of[action.stage], action.microbatch
        is_last = action == self._last_of[action.stage]
        if action.kind == "W":
            stage.backward_weight_one_chunk(index, last_backward=is_last)
            return
        stage.backward_one_chunk(
            index,
            loss=loss_of(self, stage, index),
            full_backward=action.kind == "B",
            last_backward=is_last,
        )


def _last_backwards(actions: Iterable[Action]) -> Mapping[int, Action]:
    """Return the action of each stage that completes its gradients."""
    return {action.stage: action for action in actions if action.kind in "BW"}


def _check_types(stages: Sequence[Any]) -> None:
    foreign = [type(s).__name__ for s in stages if not isinstance(s, PipelineStage)]
    if foreign or not stages:
        raise TypeError(
            "stages: expected stages that communicate by themselves, got "
            f"{', '.join(foreign) or 'none'}. Make them by Pipe.build_stage or as "
            "torch_xla_pp.PipelineStage."
        )


def _check_stages(stages: Sequence[Any], schedule: Schedule) -> None:
    """Refuse a table for other ranks or stages."""
    first = stages[0]
    for what, expected, got in (
        ("ranks", first.group_size, schedule.num_ranks),
        ("stages", first.num_stages, schedule.num_stages),
    ):
        if expected != got:
            raise ValueError(
                f"schedule: expected a table of {expected} {what}, got {got}. Make it "
                "for the pipeline's group and stages."
            )
    expected_here = schedule.stages_of(first.group_rank)
    here = tuple(sorted(stage.stage_index for stage in stages))
    if here != expected_here:
        raise ValueError(
            f"stages: expected {expected_here} as the table has on rank "
            f"{first.group_rank}, got {here}. Build these stages, or move their rows."
        )

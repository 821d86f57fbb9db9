"""The steps and actions of one rank under one schedule.

    begin_step     raises errors of others, drops leftovers, moves values to the device
    prepare        before the first step: agrees with the other ranks on the stages
    (first F)      at the first forward of a step: finds its kind; a new kind is
                   planned, compiled, and agreed on
    action         one action of a stage; its errors reach all ranks
    end_step       averages and publishes gradients, if no rank has reported a failure

Law: gradients are scaled once. The derivative of the loss is divided by the number of
microbatches before it enters the last stage's backward.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import nn

from torch_xla_pp import cpu, xla_compat
from torch_xla_pp.channels import Links, Marks, Observer
from torch_xla_pp.compile import CompiledStage, StageKind, StageLoss, StagePrograms
from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.plan import StagePlan, random_seed
from torch_xla_pp.runtime.gradients.finish import combine
from torch_xla_pp.runtime.joined_actions import JoinedActions
from torch_xla_pp.runtime.outputs import StageOutputs
from torch_xla_pp.runtime.stage_model import StageModel
from torch_xla_pp.runtime.step_plans import StepPlans, agree_on_pipeline
from torch_xla_pp.runtime.wrong_input import check_batch, check_no_hooks, check_rows
from torch_xla_pp.schedule import Action, Kind
from torch_xla_pp.state import SavedValues
from torch_xla_pp.torch_compat import (
    SilentStage,
    StepCall,
    TorchSchedule,
    calling_step,
    cuts_rows,
    drop_outputs,
    grad_scale,
    guard_step,
    local_stages,
    loss_function,
    merge_outputs_as,
    merge_outputs_by,
    merge_spec,
    num_microbatches,
    rank_of,
    set_loss_function,
)
from torch_xla_pp.transport import (
    LinkedGroups,
    StepsAhead,
    XlaPpProcessGroup,
    end_step,
)


class LocalStage(Protocol):
    """A stage in the view of its rank."""

    stage_index: int
    num_stages: int
    has_backward: bool
    num_steps: int
    submod: nn.Module
    model: StageModel
    saved: SavedValues
    outputs: StageOutputs
    process_group: XlaPpProcessGroup
    groups: LinkedGroups

    @property
    def is_last(self) -> bool:
        """Return whether no stage comes after it."""

    def begin_step(self, rank: "RankPipeline", *, wants_outputs: bool) -> None:
        """Begin a step under a schedule."""

    def drop_leftovers(self) -> None:
        """Drop the leftovers of a failed step."""

    @property
    def deferred(self) -> int | None:
        """Return the microbatch whose forward waits for its loss, None for none."""

    def score_deferred(self, loss: StageLoss, target: Any) -> Any:
        """Run that forward, and compute its loss."""

    def explain(self) -> object:
        """Return the costs of the stage, to be printed."""


class Run(NamedTuple):
    """The plan, programs and channels that an action runs with.

    Attributes:
        plan: The stage's plan in this kind of step.
        compiled: The stage compiled for it.
        programs: Its programs.
        links: Its channels to other stages.
        is_given: Whether the schedule passes arguments to it.
        marks: Operands by which programs note their times, if the step is observed.
    """

    plan: StagePlan
    compiled: CompiledStage[Links]
    programs: StagePrograms
    links: Links
    is_given: bool
    marks: Marks = MappingProxyType({})

    @classmethod
    def of(cls, plan: StagePlan, compiled: CompiledStage[Links]) -> "Run":
        """Return the run of a stage's actions for a plan."""
        return cls(
            plan=plan,
            compiled=compiled,
            programs=compiled.programs,
            links=compiled.links,
            is_given=plan.is_given,
        )


@final
class RankPipeline:
    """The stages of one rank under one schedule; made once for both.

    Args:
        schedule: The schedule that drives the stages.

    Attributes:
        schedule: As given.
        stages: The stages, in the schedule's order.
        observer: The observer of the actions, None for none.
        num_microbatches: Microbatches of a step.
        lowest: The first of these stages, which gets the arguments of a step.
        has_loss: Whether the loss of every microbatch is computed here.
    """

    def __init__(self, schedule: TorchSchedule) -> None:
        self.schedule = schedule
        self.stages: list[LocalStage] = local_stages(schedule)
        _check_stages(self.stages)
        self.lowest = min(stage.stage_index for stage in self.stages)
        self.observer: Observer | None = None
        self.num_microbatches = num_microbatches(schedule)
        self._groups = list({s.groups.key: s.groups for s in self.stages}.values())
        self._activity = self._groups[0].activity
        self._process_group = self.stages[0].process_group
        self._merge_spec = merge_spec(schedule)
        self._loss = self._take_loss()
        self.has_loss = self._loss is not None
        self._plans: StepPlans | None = None
        self._ahead: StepsAhead | None = None
        # The stages in the kind of this step, by index, and the runs of their actions.
        self._current: dict[int, StageKind[Links]] = {}
        self._runs: dict[int, Run] = {}
        self._replica = 0
        # Stages that the schedule has not cleared yet in this step.
        self._expected: set[int] = set()
        self._num_done: dict[int, int] = {}
        self._num_compiled = 0
        self._joined = JoinedActions()

    @classmethod
    def of(cls, schedule: TorchSchedule) -> "RankPipeline":
        """Return the rank pipeline of a schedule, made at the first call."""
        found: RankPipeline = rank_of(schedule, cls)
        return found

    @classmethod
    def calling(cls) -> "RankPipeline | None":
        """Begin a step of torch's schedule that is calling, and return its pipeline."""
        call = calling_step()
        if call is None:
            return None
        rank = cls.of(call.schedule)
        guard_step(call.schedule, rank.reporting, rank.end_step)
        rank.begin_step(call)
        return rank

    # A step.

    def begin_step(self, call: StepCall) -> None:
        """Begin a step, before its batch is cut.

        Raises:
            Exception: A peer has reported a failure, or a stage has changed illegally.
        """
        number = max(stage.num_steps for stage in self.stages) + 1
        self._activity.begin_step(number)
        with self.reporting():
            for groups in self._groups:
                groups.check()
            check_batch(call.batch)
            if cuts_rows(self.schedule):
                check_rows(call.batch, self.num_microbatches)
            self._num_done = dict.fromkeys((s.stage_index for s in self.stages), 0)
            self._current = {}
            for stage in self.stages:
                stage.drop_leftovers()
            if self._plans is not None and self._ahead is not None:
                self._plans.begin_step()
                self._ahead.begin_step()
            self._process_group.transport.settle()
            for stage in self.stages:
                stage.begin_step(self, wants_outputs=call.wants_outputs)
            self._drop_garbage()
            self._expected = {stage.stage_index for stage in self.stages}

    def _drop_garbage(self) -> None:
        """Return memory that is not used, such as that of new compilations."""
        count = xla_compat.num_compilations()
        cpu.begin_step(has_compiled=count != self._num_compiled)
        self._num_compiled = count

    def is_beginning(self, stage: int) -> bool:
        """Return, once a step for each stage, that its step has just begun."""
        is_expected = stage in self._expected
        self._expected.discard(stage)
        return is_expected

    def end_step(self) -> None:
        """End a step of this rank, after the last action of all its stages.

        Gradients are published unless a rank has reported a failure in this step. A
        failure that is reported later is raised in the next one.
        """
        with self.reporting():
            if self._loss is not None:
                self._loss.check_rows()
            is_training = any(stage.has_backward for stage in self.stages)
            if is_training:
                combine([stage.model.gradients for stage in self.stages])
            self._process_group.transport.settle()
            for stage in self.stages:
                stage.model.publish()
                if self._current:
                    _describe_once(stage, self._current[stage.stage_index])
            if self._ahead is not None:
                self._ahead.end_step()
            self._activity.end_step()
            end_step(self._groups, is_training=is_training)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that stops this rank to the other ranks."""
        try:
            with contextlib.ExitStack() as stack:
                for groups in self._groups:
                    stack.enter_context(groups.reporting())
                yield
        except BaseException:
            self._expected.clear()
            for stage in self.stages:
                stage.model.roll_back()
                stage.saved.drop_free()
            raise

    # Before the first step.

    def prepare(self) -> None:
        """Agree with the other ranks on the stages and where they are, once.

        Messages are agreed on at the first forward of each kind of step, see
        `StepPlans.find`: they depend on the arguments of all stages.

        Raises:
            PlanError: The ranks do not build one pipeline.
            ScheduleError: The order of actions cannot run, see `schedule.verify`.
        """
        if self._plans is not None:
            return
        with self.reporting():
            models = [stage.model for stage in self.stages]
            self._plans, self._ahead, self._joined = agree_on_pipeline(
                self.schedule, models, self._process_group
            )

    # Actions.

    def run(self, stage: LocalStage) -> Run:
        """Return the run of a stage's actions in this step.

        Raises:
            PipelineError: No forward has begun the step.
        """
        if not self._current:
            raise PipelineError(
                f"stage {stage.stage_index}: expected a forward before a backward of a "
                "step. Correct the schedule's order."
            )
        return self._runs[stage.stage_index]

    def _begin_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the kind of this step, at its first forward."""
        if self._loss is not None:
            self._loss.begin_step()
        if self._plans is None:
            raise PipelineError(
                "step: expected stages that were prepared, got a forward before. Let "
                "the schedule's step or eval call it."
            )
        own = max(stage.num_steps for stage in self.stages)
        self._current = self._plans.find(args, kwargs, own)
        self._replica, _ = self.stages[0].model.replica
        for stage in self.stages:
            stage.num_steps = self._plans.step
            if stage.has_backward:
                check_no_hooks(stage.stage_index, stage.model.state.fixed)
            kind = self._current[stage.stage_index]
            compiled = kind.compiled(stage.model.mode)
            self._runs[stage.stage_index] = Run.of(kind.plan, compiled)
            if compiled.without_gradients and stage.has_backward:
                raise PipelineError(
                    f"stage {stage.stage_index}: its outputs need gradients now, but "
                    "their offer to later stages says that they do not. Make a new "
                    "schedule on every rank after requires_grad was changed."
                )
            if stage.is_last:
                _choose_merge(self.schedule, self._merge_spec, stage, compiled)

    def seed(self, stage: LocalStage, plan: StagePlan, microbatch: int) -> int:
        """Return the seed of a stage's random numbers for one microbatch.

        All stages draw from one sequence per microbatch, each from where the stages
        before it end, so that the numbers do not depend on where the model is split.
        The seeds of replicas differ, as if their batches were parts of one.
        """
        number = self._replica * plan.num_microbatches + microbatch
        seed = random_seed(torch.initial_seed(), stage.num_steps, number)
        return xla_compat.advanced_seed(seed, plan.random_before)

    def joins(self, stage: LocalStage, run: Run) -> bool:
        """Return whether a forward, its loss and its backward may be one program.

        A step that is observed keeps them apart, so that each has its own times.
        """
        is_scored = stage.is_last and self.has_loss and stage.has_backward
        is_seen = stage.outputs.is_wanted or self.observer is not None
        may = run.programs.can_join and is_scored and not is_seen
        return may and self._joined.is_prompt

    def splits(self, stage: LocalStage, run: Run, microbatch: int) -> bool:
        """Return whether that program leaves the gradients of weights to another one.

        It does where the schedule has them apart, and at the end of a step, where all
        other ranks wait for the gradients of inputs: they leave before those of weights
        are computed.
        """
        if not run.programs.can_split:
            return False
        action = Action(stage=stage.stage_index, kind="I", microbatch=microbatch)
        if action in self._joined.inputs:
            return not self.is_whole(stage, run, microbatch)
        return self._joined.last == replace(action, kind="B")

    def is_whole(self, stage: LocalStage, run: Run, microbatch: int) -> bool:
        """Return whether a backward of inputs may be one program with that of weights.

        It is where the one comes right after the other and no other rank waits for the
        gradients of inputs. A step that is observed keeps them apart.
        """
        action = Action(stage=stage.stage_index, kind="I", microbatch=microbatch)
        is_awaited = run.links.has_far_producers
        is_seen = self.observer is not None
        may = run.programs.can_be_whole and not is_awaited and not is_seen
        return may and action in self._joined.whole

    def action(
        self,
        stage: LocalStage,
        kind: Kind,
        microbatch: int,
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> contextlib.AbstractContextManager[Run]:
        """Run an action of a stage; `reporting` is around the whole step.

        Args:
            stage: The stage.
            kind: Kind of the action.
            microbatch: Index of the microbatch.
            given: Arguments that the schedule passes to a forward.
        """
        # A failed action stays noted.
        self._activity.action = _noted(f"{stage.stage_index}{kind}", microbatch)
        if given is not None and not self._current:
            self._begin_kind(*given)
        shown = xla_compat.shown_as(f"PP:{stage.stage_index}{kind}{microbatch}")
        is_seen = self.observer is not None
        seen = self._observed(stage, kind, microbatch) if is_seen else None
        run = self.run(stage)
        return _RunningAction(run, shown, seen, partial(self._end_action, stage, kind))

    def _end_action(self, stage: LocalStage, kind: Kind) -> None:
        if kind in "BW":
            self._num_done[stage.stage_index] += 1
            if self._num_done[stage.stage_index] == self.num_microbatches:
                # Sums are sent to replicas while other stages still compute.
                stage.model.gradients.end_backwards(self.run(stage).programs)
        self._activity.action = ""

    def _observed(
        self, stage: LocalStage, kind: Kind, microbatch: int, *, is_rest: bool = False
    ) -> contextlib.AbstractContextManager[Marks]:
        """Let the observer watch the block, if there is one."""
        if self.observer is None:
            return contextlib.nullcontext({})
        action = Action(stage=stage.stage_index, kind=kind, microbatch=microbatch)
        return self.observer.action(action, is_rest=is_rest)

    # The loss.

    def _take_loss(self) -> StageLoss | None:
        """Let the schedule call this rank for the loss, if it has the last stage."""
        function = loss_function(self.schedule)
        last = [stage for stage in self.stages if stage.is_last]
        if function is None or not last:
            return None
        (stage,) = last
        loss = StageLoss(function, stage.model.world, grad_scale(self.schedule))

        def compute(output: Any, target: Any) -> Any:
            return self._score(stage, loss, output, target)

        set_loss_function(self.schedule, compute)
        return loss

    def _score(
        self, stage: LocalStage, loss: StageLoss, output: Any, target: Any
    ) -> Any:
        """Compute a loss right after the forward of its microbatch."""
        if stage.deferred is not None:
            self._activity.action = _noted(f"{stage.stage_index}F", stage.deferred)
            found = stage.score_deferred(loss, target)
            self._activity.action = ""
            return found
        run = self.run(stage)
        last = stage.outputs.last
        with self._observed(stage, "F", last, is_rest=True) as marks:
            return stage.outputs.score(
                loss,
                run.plan,
                run.compiled,
                output,
                target,
                is_trained=stage.has_backward,
                marks=marks,
            )

    @property
    def loss(self) -> StageLoss | None:
        """Return the compiled loss, None on ranks without the last stage."""
        return self._loss

    @property
    def loss_function(self) -> Callable[..., Any] | None:
        """Return the user's loss function, None on ranks without the last stage."""
        return None if self._loss is None else self._loss.function

    @property
    def grad_scale(self) -> float:
        """Return the factor of the gradient of each microbatch."""
        return grad_scale(self.schedule)


class _RunningAction:
    """The block that enqueues an action.

    A context of `contextlib` takes several times as long to enter and to leave.

    Args:
        run: What the action runs with.
        shown: The block in profilers.
        seen: The block in the view of an observer, None if there is none.
        end: Called when the action is enqueued.
    """

    def __init__(
        self,
        run: Run,
        shown: contextlib.AbstractContextManager[Any],
        seen: contextlib.AbstractContextManager[Marks] | None,
        end: Callable[[], None],
    ) -> None:
        self._run, self._shown, self._seen, self._end = run, shown, seen, end

    def __enter__(self) -> Run:
        self._shown.__enter__()
        if self._seen is None:
            return self._run
        return self._run._replace(marks=self._seen.__enter__())

    def __exit__(self, *error: Any) -> None:
        if self._seen is not None:
            self._seen.__exit__(*error)
        self._shown.__exit__(*error)
        if error[0] is None:
            self._end()


def _noted(name: str, microbatch: int) -> str:
    """Return how an action is named in errors."""
    return f"{name}{microbatch}, microbatch {microbatch}"


def _choose_merge(
    schedule: TorchSchedule,
    given: Any,
    stage: LocalStage,
    compiled: CompiledStage[Links],
) -> None:
    """Choose how a schedule merges the outputs of this step.

    Args:
        schedule: The schedule that drives the stage.
        given: The user's choice, None if there is none.
        stage: The last stage.
        compiled: The stage compiled for the step.
    """
    if not stage.outputs.is_wanted:
        drop_outputs(schedule)
    elif given is not None:
        merge_outputs_by(schedule, given)
    else:
        shapes = [spec.shape for spec in compiled.outputs]
        merge_outputs_as(schedule, compiled.programs.output_template, shapes)


def _describe_once(stage: LocalStage, kind: StageKind[Links]) -> None:
    """Dump the costs of a kind of step, when the first one is done."""
    if not kind.is_described:
        kind.is_described = True
        dump(f"stage{stage.stage_index}.txt", lambda: str(stage.explain()))


def _check_stages(stages: Sequence[Any]) -> None:
    """Refuse stages of another package."""
    foreign = [type(x).__name__ for x in stages if not isinstance(x, SilentStage)]
    if foreign:
        raise TypeError(
            f"schedule: expected stages of torch_xla_pp, got {', '.join(foreign)}. "
            "Make them by Pipe.build_stage or as torch_xla_pp.PipelineStage."
        )

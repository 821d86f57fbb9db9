"""The kinds of a rank's steps: each is planned, compiled and agreed on once.

Before the first step of a schedule, `agree_on_pipeline` compares the ranks' claims.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch_xla_pp.channels import Links
from torch_xla_pp.compile import StageCompiler, StageKind
from torch_xla_pp.dump import dump
from torch_xla_pp.plan import Claim, check_kwargs
from torch_xla_pp.runtime.agreement import Agreement, StepKinds
from torch_xla_pp.runtime.gradients.replicas import agree_on_replicas
from torch_xla_pp.runtime.gradients.tied import check_separate
from torch_xla_pp.runtime.joined_actions import JoinedActions
from torch_xla_pp.runtime.stage_model import StageModel
from torch_xla_pp.schedule import verify
from torch_xla_pp.torch_compat import TorchSchedule, num_microbatches, order_of
from torch_xla_pp.transport import StepsAhead, XlaPpProcessGroup

_MANY_PLANS = 8

_logger = logging.getLogger(__name__)


class StepPlans:
    """The kinds of steps of one rank under one schedule.

    Args:
        agreement: The agreement of all ranks.
        stages: The rank's stages.
        num_microbatches: Microbatches of a step.
    """

    def __init__(
        self,
        agreement: Agreement,
        stages: Sequence[StageModel],
        num_microbatches: int,
    ) -> None:
        self._agreement = agreement
        self._numbers = StepKinds(agreement)
        self._stages = sorted(stages, key=lambda stage: stage.index)
        self._num_microbatches = num_microbatches
        # Number of the kind → the stages in it, by index.
        self._known: dict[int, dict[int, StageKind[Links]]] = {}
        self._num_compiled: dict[int, int] = {}
        # Number of the kind → the generation in which all ranks had their plans.
        self._agreed: dict[int, int] = {}

    def begin_step(self) -> None:
        """Count a step; every rank must call it once a step."""
        self._numbers.begin_step()

    @property
    def step(self) -> int:
        """Return the number of the step, equal on all ranks, after `find`."""
        return self._numbers.step

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], step: int
    ) -> dict[int, StageKind[Links]]:
        """Return the stages, by index, in the kind of this step; at its first forward.

        It plans all stages of a rank at once and in their order, whichever runs first:
        a stage waits for the offers of earlier ones. No program of a new kind runs
        before all ranks have their plans.

        Args:
            args: Positional arguments of a microbatch, for the first of the stages.
            kwargs: Keyword arguments, for all stages.
            step: Number of the step on this rank.
        """
        found: dict[int, StageKind[Links]] = {}
        for stage in self._stages:
            mode = stage.look()
            own = () if found else args
            if stage.is_first:
                self._numbers.announce(stage.kind_of_step(own, kwargs), step)
            number = self._numbers.current()
            if number in self._known:
                kind = self._known[number][stage.index]
            else:
                if stage.is_first:
                    self._agreement.tell_call(number, stage.call_of(own, kwargs))
                kind = self._planned(stage, number, own, kwargs)
            kind.compiled(mode)
            found[stage.index] = kind
        check_kwargs(kwargs, [kind.plan for kind in found.values()])
        number, generation = self._numbers.current(), self._agreement.generation
        # A failure may have come when some ranks had agreed and others had not.
        if self._agreed.get(number) != generation:
            self._agree_on_tilings(found)
            self._known[number], self._agreed[number] = found, generation
        for stage in self._stages:
            self._warn_of_many(stage.index)
        return found

    def _planned(
        self,
        stage: StageModel,
        number: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StageKind[Links]:
        """Take the offers of earlier stages, and make one to later ones."""
        # Before it waits for offers, so that all ranks trace at the same time.
        shapes = stage.shapes_of_call(self._agreement.call(number))
        known = [x for x in self._compilers(stage.index) if x.shapes == shapes]
        if not known:
            stage.trace_ahead(shapes)
        plan = self._agreement.plan(
            stage.planner_for(shapes), number, self._num_microbatches, args, kwargs
        )
        like = [compiler for compiler in known if plan.is_like(compiler.plan)]
        compiler = like[0] if like else stage.compiler(plan, shapes)
        kind = StageKind(plan=plan, compiler=compiler)
        offer = kind.offer(stage.mode)
        if not stage.is_last:
            self._agreement.offer(number, stage.index, offer)
        return kind

    def _agree_on_tilings(self, kinds: dict[int, StageKind[Links]]) -> None:
        """Exchange the tilings of values over devices with the other ranks."""
        own = {s.index: s.tilings(kinds[s.index]) for s in self._stages}
        tilings = self._agreement.exchange_tilings(own)
        for kind in kinds.values():
            kind.compiler.agree(tilings)

    def _compilers(self, stage: int) -> list[StageCompiler[Links]]:
        """Return the compilers of a stage for the kinds that are known."""
        found = (kinds[stage].compiler for kinds in self._known.values())
        return list({id(compiler): compiler for compiler in found}.values())

    def _warn_of_many(self, stage: int) -> None:
        """Warn when a stage has programs for more and more kinds of steps."""
        count = sum(len(compiler.compiled) for compiler in self._compilers(stage))
        if count > max(_MANY_PLANS, self._num_compiled.get(stage, 0)):
            _logger.warning(
                "stage %d: programs for %d kinds of steps (shapes, other arguments, "
                "autocast, and training mode, hooks, requires_grad, numbers and all "
                "else that forward reads) are compiled and kept. Each new one costs a "
                "compilation: pad batches to few shapes, and keep what changes often "
                "in buffers.",
                stage,
                count,
            )
        self._num_compiled[stage] = count


def agree_on_pipeline(
    schedule: TorchSchedule, stages: Sequence[StageModel], group: XlaPpProcessGroup
) -> tuple[StepPlans, StepsAhead, JoinedActions]:
    """Agree with the other ranks on the stages and where they are.

    Args:
        schedule: The schedule that drives the stages.
        stages: The stages of this rank.
        group: The ranks of the pipeline.

    Returns:
        The kinds of steps, none of which is known yet; the bound on how far this rank
        may be ahead of others; and which actions of this rank may be one program.

    Raises:
        PlanError: The ranks do not build one pipeline.
        ScheduleError: The order of actions cannot run, see `schedule.verify`.
    """
    check_separate({stage.index: stage.module for stage in stages})
    order, count = order_of(schedule), num_microbatches(schedule)
    claim = Claim(
        stages=tuple(stage.claim() for stage in stages),
        num_stages=stages[0].num_stages,
        num_microbatches=count,
        schedule=type(schedule).__name__,
        order="" if order is None else order.digest(),
        transport=group.transport.name,
        replica=stages[0].replica,
        plan=stages[0].plan,
    )
    agreement = Agreement.on(group.rendezvous, claim)
    wiring = agreement.wiring
    if order is not None:
        dump("schedule.csv", order.to_csv)
        verify(
            order,
            wiring.edges(),
            placement=dict(enumerate(wiring.ranks)),
            num_microbatches=count,
            carriers=wiring.carriers(),
        )
    replicas = {stage.index: stage.replicas for stage in stages}
    agree_on_replicas(replicas, stages[0].num_stages)
    plans = StepPlans(agreement, stages, count)
    plans.begin_step()
    mine = [stage.index for stage in stages]
    ahead = StepsAhead(
        group,
        agreement.key,
        sources=[wiring.ranks[p] for s in mine for p in wiring.producers(s)],
        takers=[wiring.ranks[c] for s in mine for c in wiring.consumers(s)],
    )
    for stage in stages:
        stage.connect(wiring)
    joined = JoinedActions(order, wiring.edges(), group.rank())
    return plans, ahead, joined

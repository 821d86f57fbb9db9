"""Run a schedule without computing anything, and note the time.

Every rank runs its actions in their order. An action begins when the rank is free; it
waits for the messages that it needs, takes the time of its cost, and sends the messages
that others need, each once it is there. Sending takes the rank no time, and receives
find their messages whenever they arrive; messages on one link follow each other in the
order of sending.

Law: all times are sums and maxima of costs, in an order that the schedule fixes, so
that no step gets shorter when something takes longer.
"""

import gc
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from random import Random

from torch_xla_pp.schedule import Schedule, carriers_of, verify
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.network import Network
from torch_xla_pp.simulate.routes import Phase, Routes
from torch_xla_pp.simulate.routines import Routine, routines_of
from torch_xla_pp.timeline import Span, Timeline, Transfer, peak_saved


def simulate(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    random: Random | None = None,
) -> Timeline:
    """Return the timeline of a step that starts at 0 on all ranks.

    Args:
        schedule: The actions of each rank. Actions that no other one waits for may be
            missing, see `verify`.
        costs: The costs of stages.
        network: The links between ranks; None for messages that take no time.
        random: Draws the time of each action from `costs.samples`; None for means.

    Raises:
        ScheduleError: The schedule cannot run to its end.
        ValueError: A cost is missing, or an edge leads to a stage without actions.
    """
    placement = schedule.placement
    _check(schedule, costs)
    routes = Routes.of(costs.flows, placement, network or Network())
    with _without_collector():
        run = _Run(schedule, costs, routes, random)
        if not run.is_complete or _is_spread(schedule):
            _refuse(schedule, costs)
        return run.timeline(costs)


class _Run:
    """A run of all ranks, as far as they get."""

    def __init__(
        self, schedule: Schedule, costs: Costs, routes: Routes, random: Random | None
    ) -> None:
        self._spans: list[list[Span]] = [[] for _ in schedule.actions]
        self._transfers: list[Transfer] = []
        self._rows = schedule.actions
        self._random = random
        self._routines = routines_of(costs, routes)
        self._done: set[tuple[Phase, int]] = set()
        self._awake = deque(range(len(self._rows)))
        while self._awake:
            self._run_rank(self._awake.popleft())

    @property
    def is_complete(self) -> bool:
        """Return whether every action has run, and is there only once."""
        return len(self._done) == sum(map(len, self._rows))

    def timeline(self, costs: Costs) -> Timeline:
        """Return the timeline so far."""
        saved, passed = costs.saved_bytes, costs.passed_bytes
        peaks = [peak_saved(row, saved, passed) for row in self._spans if saved]
        return Timeline(
            num_ranks=len(self._rows),
            spans=tuple(chain.from_iterable(self._spans)),
            transfers=tuple(self._transfers),
            peak_bytes=tuple(peaks),
        )

    def _run_rank(self, rank: int) -> None:
        """Run a rank until it waits for a message not yet sent, or to its end."""
        row, spans = self._rows[rank], self._spans[rank]
        free_s = spans[-1].end_s if spans else 0.0
        for index in range(len(spans), len(row)):
            action = row[index]
            microbatch = action.microbatch
            routine = self._routines[action.stage, action.kind]
            start_s = self._start_s(rank, routine, microbatch, free_s)
            if start_s is None:
                return
            took_s = self._seconds(routine)
            end_s = start_s + took_s
            spans.append(
                Span(
                    rank=rank,
                    stage=action.stage,
                    kind=action.kind,
                    microbatch=microbatch,
                    start_s=free_s,
                    end_s=end_s,
                    waiting_s=start_s - free_s,
                )
            )
            self._finish(routine, microbatch, end_s, took_s)
            free_s = end_s

    def _seconds(self, routine: Routine) -> float:
        if self._random is None:
            return routine.seconds
        return self._random.choice(routine.samples)

    def _start_s(
        self, rank: int, routine: Routine, microbatch: int, free_s: float
    ) -> float | None:
        """Return when all messages for an action are there, None if one is missing.

        The rank continues when the message is sent. A value that is missing on the rank
        itself never comes.
        """
        start_s = free_s
        for mailbox in routine.receives:
            arrival_s = mailbox.arrivals.get(microbatch)
            if arrival_s is None:
                mailbox.sleepers[microbatch] = rank
                return None
            if arrival_s > start_s:
                start_s = arrival_s
        for phase in routine.after:
            if (phase, microbatch) not in self._done:
                return None
        return start_s

    def _finish(
        self, routine: Routine, microbatch: int, now_s: float, took_s: float
    ) -> None:
        self._done.add((routine.phase, microbatch))
        for mailbox in routine.sends:
            sent_s = now_s - (1 - mailbox.stream.hop.part) * took_s
            self._transfers.append(mailbox.post(microbatch, sent_s))
            if mailbox.sleepers:
                sleeper = mailbox.sleepers.pop(microbatch, None)
                if sleeper is not None:
                    self._awake.append(sleeper)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector, which would visit all spans again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_spread(schedule: Schedule) -> bool:
    """Return whether a stage has actions on several ranks."""
    stages = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    return sum(map(len, stages)) > len(set().union(*stages))


def _refuse(schedule: Schedule, costs: Costs) -> None:
    """Raise the faults of a schedule that does not come to its end."""
    values = [(flow.producer, flow.consumers) for flow in costs.flows]
    carriers = carriers_of(values, schedule.placement)
    verify(schedule, costs.edges, carriers=carriers)


def _check(schedule: Schedule, costs: Costs) -> None:
    """Refuse costs that do not fit the schedule."""
    needed = {(a.stage, a.kind) for row in schedule.actions for a in row}
    missing = sorted(f"{stage}{kind}" for stage, kind in needed - set(costs.seconds))
    stages = {stage for stage, _ in needed}
    idle = sorted({s for edge in costs.edges for s in edge} - stages)
    if not missing and not idle:
        return
    faults = []
    if missing:
        known = ", ".join(sorted({kind for _, kind in costs.seconds})) or "none"
        faults.append(
            f"simulate: expected the time of every action, got none for "
            f"{_some(missing)} (known are kinds {known}). Measure a schedule that has "
            "such actions, or give their times."
        )
    if idle:
        faults.append(
            f"simulate: expected actions of all stages that flows lead to, got none of "
            f"stages {_some(list(map(str, idle)))}. Give the flows of the schedule's "
            "stages."
        )
    raise ValueError("\n".join(faults))


def _some(names: Sequence[str]) -> str:
    """List names, the first ten of many."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")

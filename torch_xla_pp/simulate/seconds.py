"""The time of a step, without its timeline: for comparing thousands of plans.

The results equal those of `simulate` up to the order of sums, in less than a tenth of
its time. Nothing here checks the order of a rank's own actions.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import inf
from typing import NamedTuple

from torch_xla_pp.schedule import KINDS, Schedule
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.network import Network
from torch_xla_pp.simulate.routes import PHASES, Routes
from torch_xla_pp.simulate.simulation import simulate

_Row = tuple[tuple[int, int], ...]  # number of the stage's kind, microbatch


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """A schedule with the data that repeated evaluations need only once.

    Args:
        schedule: One that `verify` accepts.
    """

    schedule: Schedule = field(repr=False)

    @cached_property
    def placement(self) -> Mapping[int, int]:
        """Stage → rank."""
        return self.schedule.placement

    @cached_property
    def rows(self) -> tuple[_Row, ...]:
        """The actions of each rank as pairs of numbers."""
        numbers = {kind: number for number, kind in enumerate(KINDS)}
        return tuple(
            tuple((a.stage * len(KINDS) + numbers[a.kind], a.microbatch) for a in row)
            for row in self.schedule.actions
        )

    @cached_property
    def counts(self) -> tuple[Mapping[int, int], ...]:
        """For each rank the kinds of actions of stages, and the number of each."""
        return tuple(Counter(number for number, _ in row) for row in self.rows)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self.schedule.num_microbatches


def step_seconds(
    order: StepOrder | Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    routes: Routes | None = None,
    limit_s: float = inf,
) -> float:
    """Return the time of a step, including `final_s`.

    Args:
        order: The actions of each rank; a `StepOrder` if there are several costs.
        costs: The costs of stages; `final_s` counts, too.
        network: The links between ranks; None for messages that take no time.
        routes: The routes of the messages, if they are known.
        limit_s: Of a longer step the time does not matter: it may be infinity.

    Raises:
        ScheduleError: The schedule cannot run to its end.
        ValueError: A cost is missing.
    """
    if isinstance(order, Schedule):
        order = StepOrder(schedule=order)
    network = network or Network()
    routes = routes or Routes.of(costs.flows, order.placement, network)
    latest_s = latest_ends(len(order.rows), costs, order.placement, limit_s)
    free_s = _ends(order, costs, routes, latest_s)
    if free_s is None:
        simulate(order.schedule, costs, network)
        raise ValueError("step_seconds: expected a schedule that can run.")
    return with_final_s(free_s, costs, order.placement) if free_s else inf


def with_final_s(
    ends_s: Sequence[float],
    costs: Costs,
    placement: Mapping[int, int] | Sequence[int],
) -> float:
    """Return when all ranks have done what follows their last actions.

    Args:
        ends_s: When each rank has run its last action.
        costs: The costs of stages, with their `final_s`.
        placement: Rank of each stage.
    """
    found_s = [*ends_s]
    for stage, seconds in costs.final_s.items():
        found_s[placement[stage]] += seconds
    return max(found_s)


def latest_ends(
    num_ranks: int,
    costs: Costs,
    placement: Mapping[int, int] | Sequence[int],
    limit_s: float,
) -> list[float]:
    """Return when each rank has to have run its last action.

    Args:
        num_ranks: Number of ranks.
        costs: The costs of stages, with their `final_s`.
        placement: Rank of each stage.
        limit_s: What a step may take.
    """
    # What takes just as long is in time, whatever the order of sums.
    found_s = [limit_s * (1 + 1e-9)] * num_ranks
    for stage, seconds in costs.final_s.items():
        found_s[placement[stage]] -= seconds
    return found_s


class _Sent(NamedTuple):
    """Messages that actions of one stage and kind send: one for each microbatch.

    Args:
        arrivals: When each arrives, -1 if that is not known yet.
        sending_s: Time for which one occupies the link.
        latency_s: Time until it arrives after that.
        link: Number of the link.
        waiting: The microbatch that the receiver waits for, as a list of one; -1 for
            none.
        receiver: Rank that receives.
        early_s: Time before the end of the action at which it is there.
    """

    arrivals: list[float]
    sending_s: float
    latency_s: float
    link: int
    waiting: list[int]
    receiver: int
    early_s: float = 0.0


_Routine = tuple[float, tuple[_Sent, ...], tuple[_Sent, ...]]


def _ends(
    order: StepOrder, costs: Costs, routes: Routes, latest_s: Sequence[float]
) -> list[float] | None:
    """Return when each rank has run its last action.

    It is one function, as calls would take longer than its work.

    Returns:
        The times; [] if one is later than it may be, None if a rank never ends.
    """
    routines = _routines(order, costs, routes)
    links_free_s = [0.0] * routes.num_links
    rows = order.rows
    # For how long each rank may wait.
    spare_s = [
        end_s - sum(count * routines[number][0] for number, count in counts.items())
        for end_s, counts in zip(latest_s, order.counts, strict=True)
    ]
    free_s, steps = [0.0] * len(rows), [0] * len(rows)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row, now_s = rows[rank], free_s[rank]
        for step in range(steps[rank], len(row)):
            number, microbatch = row[step]
            seconds, receives, sends = routines[number]
            start_s = now_s
            for sent in receives:
                arrival_s = sent[0][microbatch]
                if arrival_s < 0:
                    sent[4][0] = microbatch
                    start_s = -1.0
                    break
                if arrival_s > start_s:
                    start_s = arrival_s
            if start_s != now_s:
                if start_s < 0:
                    steps[rank] = step
                    break
                spare_s[rank] -= start_s - now_s
                if spare_s[rank] < 0:
                    return []
            now_s = start_s + seconds
            for (
                arrivals,
                sending_s,
                latency_s,
                link,
                waiting,
                receiver,
                early_s,
            ) in sends:
                link_s, sent_s = links_free_s[link], now_s - early_s
                link_s = (link_s if link_s > sent_s else sent_s) + sending_s
                links_free_s[link] = link_s
                arrivals[microbatch] = link_s + latency_s
                if waiting[0] == microbatch:
                    waiting[0] = -1
                    awake.append(receiver)
        else:
            steps[rank] = len(row)
        free_s[rank] = now_s
    is_complete = all(step == len(row) for step, row in zip(steps, rows, strict=True))
    return free_s if is_complete else None


def _routines(order: StepOrder, costs: Costs, routes: Routes) -> dict[int, _Routine]:
    """Return the routines of each stage and kind."""
    streams = [
        _Sent(
            arrivals=[-1.0] * order.num_microbatches,
            sending_s=stream.sending_s,
            latency_s=stream.latency_s,
            link=stream.link,
            waiting=[-1],
            receiver=stream.receiver_rank,
        )
        for stream in routes.streams
    ]
    found = {}
    for number in chain.from_iterable(order.counts):
        stage, kind = number // len(KINDS), KINDS[number % len(KINDS)]
        seconds = costs.seconds.get((stage, kind))
        if seconds is None:
            raise ValueError(
                f"step_seconds: expected the time of {stage}{kind}, got none. Give the "
                "times of all kinds that the schedule has."
            )
        phase = stage, PHASES[kind]
        found[number] = (
            seconds,
            tuple(streams[stream] for stream in routes.receives.get(phase, ())),
            tuple(
                _sent_from(streams[number], routes.streams[number].hop.part, seconds)
                for number in routes.sends.get(phase, ())
            ),
        )
    return found


def _sent_from(sent: _Sent, part: float, seconds: float) -> _Sent:
    """Return messages as actions send them that take so long."""
    return sent if part == 1 else sent._replace(early_s=(1 - part) * seconds)

"""How long a step takes, without its timeline: for comparing thousands of plans.

The times are those of `simulate`, to the last bit but for the order of sums, in less
than a tenth of its time. Nothing here checks the order of a rank's own actions.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch_xla_pp.schedule import KINDS, Schedule
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.network import Network
from torch_xla_pp.simulate.routes import PHASES, Routes, Stream
from torch_xla_pp.simulate.simulation import simulate

_Row = tuple[tuple[int, int], ...]  # number of the stage's kind, microbatch


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """A schedule with what evaluating it again and again needs only once.

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
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return self.schedule.num_microbatches


def step_seconds(
    order: StepOrder | Schedule, costs: Costs, network: Network | None = None
) -> float:
    """Return how long a step takes, with what ranks do at its end.

    Args:
        order: The actions of each rank; a `StepOrder` if there are several costs.
        costs: What they take and send; `final_s` counts, too.
        network: The links between ranks; None for messages that take no time.

    Raises:
        ScheduleError: The schedule cannot run to its end.
        ValueError: A cost is missing.
    """
    if isinstance(order, Schedule):
        order = StepOrder(schedule=order)
    network = network or Network()
    routes = Routes.of(costs.flows, order.placement, network)
    free_s = _ends(order, costs, routes)
    if free_s is None:
        simulate(order.schedule, costs, network)
        raise ValueError("step_seconds: expected a schedule that can run.")
    for stage, seconds in costs.final_s.items():
        free_s[order.placement[stage]] += seconds
    return max(free_s)


def _ends(order: StepOrder, costs: Costs, routes: Routes) -> list[float] | None:
    """Return when each rank has run its last action, None if one never does.

    It is one function, as calls would take longer than what it does.
    """
    routines = _routines(order, costs, routes)
    streams = [(s.sending_s, s.latency_s, _link(s)) for s in routes.streams]
    arrivals = [[-1.0] * order.num_microbatches for _ in streams]
    sleepers: dict[tuple[int, int], int] = {}
    links_free_s: dict[tuple[int, int], float] = {link: 0.0 for _, _, link in streams}
    rows = order.rows
    free_s, steps = [0.0] * len(rows), [0] * len(rows)
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        row, now_s = rows[rank], free_s[rank]
        for step in range(steps[rank], len(row)):
            number, microbatch = row[step]
            seconds, receives, sends = routines[number]
            start_s = now_s
            for stream in receives:
                arrival_s = arrivals[stream][microbatch]
                if arrival_s < 0:
                    sleepers[stream, microbatch] = rank
                    start_s = -1.0
                    break
                if arrival_s > start_s:
                    start_s = arrival_s
            if start_s < 0:
                steps[rank] = step
                break
            now_s = start_s + seconds
            for stream in sends:
                sending_s, latency_s, link = streams[stream]
                link_s = links_free_s[link]
                link_s = (link_s if link_s > now_s else now_s) + sending_s
                links_free_s[link] = link_s
                arrivals[stream][microbatch] = link_s + latency_s
                if sleepers:
                    sleeper = sleepers.pop((stream, microbatch), None)
                    if sleeper is not None:
                        awake.append(sleeper)
        else:
            steps[rank] = len(row)
        free_s[rank] = now_s
    is_complete = all(step == len(row) for step, row in zip(steps, rows, strict=True))
    return free_s if is_complete else None


def _routines(
    order: StepOrder, costs: Costs, routes: Routes
) -> dict[int, tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Return what each kind of a stage takes, and the streams it receives and sends."""
    found = {}
    for number in {number for row in order.rows for number, _ in row}:
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
            tuple(routes.receives.get(phase, ())),
            tuple(routes.sends.get(phase, ())),
        )
    return found


def _link(stream: Stream) -> tuple[int, int]:
    return stream.sender_rank, stream.receiver_rank

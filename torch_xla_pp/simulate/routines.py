"""The costs and mailboxes that actions of one kind share in a simulation."""

from dataclasses import dataclass, field

from torch_xla_pp.schedule import Kind
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.routes import FORWARD, PHASES, Phase, Routes, Stream
from torch_xla_pp.timeline import Transfer


@dataclass(eq=False, slots=True)
class LinkClock:
    """The time at which a link can take the next message."""

    free_s: float = 0.0


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages of a stream by microbatch, and the rank that waits for one."""

    stream: Stream
    link: LinkClock
    arrivals: dict[int, float] = field(default_factory=dict)
    sleepers: dict[int, int] = field(default_factory=dict)

    def post(self, microbatch: int, now_s: float) -> Transfer:
        """Send a message."""
        stream, link = self.stream, self.link
        link.free_s = max(now_s, link.free_s) + stream.sending_s
        arrival_s = link.free_s + stream.latency_s
        self.arrivals[microbatch] = arrival_s
        hop = stream.hop
        return Transfer(
            sender_stage=hop.sender,
            sender_rank=stream.sender_rank,
            receiver_stage=hop.receiver,
            receiver_rank=stream.receiver_rank,
            kind="F" if hop.phase == FORWARD else "B",
            microbatch=microbatch,
            sent_s=now_s,
            received_s=arrival_s,
            num_bytes=hop.num_bytes,
        )


@dataclass(frozen=True, slots=True)
class Routine:
    """The costs and mailboxes of all actions of one stage and kind."""

    seconds: float
    samples: tuple[float, ...]
    phase: Phase
    receives: tuple[Mailbox, ...]
    sends: tuple[Mailbox, ...]
    after: tuple[Phase, ...]


def routines_of(costs: Costs, routes: Routes) -> dict[tuple[int, Kind], Routine]:
    """Return the routine of each stage and kind."""
    links = [LinkClock() for _ in range(routes.num_links)]
    mailboxes = [Mailbox(stream, links[stream.link]) for stream in routes.streams]
    routines = {}
    for (stage, kind), seconds in costs.seconds.items():
        phase = stage, PHASES[kind]
        routines[stage, kind] = Routine(
            seconds=seconds,
            samples=costs.samples.get((stage, kind), (seconds,)),
            phase=phase,
            receives=tuple(mailboxes[i] for i in routes.receives.get(phase, ())),
            sends=tuple(mailboxes[i] for i in routes.sends.get(phase, ())),
            after=tuple(routes.after.get(phase, ())),
        )
    return routines

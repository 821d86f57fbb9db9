"""The figures of a step.

Terms: a rank is *busy* while it runs an action that has its inputs, *waiting* while its
action waits to receive, and *idle* while it has nothing to run. The *bubble* is all
time that is not busy.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_xla_pp.text import bytes_text, seconds_text, table
from torch_xla_pp.timeline.span import Span
from torch_xla_pp.timeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """The time and memory of a rank in the step.

    Args:
        busy_s: Time of work.
        waiting_s: Time of waiting for receives.
        idle_s: The rest of the step.
        dispatch_s: Time of the host that enqueued its actions, None if unknown.
        peak_live: The most microbatches for which it held saved values.
        peak_bytes: Their size on one device, None if unknown.
    """

    busy_s: float
    waiting_s: float
    idle_s: float
    dispatch_s: float | None
    peak_live: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeSummary:
    """The messages that one stage sent to another.

    Args:
        sender_stage: Stage that sends.
        receiver_stage: Stage that receives.
        kind: "F" for values, "B" for gradients, "S" for sums of gradients.
        num_messages: Number of messages.
        num_bytes: Bytes of all of them.
        transfer_s: Mean time from sent to received.
    """

    sender_stage: int
    receiver_stage: int
    kind: str
    num_messages: int
    num_bytes: int
    transfer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The figures of a step; print it to read them.

    Args:
        step_s: Time from the first start to the last end.
        ranks: The figures of each rank.
        edges: Those of each pair of stages that sent something.
    """

    step_s: float
    ranks: tuple[RankSummary, ...]
    edges: tuple[EdgeSummary, ...]

    @property
    def busy_share(self) -> float:
        """Return the share of all ranks' time that is busy; 1 for an empty step."""
        total = self.step_s * len(self.ranks)
        return sum(rank.busy_s for rank in self.ranks) / total if total else 1.0

    @property
    def bubble_share(self) -> float:
        """Return the share of all ranks' time that is not busy."""
        return 1.0 - self.busy_share

    def __str__(self) -> str:
        lines = [
            f"step {seconds_text(self.step_s)}, {len(self.ranks)} ranks, "
            f"busy {self.busy_share:.1%}, bubble {self.bubble_share:.1%}",
            *table(_RANK_HEADER, [self._cells(i) for i in range(len(self.ranks))]),
        ]
        if self.edges:
            lines += ["", *table(_EDGE_HEADER, [_edge_cells(e) for e in self.edges])]
        return "\n".join(lines)

    def _cells(self, index: int) -> list[str]:
        rank = self.ranks[index]
        shares = (rank.busy_s, rank.waiting_s, rank.idle_s)
        size = "-" if rank.peak_bytes is None else bytes_text(rank.peak_bytes)
        dispatch = "-" if rank.dispatch_s is None else seconds_text(rank.dispatch_s)
        return [
            f"{index}",
            *(f"{share / self.step_s if self.step_s else 0:.1%}" for share in shares),
            dispatch,
            f"{rank.peak_live}",
            size,
        ]


_RANK_HEADER = ["rank", "busy", "waiting", "idle", "dispatch", "peak live", "saved"]
_EDGE_HEADER = ["sent", "messages", "bytes", "each", "mean time"]


def summarize(timeline: Timeline) -> Summary:
    """Return the figures of a step."""
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    peaks = timeline.peak_bytes or (None,) * timeline.num_ranks
    return Summary(
        step_s=timeline.step_s,
        ranks=tuple(
            _of_rank(row, timeline.step_s, peak)
            for row, peak in zip(rows, peaks, strict=True)
        ),
        edges=_edges(timeline),
    )


def _of_rank(
    spans: Sequence[Span], step_s: float, peak_bytes: int | None
) -> RankSummary:
    busy_s = sum(span.busy_s for span in spans)
    waiting_s = sum(span.waiting_s for span in spans)
    dispatches = [span.dispatch_s for span in spans]
    known = [value for value in dispatches if value is not None]
    return RankSummary(
        busy_s=busy_s,
        waiting_s=waiting_s,
        idle_s=step_s - busy_s - waiting_s,
        dispatch_s=sum(known) if known else None,
        peak_live=peak_saved(spans),
        peak_bytes=peak_bytes,
    )


def _edges(timeline: Timeline) -> tuple[EdgeSummary, ...]:
    counts: Counter[tuple[int, int, str]] = Counter()
    sizes: Counter[tuple[int, int, str]] = Counter()
    times: defaultdict[tuple[int, int, str], float] = defaultdict(float)
    for transfer in timeline.transfers:
        key = transfer.sender_stage, transfer.receiver_stage, transfer.kind
        counts[key] += 1
        sizes[key] += transfer.num_bytes
        times[key] += transfer.received_s - transfer.sent_s
    return tuple(
        EdgeSummary(
            sender_stage=sender,
            receiver_stage=receiver,
            kind=kind,
            num_messages=count,
            num_bytes=sizes[sender, receiver, kind],
            transfer_s=times[sender, receiver, kind] / count,
        )
        for (sender, receiver, kind), count in sorted(counts.items())
    )


def _edge_cells(edge: EdgeSummary) -> list[str]:
    return [
        f"{edge.sender_stage} -> {edge.receiver_stage} {edge.kind}",
        f"{edge.num_messages}",
        bytes_text(edge.num_bytes),
        bytes_text(edge.num_bytes // edge.num_messages),
        seconds_text(edge.transfer_s),
    ]


def peak_saved(
    spans: Sequence[Span],
    sizes: Mapping[int, int] | None = None,
    passed: Mapping[int, int] | None = None,
) -> int:
    """Return the peak of values that a rank's stages keep.

    A microbatch counts in each stage from its forward until its B, or its W if the
    backward is split; not at all if it has neither.

    Args:
        spans: The actions of the rank, in order.
        sizes: Stage → size of a microbatch there; None for one everywhere.
        passed: Stage → its size from its I to its W; the same where there is no entry.
    """
    freed = {(s.stage, s.microbatch) for s in spans if s.kind in "BW"}
    kept = peak = 0
    for span in spans:
        if (span.stage, span.microbatch) not in freed:
            continue
        size = 1 if sizes is None else sizes.get(span.stage, 0)
        late = size if passed is None else passed.get(span.stage, size)
        change = {"F": size, "I": late - size, "B": -size, "W": -late}
        kept += change[span.kind]
        peak = max(peak, kept)
    return peak

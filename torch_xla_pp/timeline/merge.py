"""Merge the records of several ranks into one timeline."""

from collections import Counter
from collections.abc import Sequence

from torch_xla_pp.timeline.timeline import Timeline


def merge(parts: Sequence[Timeline]) -> Timeline:
    """Return one timeline with the contents of all parts.

    Their clocks must agree. A transfer may be in several parts, and counts once.

    Raises:
        ValueError: There is no part, or two parts have the same action.
    """
    if not parts:
        raise ValueError("merge: expected at least one timeline, got none. Pass some.")
    spans = [span for part in parts for span in part.spans]
    counts = Counter(f"{span} of rank {span.rank}" for span in spans)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            "merge: expected each action in one of the timelines, got "
            f"{len(repeated)} in several, such as {repeated[0]}. Merge parts of one "
            "step; to compare steps, show them beside each other."
        )
    num_ranks = max(part.num_ranks for part in parts)
    peaks = [p.peak_bytes for p in parts if len(p.peak_bytes) == num_ranks]
    return Timeline(
        num_ranks=num_ranks,
        spans=tuple(spans),
        transfers=tuple({t: None for part in parts for t in part.transfers}),
        peak_bytes=tuple(map(max, *peaks, peaks[0])) if peaks else (),
    )

"""How much a rank keeps for backwards."""

from collections.abc import Mapping, Sequence

from torch_xla_pp.timeline.span import Span


def peak_saved(spans: Sequence[Span], sizes: Mapping[int, int] | None = None) -> int:
    """Return the most that a rank's stages keep at a time.

    A microbatch counts in each stage from its forward until its B, or its W if the
    backward is split; not at all if it has neither.

    Args:
        spans: What the rank ran, in order.
        sizes: Stage → what a microbatch counts there; None for one everywhere.
    """
    freed = {(s.stage, s.microbatch) for s in spans if s.kind in "BW"}
    kept = peak = 0
    for span in spans:
        if span.kind not in "FBW" or (span.stage, span.microbatch) not in freed:
            continue
        size = 1 if sizes is None else sizes.get(span.stage, 0)
        kept += size if span.kind == "F" else -size
        peak = max(peak, kept)
    return peak

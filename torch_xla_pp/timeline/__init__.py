"""Timelines of a step, on every rank: measured or predicted."""

from torch_xla_pp.timeline.chrome import to_chrome
from torch_xla_pp.timeline.figure import new_figure
from torch_xla_pp.timeline.gantt import to_picture
from torch_xla_pp.timeline.merge import merge
from torch_xla_pp.timeline.span import Span, Transfer
from torch_xla_pp.timeline.summary import (
    EdgeSummary,
    RankSummary,
    Summary,
    peak_saved,
    summarize,
)
from torch_xla_pp.timeline.timeline import Timeline

__all__ = [
    "EdgeSummary",
    "RankSummary",
    "Span",
    "Summary",
    "Timeline",
    "Transfer",
    "merge",
    "new_figure",
    "peak_saved",
    "summarize",
    "to_chrome",
    "to_picture",
]

"""What every rank did in a step, and when: measured or predicted."""

from torch_xla_pp.timeline.span import Span, Transfer
from torch_xla_pp.timeline.timeline import Timeline

__all__ = ["Span", "Timeline", "Transfer"]

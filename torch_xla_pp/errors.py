"""Errors that a caller of torch_xla_pp may want to catch.

Faulty arguments raise `ValueError` or `TypeError` as everywhere in PyTorch; the
classes below are for faults that concern the job as a whole. Every message says what is
wrong, what was expected, what was found, and what to do.
"""


class PipelineError(RuntimeError):
    """A fault of a pipeline; base class of all errors below."""


class PlanError(PipelineError):
    """A disagreement of the ranks of a job on their pipeline."""


class ScheduleError(PipelineError):
    """A schedule that cannot run.

    Args:
        text: All faults, and the table of actions by step and rank.
        rank: The rank of the first culprit, None if it has none.
        step: Its number among the rank's actions, None if it is missing there.
        action: The action, e.g. "2F0"; None if the fault concerns no single one.
    """

    def __init__(
        self,
        text: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.step = step
        self.action = action


class StageShapeError(PipelineError):
    """Values that do not fit the stage which consumes them."""


class TransportError(PipelineError):
    """A message between two ranks that was lost or malformed."""


class TransportTimeout(TransportError):
    """A message that did not arrive within the time limit."""


class CheckpointError(PipelineError):
    """A checkpoint that cannot be written, or is not what is asked for."""

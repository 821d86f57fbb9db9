"""The real timeline of one step, recorded on all ranks."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.native import Event
from torch_xla_pp.profile.clock import clock_offset_ns
from torch_xla_pp.profile.recorder import StepRecorder
from torch_xla_pp.profile.spans import (
    Notes,
    latest_times,
    message_of,
    spans_of,
    transfers_of,
)
from torch_xla_pp.runtime import RankPipeline
from torch_xla_pp.timeline import Timeline, summarize, to_chrome, to_picture
from torch_xla_pp.torch_compat import TorchSchedule
from torch_xla_pp.transport import (
    Message,
    Rendezvous,
)


class StepProfile:
    """The record of `profile_step`, the same on all ranks."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """Return the timeline of all ranks, on the clock of rank 0.

        Raises:
            PipelineError: The block has not ended.
        """
        if self._timeline is None:
            raise PipelineError(
                "profile_step: expected the block to have ended, got no timeline yet. "
                "Read it after the block."
            )
        return self._timeline

    def save(self, path: str | Path) -> None:
        """Write the timeline to a file; call it on one rank.

        Args:
            path: Ends with .json for a trace that Perfetto and Chrome show, with .svg
                or .png for a picture, see `timeline.to_picture`. `timeline.to_json`
                writes the file for `Timeline.from_json`.
        """
        if Path(path).suffix == ".json":
            to_chrome(self.timeline, path)
        else:
            to_picture(self.timeline, path)

    def summary(self) -> str:
        """Return the figures of the step, as a table."""
        return str(summarize(self.timeline))


@contextlib.contextmanager
def profile_step(schedule: Any) -> Iterator[StepProfile]:
    """Record on all ranks when each action of one step ran, and waited.

    All ranks must open a block around the same step. The first one compiles programs
    that note their times, beside the usual ones; profile another step to see times
    without that. Times are those of the devices with the in-graph transport, and those
    of the host with the host transport.

    Args:
        schedule: The schedule that drives the stages.

    Yields:
        The record, to be read after the block.

    Raises:
        TypeError: The schedule or one of its stages cannot be recorded.
        PipelineError: There was no step in the block, or more than one.

    Example:
        >>> with xpp.profile_step(schedule) as profile:
        ...     schedule.step(x)
        >>> print(profile.summary())
    """
    _check(schedule)
    rank = RankPipeline.of(schedule)
    group = rank.stages[0].process_group
    rendezvous = group.rendezvous
    has_marks = group.transport.in_program is not None
    recorder = StepRecorder(rank.stages[0].saved, has_marks)
    profile = StepProfile()
    with rendezvous.reporting("in profile_step"):
        offset_ns = clock_offset_ns(group)
        with recorder.listening(), _observed(rank, recorder):
            # No rank sends before all ranks listen.
            rendezvous.exchange("profile", None)
            yield profile
        notes = _notes(rendezvous.rank, recorder, offset_ns)
        profile._timeline = _merge(rendezvous, notes)
    dump("timeline.json", profile.timeline.to_json)


def _check(schedule: Any) -> None:
    if not isinstance(schedule, TorchSchedule):
        raise TypeError(
            "profile_step: expected a schedule of torch.distributed.pipelining, got "
            f"{type(schedule).__name__}. Pass what has `step`."
        )


@contextlib.contextmanager
def _observed(rank: RankPipeline, recorder: StepRecorder) -> Iterator[None]:
    rank.observer = recorder
    try:
        yield
    finally:
        rank.observer = None


def _notes(rank: int, recorder: StepRecorder, offset_ns: int) -> Notes:
    """Sort the notes of a rank."""
    records = recorder.records

    def seconds(time_ns: int) -> float:
        return (time_ns + offset_ns) * 1e-9

    sizes: dict[Message, int] = {}
    for record in records:
        if record.event is Event.SENT:
            message = message_of(record)
            sizes[message] = sizes.get(message, 0) + record.num_bytes
    sent = latest_times(records, Event.SENT)
    arrived = latest_times(records, Event.ARRIVED)
    return Notes(
        spans=spans_of(rank, recorder.dispatched, records, offset_ns),
        sent={m: (seconds(time), sizes[m]) for m, time in sent.items()},
        arrived={m: seconds(time) for m, time in arrived.items()},
        peak_bytes=recorder.peak_bytes,
    )


def _merge(rendezvous: Rendezvous, notes: Notes) -> Timeline:
    """Exchange the notes of all ranks."""
    if not notes.spans:
        raise PipelineError(
            "profile_step: expected one step in the block, got none. Call the "
            "schedule's step or eval inside."
        )
    everything = rendezvous.exchange("timeline", notes)
    return Timeline(
        num_ranks=rendezvous.size,
        spans=tuple(span for own in everything for span in own.spans),
        transfers=transfers_of(everything),
        peak_bytes=tuple(own.peak_bytes for own in everything),
    )

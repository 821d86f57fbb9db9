"""A recorder of what one rank does in a step.

With the in-graph transport the programs note their own times, under the action that an
operand, the *mark*, names. With the host transport the times are those of the host: an
action begins when Python calls it, and ends when the device has run its programs, for
which Python waits.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.channels import Marks
from torch_xla_pp.compile import MARK
from torch_xla_pp.errors import PipelineError
from torch_xla_pp.mesh import Tiling
from torch_xla_pp.native import Event, Note, notes
from torch_xla_pp.schedule import Action
from torch_xla_pp.state import SavedValues
from torch_xla_pp.transport import Message, ShardLayout, part_sizes


@dataclass(kw_only=True, slots=True)
class Dispatch:
    """The time of the host for an action.

    Args:
        returned_ns: When its program was enqueued.
        cpu_ns: CPU time that the main thread took for the action.
    """

    returned_ns: int
    cpu_ns: int


class StepRecorder:
    """An observer that notes what one rank does in one step.

    Args:
        saved: The saved activations of one of the rank's stages.
        has_marks: Whether programs note their times themselves.

    Attributes:
        records: The notes; those of programs once `listening` has ended.
        dispatched: The actions, in their order.
        peak_bytes: The most bytes that all stages of the rank held, parameters aside.
    """

    def __init__(self, saved: SavedValues, has_marks: bool) -> None:
        self._saved = saved
        self._has_marks = has_marks
        self.records: list[Note] = []
        self.dispatched: dict[Action, Dispatch] = {}
        self.peak_bytes = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Keep the notes of programs in the block."""
        if not self._has_marks:
            yield
            return
        notes.start()
        try:
            yield
            xla_compat.flush()
        finally:
            self.records += notes.stop()

    @contextlib.contextmanager
    def action(self, action: Action, *, is_rest: bool = False) -> Iterator[Marks]:
        """Note one action, which the block enqueues with the marks that it gets.

        Args:
            action: The action.
            is_rest: Whether this is a later part of an action that was noted before.

        Raises:
            PipelineError: The action is noted for the second time.
        """
        if action in self.dispatched and not is_rest:
            raise PipelineError(
                f"profile_step: expected one step in the block, got {action} for the "
                "second time. Use a block for each step."
            )
        self._count_bytes()
        name = action.kind, action.stage, action.microbatch
        self._note(Event.BEGAN, *name)
        cpu_ns = time.thread_time_ns()
        yield {MARK: notes.mark(*name)} if self._has_marks else {}
        self._count_host(action, time.thread_time_ns() - cpu_ns)
        if not self._has_marks:
            xla_compat.wait_device()
        self._note(Event.ENDED, *name)
        self._count_bytes()

    def _count_host(self, action: Action, cpu_ns: int) -> None:
        now_ns = time.monotonic_ns()
        cost = self.dispatched.setdefault(
            action, Dispatch(returned_ns=now_ns, cpu_ns=0)
        )
        cost.cpu_ns += cpu_ns

    def sent(
        self,
        message: Message,
        values: Sequence[Tensor],
        there: Sequence[Tiling] | None = None,
    ) -> None:
        """Note a message sent through the host; `there` are its tilings on the peer."""
        layouts = [ShardLayout.of_tensor(value) for value in values]
        num_bytes = sum(part_sizes(layouts, there))
        self._note(Event.SENT, *message, num_bytes=num_bytes)

    @contextlib.contextmanager
    def receiving(self, message: Message) -> Iterator[None]:
        """Note a message that is received through the host."""
        self._note(Event.ASKED, *message)
        yield
        self._note(Event.ARRIVED, *message)

    def _note(
        self,
        event: Event,
        kind: str,
        stage: int,
        microbatch: int,
        origin: int = -1,
        num_bytes: int = 0,
    ) -> None:
        """Note an event that programs do not note."""
        if not self._has_marks:
            time_ns = time.monotonic_ns()
            self.records.append(
                Note(event, time_ns, kind, stage, microbatch, origin, num_bytes)
            )

    def _count_bytes(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._saved.of_rank.num_bytes)

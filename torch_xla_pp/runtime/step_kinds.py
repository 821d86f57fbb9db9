"""What kind of step comes: the one fact of a step that all ranks must share.

The shapes of the batch, the training mode and autocast may change from step to step,
and each such *kind* has programs of its own. Only the rank of the first stage sees the
batch; it numbers the kinds and announces the number of every step. That costs it one
write to the job's store, and the others one read, for which they wait while the first
stage has not begun: a time in which they would have nothing to compute on.
"""

from typing import Any

from torch_xla_pp.transport import Rendezvous, StoreLost

_NAP_S = 0.002


class StepKinds:
    """Know the kind of each step of one schedule; shared by the stages of a rank.

    Args:
        rendezvous: What the ranks agree by.
        key: Name of the schedule's handshake, equal on all ranks.
        first_rank: Rank of the first stage, in the group.
    """

    def __init__(self, rendezvous: Rendezvous, key: str, first_rank: int) -> None:
        self.key = key
        self._rendezvous = rendezvous
        self._first_rank = first_rank
        self._known: list[Any] = []
        self._generation = rendezvous.generation
        self._step = 0
        self._current: int | None = None
        self._last: int | None = None
        self._announced: list[str] = []

    def begin_step(self) -> None:
        """Count a step; every rank must call it once a step.

        After a failure all ranks count anew, as not all of them began the same steps.
        """
        generation = self._rendezvous.generation
        if generation != self._generation:
            self._generation = generation
            self._step = 0
        self._step += 1
        self._current = None

    def announce(self, kind: Any) -> int:
        """Return the number of this step's kind; called for the first stage only.

        Args:
            kind: What can be compared with the kinds of earlier steps.
        """
        if kind not in self._known:
            self._known.append(kind)
        self._current = self._known.index(kind)
        if self._rendezvous.size > 1:
            self._rendezvous.publish(self._name, self._current)
            self._announced.append(self._name)
        return self._current

    def current(self) -> int:
        """Return the number of this step's kind, waiting for the first stage's rank.

        If that rank has left together with the store, its last steps are taken to
        have been of one kind; a message of another one would be refused.

        Raises:
            TransportTimeout: The first stage did not begin the step.
            Exception: A peer has reported a failure.
        """
        if self._current is None:
            try:
                number = self._rendezvous.read(
                    self._name, self._first_rank, longest_nap_s=_NAP_S
                )
                self._current = int(number)
            except StoreLost:
                if self._last is None:
                    raise
                self._current = self._last
            self._last = self._current
        return self._current

    def forget_announced(self) -> None:
        """Drop what all ranks have read: called when a backward came back from them."""
        while self._announced:
            self._rendezvous.retract(self._announced.pop())

    @property
    def _name(self) -> str:
        return f"step/{self.key}/{self._generation}/{self._step}"

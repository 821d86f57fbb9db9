"""What kind of step comes: the one fact of a step that all ranks must share.

The shapes of the batch, the training mode and autocast may change from step to step,
and each such *kind* has programs of its own. Only the rank of the first stage sees the
batch; it numbers the kinds and announces the number of every step to all ranks, which
wait for it while the first stage has not begun: a time in which they would have nothing
to compute on.
"""

from typing import Any

from torch_xla_pp.transport import Rendezvous


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
        self._rendezvous.announce(self._name, self._current)
        return self._current

    def current(self) -> int:
        """Return the number of this step's kind, waiting for the first stage's rank.

        Raises:
            TransportTimeout: The first stage did not begin the step.
            TransportError: Its rank is gone.
            Exception: A peer has reported a failure.
        """
        if self._current is None:
            self._current = int(self._rendezvous.take(self._name, self._first_rank))
        return self._current

    @property
    def _name(self) -> str:
        return f"kind of step {self._step}/{self.key}"

"""A bound on the steps that a rank may be ahead of those that receive its values.

Sends never wait, and in `eval` nothing comes back: without a bound the first ranks
would run ahead by all batches, and their messages would fill the memory of the last
ones. So every rank notifies the ranks that it receives values from when a step is done,
and a rank begins a step only when all receivers of its values have done the last but
one.

This cannot deadlock: a rank waits only for earlier steps, which need no later ones.
"""

from collections import deque
from collections.abc import Iterable

from torch_xla_pp.transport.inbox import Ticket
from torch_xla_pp.transport.process_group import XlaPpProcessGroup

MOST_STEPS = 2
"""How many steps a rank may be ahead of another that receives its values."""


class StepsAhead:
    """A bound on how far the stages of one rank and schedule run ahead.

    Args:
        group: The ranks of the pipeline.
        key: Name of the schedule's agreement, equal on all ranks.
        sources: Ranks that this one receives values from.
        takers: Ranks that receive values of this one.
    """

    def __init__(
        self,
        group: XlaPpProcessGroup,
        key: str,
        sources: Iterable[int],
        takers: Iterable[int],
    ) -> None:
        self._group = group
        self._key = ("end of step", key)
        self._sources = sorted(set(sources) - {group.rank()})
        self._takers = sorted(set(takers) - {group.rank()})
        self._generation = group.rendezvous.generation
        self._ends: deque[list[Ticket]] = deque()

    def begin_step(self) -> None:
        """Wait until this rank is at most `MOST_STEPS` ahead.

        Raises:
            TransportTimeout: A rank does not end its step.
            Exception: A peer has reported a failure.
        """
        generation = self._group.rendezvous.generation
        if generation != self._generation:
            self._generation = generation
            self._ends.clear()
        while len(self._ends) >= MOST_STEPS:
            for ticket in self._ends.popleft():
                self._group.wire.receive(ticket)

    def end_step(self) -> None:
        """Notify the sources; called when all values for this rank have arrived."""
        for rank in self._sources:
            self._group.wire.notify(rank, self._key)
        wire = self._group.wire
        self._ends.append([wire.expect(rank, self._key) for rank in self._takers])

"""How the values that one stage makes reach the stages that use them.

The stage from which a consumer gets a value follows the law of `schedule.givers_of`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_xla_pp.schedule import givers_of


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor that a stage makes, by its slot in the stage's output."""

    stage: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumers:
    """The consumers of one stage, and the values that each uses.

    Args:
        producer: The stage that makes the values.
        uses: Consumer → slots of the values that it uses, in the order of its inputs.
        ranks: Rank of every stage of the pipeline.
    """

    producer: int
    uses: Mapping[int, tuple[int, ...]]
    ranks: Sequence[int]

    def passed(self, giver: int, consumer: int) -> tuple[int, ...]:
        """Return the slots of the values that `consumer` gets from stage `giver`.

        The giver is the producer, or a stage of the consumer's rank.
        """
        slots = self.uses.get(consumer, ())
        return tuple(slot for slot in slots if self._giver(slot, consumer) == giver)

    def consumers_of(self, slot: int) -> tuple[int, ...]:
        """Return the stages that use a value."""
        return tuple(c for c, slots in sorted(self.uses.items()) if slot in slots)

    def _giver(self, slot: int, consumer: int) -> int:
        return givers_of(self.producer, self.consumers_of(slot), self.ranks)[consumer]

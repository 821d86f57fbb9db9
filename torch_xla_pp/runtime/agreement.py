"""What ranks agree on under one schedule, by messages: the effects of `plan`.

Before the first step the ranks compare their claims. At the first step of each kind
every stage waits for the offers of earlier ones and makes its own, and all ranks tell
how values are tiled over their devices. The number of a step's kind is announced by the
rank of the first stage, which alone sees the batch; the others wait for it while they
would have nothing to compute on.
"""

from dataclasses import dataclass
from typing import Any

from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PlanError
from torch_xla_pp.plan import (
    Claim,
    KindNumbers,
    Offer,
    ReplicaClaim,
    StagePlan,
    StagePlanner,
    Tilings,
    Wiring,
    replica_faults,
    wiring_of,
)
from torch_xla_pp.transport import Rendezvous


@dataclass(eq=False, slots=True)
class Agreement:
    """What all ranks of a pipeline agreed on for one schedule.

    Args:
        rendezvous: What the ranks agree through.
        key: Name of the agreement, equal on all ranks.
        wiring: What each stage takes from others, and where the stages are.
    """

    rendezvous: Rendezvous
    key: str
    wiring: Wiring

    @classmethod
    def on(cls, rendezvous: Rendezvous, claim: Claim) -> "Agreement":
        """Compare the claims of all ranks; every rank must call it.

        Raises:
            PlanError: The claims do not make one pipeline; raised on every rank.
        """
        claims = rendezvous.exchange("claim", claim)
        wiring, faults = wiring_of(claims)
        if wiring is None or faults:
            raise PlanError(
                "pipeline: the ranks do not build one pipeline:\n  "
                + "\n  ".join(faults)
            )
        rendezvous.name_ranks(wiring.titles())
        dump("plan.txt", wiring.__str__)
        return cls(rendezvous, claims[0].key, wiring)

    def plan(
        self,
        planner: StagePlanner,
        kind: int,
        num_microbatches: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> StagePlan:
        """Plan a stage for a kind of step; waits for the offers of earlier stages.

        Raises:
            StageShapeError: The stage cannot take what the others make.
            ValueError: The schedule's arguments do not fit.
        """
        offers = {
            stage: self._await_offer(kind, stage)
            for stage in planner.needed(self.wiring)
        }
        return planner.plan(self.wiring, offers, num_microbatches, args, kwargs)

    def offer(self, kind: int, stage: int, offer: Offer) -> None:
        """Tell what a stage makes in a kind of step."""
        self.rendezvous.publish(self._name_of_offer(kind, stage), offer)

    def exchange_tilings(self, own: Tilings) -> Tilings:
        """Tell how values are tiled here; returns that of all stages.

        Nothing of a new kind is run before, so all ranks have their plans then.
        """
        found = self.rendezvous.exchange("ready", own)
        return {stage: tilings for told in found for stage, tilings in told.items()}

    def _await_offer(self, kind: int, stage: int) -> Offer:
        rank = self.wiring.ranks[stage]
        found = self.rendezvous.read(self._name_of_offer(kind, stage), rank)
        if not isinstance(found, Offer):
            raise PlanError(
                f"stage {stage}: expected an offer from rank {rank}, got {found!r}."
            )
        return found

    def _name_of_offer(self, kind: int, stage: int) -> str:
        return f"offer/{self.key}/{kind}/{stage}"


class StepKinds:
    """The kind of each step of one schedule.

    Args:
        agreement: What the ranks agreed on.

    Attributes:
        step: Number of the step, equal on all ranks once its kind is known.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._numbers = KindNumbers()
        self._generation = agreement.rendezvous.generation
        self._count = 0
        self._current: int | None = None
        self.step = 0

    def begin_step(self) -> None:
        """Count a step; every rank must call it once a step.

        After a failure all ranks count afresh, as not all of them began the same steps.
        """
        generation = self._agreement.rendezvous.generation
        if generation != self._generation:
            self._generation = generation
            self._count = 0
        self._count += 1
        self._current = None

    def announce(self, kind: Any, step: int) -> None:
        """Tell all ranks the number of this step's kind; for the first stage's rank.

        Args:
            kind: What can be compared with the kinds of earlier steps.
            step: Number of the step, by which random numbers differ; after a failure
                not all ranks have counted the same steps.
        """
        self._current = self._numbers.number(kind)
        self.step = step
        self._agreement.rendezvous.announce(self._name, (self._current, step))

    def current(self) -> int:
        """Return the number of this step's kind, waiting for the first stage's rank.

        Raises:
            TransportTimeout: The first stage did not begin the step.
            TransportError: Its rank is gone.
            Exception: A peer has reported a failure.
        """
        if self._current is None:
            first = self._agreement.wiring.ranks[0]
            found = self._agreement.rendezvous.take(self._name, first)
            self._current, self.step = found
        return self._current

    @property
    def _name(self) -> str:
        return f"kind of step {self._count}/{self._agreement.key}"


def compare_replicas(rendezvous: Rendezvous, claim: ReplicaClaim) -> None:
    """Compare the claims of the ranks that run the same stages; all must call it.

    Raises:
        PlanError: They are not replicas; raised on every rank.
    """
    faults = replica_faults(rendezvous.exchange("replica", claim))
    if faults:
        raise PlanError(
            "replicas: the ranks do not hold equal stages:\n  " + "\n  ".join(faults)
        )

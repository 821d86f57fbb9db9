"""The agreement of ranks under one schedule, by messages: the effects of `plan`.

Before the first step the ranks compare their claims. At the first step of each kind
every stage waits for the offers of earlier ones and makes its own, and all ranks
exchange the tilings of values over their devices. The rank of the first stage, which
alone sees the batch, announces the number of a step's kind; the others wait for it at a
time when they would have nothing to compute.
"""

from dataclasses import dataclass
from typing import Any

from torch_xla_pp.dump import dump
from torch_xla_pp.errors import PlanError
from torch_xla_pp.plan import (
    Arguments,
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
    """The agreement of all ranks of a pipeline for one schedule.

    Args:
        rendezvous: The rendezvous of the ranks.
        key: Name of the agreement, equal on all ranks.
        wiring: The inputs of each stage from others, and the ranks of stages.
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

    @property
    def generation(self) -> int:
        """Return how many failures of the job this rank has seen."""
        return self.rendezvous.generation

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
            StageShapeError: The stage cannot take the outputs of the others.
            ValueError: The schedule's arguments do not fit.
        """
        offers = {
            stage: self._await_offer(kind, stage)
            for stage in planner.needed(self.wiring)
        }
        return planner.plan(self.wiring, offers, num_microbatches, args, kwargs)

    def offer(self, kind: int, stage: int, offer: Offer) -> None:
        """Announce the outputs of a stage in a kind of step."""
        self.rendezvous.publish(self._name_of_offer(kind, stage), offer)

    def tell_call(self, kind: int, call: Arguments | None) -> None:
        """Announce the model's arguments in a kind of step; for the first stage."""
        self.rendezvous.publish(f"call/{self.key}/{kind}", call)

    def call(self, kind: int) -> Arguments | None:
        """Return the arguments of the model, None if it was not traced."""
        first = self.wiring.ranks[0]
        found: Arguments | None = self.rendezvous.read(f"call/{self.key}/{kind}", first)
        return found

    def exchange_tilings(self, own: Tilings) -> Tilings:
        """Announce the tilings of values here; returns those of all stages.

        No program of a new kind runs before, so all ranks have their plans then.
        """
        found = self.rendezvous.exchange("ready", own)
        return {stage: tilings for own in found for stage, tilings in own.items()}

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
        agreement: The agreement of the ranks.

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

        After a failure all ranks start to count anew, as not all of them began the same
        steps.
        """
        generation = self._agreement.rendezvous.generation
        if generation != self._generation:
            self._generation = generation
            self._count = 0
        self._count += 1
        self._current = None

    def announce(self, kind: Any, step: int) -> None:
        """Announce the number of this step's kind; for the first stage's rank.

        Args:
            kind: A key that is equal for steps of one kind.
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

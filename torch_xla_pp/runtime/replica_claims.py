"""What the ranks that run the same stages in each replica tell each other.

They do so before the first step of a schedule, after the ranks of each pipeline have
agreed on their stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_xla_pp.errors import PlanError
from torch_xla_pp.runtime.handshake import transport_faults
from torch_xla_pp.transport import Rendezvous

_MOST_LISTED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaClaim:
    """State what one rank brings to a group of replicas.

    Args:
        num_stages: Number of stages of the pipeline.
        stages: Stage of the rank → name of a parameter → a text that is equal for
            equal ones.
        transport: Name of what carries gradients between replicas.
    """

    num_stages: int
    stages: Mapping[int, Mapping[str, str]]
    transport: str


def agree_on_claims(rendezvous: Rendezvous, claim: ReplicaClaim) -> None:
    """Compare the claims of the ranks that run the same stages; all must call it.

    Raises:
        PlanError: They are no replicas; raised on every rank.
    """
    faults = replica_faults(rendezvous.exchange("replica", claim))
    if faults:
        raise PlanError(
            "replicas: the ranks do not hold equal stages:\n  " + "\n  ".join(faults)
        )


def replica_faults(claims: Sequence[ReplicaClaim]) -> list[str]:
    """List what differs between the replicas of a rank's stages, by replica."""
    stages = [(sorted(claim.stages), claim.num_stages) for claim in claims]
    if any(found != stages[0] for found in stages):
        texts = [f"stages {own} of {count}" for own, count in stages]
        return [
            f"expected the same stages in every replica, got {', '.join(texts)}. Give "
            "every stage the group of the ranks that run it in each replica."
        ]
    faults = transport_faults([claim.transport for claim in claims])
    found = [
        fault
        for stage in stages[0][0]
        for fault in _parameter_faults(stage, [claim.stages[stage] for claim in claims])
    ]
    faults += found[:_MOST_LISTED]
    if found:
        more = len(found) - _MOST_LISTED
        rest = f"{more} more parameters differ. " if more > 0 else ""
        faults.append(f"{rest}Seed all replicas alike, or load the same values.")
    return faults


def _parameter_faults(stage: int, replicas: Sequence[Mapping[str, str]]) -> list[str]:
    """List the parameters of a stage that differ between replicas."""
    faults = []
    for name in dict.fromkeys(name for replica in replicas for name in replica):
        texts = [replica.get(name, "none") for replica in replicas]
        got = [f"{text} in replica {number}" for number, text in enumerate(texts)]
        if len(set(texts)) > 1:
            faults.append(
                f"stage {stage}: parameter {name!r}: expected the same in every "
                f"replica, got {', '.join(got)}."
            )
    return faults

"""What ranks and stages tell each other before the first step of each kind.

Two rounds: every rank *claims* its stages, so that all ranks know at once whether the
claims fit together; then every stage *offers* the next one what it will send.
"""

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_xla_pp.errors import PlanError, StageShapeError
from torch_xla_pp.mesh import TensorSpec
from torch_xla_pp.transport import Rendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """State what one rank brings to a schedule.

    Args:
        stages: Indices of the rank's stages.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of microbatches of the schedule.
        schedule: Name of the schedule's class.
        transport: Name of what carries values between ranks.
        key: A text of the rank's own that no other handshake has.
    """

    stages: tuple[int, ...]
    num_stages: int
    num_microbatches: int
    schedule: str
    transport: str
    key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """State what a stage sends to the next one for every microbatch.

    Args:
        values: The values, in the order of the next stage's inputs.
        rows: Size of the batch dimension of a microbatch.
        num_random: How many random operations the stages so far have.
    """

    values: tuple[TensorSpec, ...]
    rows: int
    num_random: int = 0


def agree_on_stages(rendezvous: Rendezvous, claim: Claim) -> str:
    """Compare the claims of all ranks; every rank must call it.

    Returns:
        The key of this handshake, equal on all ranks.

    Raises:
        PlanError: The claims do not make one pipeline; raised on every rank.
    """
    claims = rendezvous.exchange("claim", claim)
    faults = claim_faults(claims)
    if faults:
        raise PlanError(
            "pipeline: the ranks do not build one pipeline:\n  " + "\n  ".join(faults)
        )
    return str(claims[0].key)


def claim_faults(claims: Sequence[Claim]) -> list[str]:
    """List what does not fit between the claims of the ranks, by rank."""
    faults = []
    for what in ("num_stages", "num_microbatches", "schedule"):
        values = [getattr(claim, what) for claim in claims]
        if len(set(values)) > 1:
            faults.append(
                f"{what}: expected the same on every rank, got {values}. Build the "
                "stages and the schedule with equal arguments on every rank."
            )
    transports = [claim.transport for claim in claims]
    if len(set(transports)) > 1:
        faults.append(
            f"transport: expected the same on every rank, got {transports}. Set "
            "TORCH_XLA_PP_TRANSPORT=host, or see the warnings of the ranks with host."
        )
    owners = {
        stage: [rank for rank, claim in enumerate(claims) if stage in claim.stages]
        for stage in range(claims[0].num_stages)
    }
    counts = Counter(stage for claim in claims for stage in claim.stages)
    for stage, ranks in owners.items():
        if not ranks:
            faults.append(f"stage {stage}: expected on one rank, got it on none.")
        elif counts[stage] > 1:
            faults.append(
                f"stage {stage}: expected on one rank, got it on ranks {ranks}. "
                "Build each stage once, e.g. stage_index = the rank in the group."
            )
    return faults


def check_fits(stage: int, offered: Sequence[TensorSpec], own: Sequence[str]) -> None:
    """Refuse an offer that differs from what a stage declares to take.

    Args:
        stage: The stage that takes the offer.
        offered: What is offered.
        own: What the stage expects, as texts of `TensorSpec`.

    Raises:
        StageShapeError: Names every value that differs.
    """
    got = [str(spec) for spec in offered]
    if got == list(own):
        return
    source = "the batch" if stage == 0 else f"stage {stage - 1}"
    raise StageShapeError(
        f"stage {stage}: expected inputs {', '.join(own)}, got {', '.join(got)} from "
        f"{source}. Make shapes and dtypes equal: check the batch size, the number of "
        "microbatches and the model's split."
    )


def offer(rendezvous: Rendezvous, key: str, stage: int, value: Offer) -> None:
    """Tell stage `stage` what it will receive, in the handshake named `key`."""
    rendezvous.publish(f"offer/{key}/{stage}", value)


def await_offer(rendezvous: Rendezvous, key: str, stage: int, from_rank: int) -> Offer:
    """Wait until the previous stage has told what stage `stage` will receive."""
    found = rendezvous.read(f"offer/{key}/{stage}", from_rank)
    if not isinstance(found, Offer):
        raise PlanError(
            f"stage {stage}: expected an offer from rank {from_rank}, got {found!r}."
        )
    return found

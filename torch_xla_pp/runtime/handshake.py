"""What ranks and stages tell each other before the first step of each kind.

Two rounds: every rank *claims* its stages, so that all ranks know at once whether the
claims fit together; then every stage *offers* what it makes, for those that take it.
"""

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_xla_pp.errors import PlanError, StageShapeError
from torch_xla_pp.graph import Template
from torch_xla_pp.mesh import TensorSpec, Tiling
from torch_xla_pp.plan import StageInputs, Wiring
from torch_xla_pp.transport import Rendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class StageClaim:
    """State what one stage is.

    Args:
        index: Index of the stage.
        inputs: What it takes from other stages.
        shared: Group of a shared parameter → a text that is equal for equal copies.
        tilings: Group of a shared parameter → how it lies on the stage's rank.
        patterns: Pattern of its axis rules → whether something in it matches.
    """

    index: int
    inputs: StageInputs
    shared: Mapping[str, str] = field(default_factory=dict)
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    patterns: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """State what one rank brings to a schedule.

    Args:
        stages: The rank's stages.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of microbatches of the schedule.
        schedule: Name of the schedule's class.
        order: Its actions on all ranks, as a digest; empty if they are not known.
        transport: Name of what carries values between ranks.
        replica: Which replica of the pipeline this is, and of how many.
        key: A text of the rank's own that no other handshake has.
    """

    stages: tuple[StageClaim, ...]
    num_stages: int
    num_microbatches: int
    schedule: str
    order: str
    transport: str
    replica: tuple[int, int] = (0, 1)
    key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """State what a stage makes for every microbatch.

    Args:
        output: The structure of its output.
        values: The tensors of the output, with partitions over the stage's own rank.
        rows: Size of the batch dimension of a microbatch.
        num_random: How many random operations the stages so far have.
    """

    output: Template
    values: tuple[TensorSpec, ...]
    rows: int
    num_random: int = 0


def agree_on_stages(rendezvous: Rendezvous, claim: Claim) -> tuple[str, Wiring]:
    """Compare the claims of all ranks; every rank must call it.

    Returns:
        The key of this handshake, equal on all ranks, and how the stages are wired.

    Raises:
        PlanError: The claims do not make one pipeline; raised on every rank.
    """
    claims = rendezvous.exchange("claim", claim)
    faults = claim_faults(claims)
    wiring = None if faults else wiring_of(claims)
    if wiring is None or (faults := wiring.faults()):
        raise PlanError(
            "pipeline: the ranks do not build one pipeline:\n  " + "\n  ".join(faults)
        )
    return str(claims[0].key), wiring


def wiring_of(claims: Sequence[Claim]) -> Wiring:
    """Put the claims of the ranks together, which must have no faults."""
    found = [(stage, rank) for rank, c in enumerate(claims) for stage in c.stages]
    found.sort(key=lambda pair: pair[0].index)
    shared: dict[str, tuple[int, ...]] = {}
    tilings: dict[str, dict[int, Tiling]] = {}
    for stage, _ in found:
        for group in stage.shared:
            shared[group] = (*shared.get(group, ()), stage.index)
        for group, tiling in stage.tilings.items():
            tilings.setdefault(group, {})[stage.index] = tiling
    return Wiring(
        inputs=[stage.inputs for stage, _ in found],
        ranks=[rank for _, rank in found],
        shared=shared,
        tilings=tilings,
    )


def claim_faults(claims: Sequence[Claim]) -> list[str]:
    """List what does not fit between the claims of the ranks, by rank."""
    faults = []
    for what in ("num_stages", "num_microbatches", "schedule", "order", "replica"):
        values = [getattr(claim, what) for claim in claims]
        if len(set(values)) > 1:
            faults.append(
                f"{what}: expected the same on every rank, got {values}. Build the "
                "stages and the schedule with equal arguments on every rank."
            )
    faults += transport_faults([claim.transport for claim in claims])
    faults += _place_faults(claims) + _shared_faults(claims)
    return faults + _pattern_faults(claims)


def transport_faults(transports: Sequence[str]) -> list[str]:
    """List what is wrong with the transports of the ranks of a group."""
    if len(set(transports)) == 1:
        return []
    return [
        f"transport: expected the same on every rank, got {transports}. Set "
        "TORCH_XLA_PP_TRANSPORT=host, or see the warnings of the ranks with host."
    ]


def _place_faults(claims: Sequence[Claim]) -> list[str]:
    """List the stages that are not on exactly one rank."""
    faults = []
    held = [[stage.index for stage in claim.stages] for claim in claims]
    counts = Counter(index for indices in held for index in indices)
    for stage in range(claims[0].num_stages):
        ranks = [rank for rank, indices in enumerate(held) if stage in indices]
        if not ranks:
            faults.append(f"stage {stage}: expected on one rank, got it on none.")
        elif counts[stage] > 1:
            faults.append(
                f"stage {stage}: expected on one rank, got it on ranks {ranks}. "
                "Build each stage once, e.g. stage_index = the rank in the group."
            )
    return faults


def _shared_faults(claims: Sequence[Claim]) -> list[str]:
    """List the shared parameters whose copies differ, or that have one copy only."""
    copies: dict[str, dict[int, str]] = {}
    for stage in (stage for claim in claims for stage in claim.stages):
        for group, text in stage.shared.items():
            copies.setdefault(group, {})[stage.index] = text
    faults = []
    for group, found in copies.items():
        texts = [f"{text} on stage {index}" for index, text in sorted(found.items())]
        if len(found) == 1:
            faults.append(
                f"shared parameter {group!r}: expected on several stages, got "
                f"{texts[0]} only. Name the group on every stage that has a copy."
            )
        elif len(set(found.values())) > 1:
            faults.append(
                f"shared parameter {group!r}: expected equal copies, got "
                f"{', '.join(texts)}. Load the same values on every stage."
            )
    return faults


def _pattern_faults(claims: Sequence[Claim]) -> list[str]:
    """List the patterns of axis rules that match nothing in any stage."""
    found: dict[str, bool] = {}
    for stage in (stage for claim in claims for stage in claim.stages):
        for pattern, is_matched in stage.patterns.items():
            found[pattern] = is_matched or found.get(pattern, False)
    return [
        f"sharding: axis rules: pattern {pattern} matches nothing in any stage. "
        "Correct it, or leave it out."
        for pattern, is_matched in found.items()
        if not is_matched
    ]


def check_fits(
    stage: int, source: str, offered: Sequence[TensorSpec], own: Sequence[str]
) -> None:
    """Refuse values that differ from what a stage declares to take.

    Args:
        stage: The stage that takes them.
        source: Who offers them.
        offered: What is offered.
        own: What the stage expects, as texts of `TensorSpec`.

    Raises:
        StageShapeError: Names every value that differs.
    """
    got = [str(spec) for spec in offered]
    if got == list(own):
        return
    raise StageShapeError(
        f"stage {stage}: expected inputs {', '.join(own)}, got {', '.join(got)} from "
        f"{source}. Make shapes and dtypes equal: check the batch size, the number of "
        "microbatches and the model's split."
    )


def offer(rendezvous: Rendezvous, key: str, stage: int, value: Offer) -> None:
    """Tell what stage `stage` makes, in the handshake named `key`."""
    rendezvous.publish(f"offer/{key}/{stage}", value)


def await_offer(rendezvous: Rendezvous, key: str, stage: int, from_rank: int) -> Offer:
    """Wait until the rank of stage `stage` has told what the stage makes."""
    found = rendezvous.read(f"offer/{key}/{stage}", from_rank)
    if not isinstance(found, Offer):
        raise PlanError(
            f"stage {stage}: expected an offer from rank {from_rank}, got {found!r}."
        )
    return found

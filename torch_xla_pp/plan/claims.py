"""The claims that ranks exchange about their stages, and their faults.

Every rank *claims* its stages before a schedule's first step, so that all ranks see at
once whether the claims make one pipeline. Ranks that run the same stages in each
replica of a pipeline then claim that their stages are equal.
"""

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_xla_pp.mesh import Tiling
from torch_xla_pp.plan.stage_inputs import StageInputs
from torch_xla_pp.plan.wiring import Wiring

_MOST_LISTED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class StageClaim:
    """The claim of one stage.

    Args:
        index: Index of the stage.
        inputs: What it takes from other stages.
        shared: Group of a shared parameter → a text that is equal for equal copies.
        tilings: Group of a shared parameter → its tiling on the stage's rank.
        patterns: Pattern of its axis rules → whether it matches a name of the stage.
    """

    index: int
    inputs: StageInputs
    shared: Mapping[str, str] = field(default_factory=dict)
    tilings: Mapping[str, Tiling] = field(default_factory=dict)
    patterns: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The claim of one rank for a schedule.

    Args:
        stages: The rank's stages.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of microbatches of the schedule.
        schedule: Name of the schedule's class.
        order: Its actions on all ranks, as a digest; empty if they are not known.
        transport: Name of the transport of values between ranks.
        replica: Which replica of the pipeline this is, and of how many.
        plan: Digest of the plan that the stages were built by; empty if by none.
        key: A text of the rank's own that no other handshake has.
    """

    stages: tuple[StageClaim, ...]
    num_stages: int
    num_microbatches: int
    schedule: str
    order: str
    transport: str
    replica: tuple[int, int] = (0, 1)
    plan: str = ""
    key: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)


def wiring_of(claims: Sequence[Claim]) -> tuple[Wiring | None, list[str]]:
    """Put the claims of the ranks together.

    Returns:
        How the stages are connected, None if that cannot be determined; and all faults.
    """
    if faults := claim_faults(claims):
        return None, faults
    wiring = _wired(claims)
    return wiring, wiring.faults()


def _wired(claims: Sequence[Claim]) -> Wiring:
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
    """List the faults of the ranks' claims, given by rank."""
    faults = []
    for what in (
        "num_stages",
        "num_microbatches",
        "schedule",
        "order",
        "replica",
        "plan",
    ):
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
    """List the faults of the transports of a group's ranks."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaClaim:
    """The claim of one rank in a group of replicas.

    Args:
        num_stages: Number of stages of the pipeline.
        stages: Stage of the rank → name of a parameter → a text that is equal for
            equal ones.
        transport: Name of the transport of gradients between replicas.
    """

    num_stages: int
    stages: Mapping[int, Mapping[str, str]]
    transport: str


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

"""Check that every action is there once, on the right rank."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from torch_xla_pp.schedule.action import KINDS, Action
from torch_xla_pp.schedule.verify.faults import Fault
from torch_xla_pp.schedule.verify.lookup import ActionKey, Lookup, fault_at, places_in

TRAINING = ("FB", "FIW")
FORWARD_ONLY = ("F",)


def presence_faults(lookup: Lookup, allowed: Sequence[str]) -> Iterator[Fault]:
    """Find actions that are missing, repeated, or unexpected.

    Args:
        lookup: The schedule.
        allowed: The sets of kinds of which a stage has one for every microbatch.
    """
    yield from _repeated(lookup)
    yield from _unknown(lookup)
    microbatches = range(lookup.num_microbatches)
    for stage in range(lookup.num_stages):
        kinds_of = [_kinds_of(lookup, stage, mb) for mb in microbatches]
        for kinds, group in groupby(microbatches, kinds_of.__getitem__):
            if kinds not in allowed:
                yield _incomplete(lookup, stage, list(group), kinds, allowed)


def placement_faults(lookup: Lookup) -> Iterator[Fault]:
    """Find stages that run where they are not placed; one fault a stage and rank."""
    seen = set()
    for key, place in places_in(lookup.schedule):
        stage, found = key[0], (key[0], place.rank)
        expected = lookup.placement.get(stage)
        if place.rank == expected or found in seen:
            continue
        seen.add(found)
        where = "nowhere" if expected is None else f"on rank {expected}"
        yield fault_at(
            place,
            key,
            f"expected stage {stage} {where}, got it on rank {place.rank}. Move all "
            "actions of a stage to the rank that holds it.",
        )


def _repeated(lookup: Lookup) -> Iterator[Fault]:
    counts = Counter(key for key, _ in places_in(lookup.schedule))
    repeated = {key for key, count in counts.items() if count > 1}
    if not repeated:
        return
    for key, place in places_in(lookup.schedule):
        if key in repeated and place != lookup.at[key]:
            repeated.remove(key)
            yield fault_at(
                place, key, f"expected once, got {counts[key]} times. Keep one of them."
            )


def _unknown(lookup: Lookup) -> Iterator[Fault]:
    """Find unexpected microbatches; one fault a stage."""
    unknown: dict[int, list[ActionKey]] = {}
    for key in lookup.at:
        if key[2] >= lookup.num_microbatches:
            unknown.setdefault(key[0], []).append(key)
    expected = _range(range(lookup.num_microbatches))
    for keys in unknown.values():
        got = _range(sorted({microbatch for _, _, microbatch in keys}))
        yield lookup.fault(
            keys[0],
            f"expected microbatches {expected}, got {got}. Build the schedule for as "
            "many microbatches as the step has.",
        )


def _kinds_of(lookup: Lookup, stage: int, microbatch: int) -> str:
    return "".join(kind for kind in KINDS if (stage, kind, microbatch) in lookup.at)


def _incomplete(
    lookup: Lookup,
    stage: int,
    microbatches: Sequence[int],
    kinds: str,
    allowed: Sequence[str],
) -> Fault:
    """Report that a stage lacks actions for some microbatches, or has too many."""
    first = microbatches[0]
    text = (
        f"stage {stage}, microbatch {_range(microbatches)}: expected "
        f"{_listed(allowed)}, got {_listed([kinds])}. Add what is "
        "missing, remove what is too much."
    )
    wider = [other for other in allowed if set(kinds) < set(other)]
    if wider:
        kind = next(k for k in KINDS if k in wider[0] and k not in kinds)
        missing = Action(stage=stage, kind=kind, microbatch=first)
        return Fault(text=text, rank=lookup.placement.get(stage), action=missing)
    extra = next(k for k in reversed(KINDS) if k in kinds)
    place = lookup.at[stage, extra, first]
    return Fault(
        text=text,
        rank=place.rank,
        step=place.step,
        action=Action(stage=stage, kind=extra, microbatch=first),
    )


def _range(numbers: Sequence[int]) -> str:
    """Write ascending numbers, such as "3" or "3..5"."""
    if not numbers:
        return "none"
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}..{last}"


def _listed(sets: Iterable[str]) -> str:
    """Write sets of kinds, such as "F and B, or F and I and W"."""
    return ", or ".join(" and ".join(kinds) or "nothing" for kinds in sets)

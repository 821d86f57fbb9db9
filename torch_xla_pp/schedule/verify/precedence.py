"""Check that actions come after those that they depend on, within and between ranks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch_xla_pp.schedule.edges import StagePair
from torch_xla_pp.schedule.verify.faults import Fault
from torch_xla_pp.schedule.verify.lookup import ActionKey, Lookup, action_of, fault_at
from torch_xla_pp.schedule.verify.waiting import find_cycle


class Dependency(NamedTuple):
    """An action that must come before another one, and the reason."""

    before: ActionKey
    after: ActionKey
    why: str


def precedence_faults(
    lookup: Lookup, edges: Iterable[StagePair], carriers: Iterable[StagePair]
) -> Iterator[Fault]:
    """Find actions that come too early on their rank, and a cycle between ranks."""
    waits: dict[ActionKey, list[ActionKey]] = {}
    for dependency in _dependencies(lookup, edges, carriers):
        before, after, _ = dependency
        if before not in lookup.at or after not in lookup.at:
            continue
        if lookup.at[before].rank != lookup.at[after].rank:
            waits.setdefault(after, []).append(before)
        elif lookup.at[before].step > lookup.at[after].step:
            yield _too_early(lookup, dependency)
    yield from _cycle(lookup, waits)


def _dependencies(
    lookup: Lookup, edges: Iterable[StagePair], carriers: Iterable[StagePair]
) -> Iterator[Dependency]:
    """Yield all dependencies; either action may be missing in the schedule."""
    microbatches = range(lookup.num_microbatches)
    for stage in range(lookup.num_stages):
        for mb in microbatches:
            gradient = lookup.backward_of(stage, mb)
            yield Dependency((stage, "F", mb), gradient, "it uses what F saves")
            yield Dependency(gradient, (stage, "W", mb), "it uses what I saves")
    for producer, consumer in edges:
        why = f"stage {consumer} uses values of stage {producer}"
        for mb in microbatches:
            yield Dependency((producer, "F", mb), (consumer, "F", mb), why)
            gradient, following = (
                lookup.backward_of(s, mb) for s in (consumer, producer)
            )
            yield Dependency(gradient, following, why)
    for carrier, other in carriers:
        why = f"stage {carrier} receives a value for both"
        for mb in microbatches:
            yield Dependency((carrier, "F", mb), (other, "F", mb), why)
    last = lookup.num_stages - 1
    why = "losses are listed in the order of the last stage's forwards"
    for mb in microbatches[1:]:
        yield Dependency((last, "F", mb - 1), (last, "F", mb), why)


def _too_early(lookup: Lookup, dependency: Dependency) -> Fault:
    before, after, why = dependency
    return lookup.fault(
        after,
        f"expected after {action_of(before)} ({why}), got that at step "
        f"{lookup.at[before].step}. Exchange them.",
    )


def _cycle(
    lookup: Lookup, waits: Mapping[ActionKey, list[ActionKey]]
) -> Iterator[Fault]:
    rows = [
        [(a.stage, a.kind, a.microbatch) for a in row]
        for row in lookup.schedule.actions
    ]
    cycle = find_cycle(rows, waits, lookup.at)
    if not cycle:
        return
    lines = []
    for place, wanted in cycle:
        action = action_of(rows[place.rank][place.step])
        there = lookup.at[wanted]
        lines.append(
            f"\n    rank {place.rank}, step {place.step}: {action} waits for "
            f"{action_of(wanted)} (rank {there.rank}, step {there.step})"
        )
    first = cycle[0][0]
    yield fault_at(
        first,
        rows[first.rank][first.step],
        "expected no cycle of ranks that wait for each other, got"
        + "".join(lines)
        + "\n    Let one of these ranks run earlier what another waits for.",
    )

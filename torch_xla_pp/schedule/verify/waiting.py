"""Run ranks that wait for each other, without computing anything."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from torch_xla_pp.schedule.verify.lookup import ActionKey, Position


def find_cycle(
    rows: Sequence[Sequence[ActionKey]],
    waits: Mapping[ActionKey, Sequence[ActionKey]],
    at: Mapping[ActionKey, Position],
) -> list[tuple[Position, ActionKey]]:
    """Return ranks that wait for each other for ever, none if all reach their end.

    Args:
        rows: The actions of each rank.
        waits: Action → actions of other ranks that must be done before.
        at: The place of every action.

    Returns:
        The position of each rank of the cycle, and the action that it waits for there;
        each waits for the next one, the last for the first.
    """
    stuck = _run(rows, waits)
    if not stuck:
        return []
    path: list[int] = []
    rank = min(stuck)
    while rank not in path:
        path.append(rank)
        rank = at[stuck[rank][1]].rank
    return [(Position(r, stuck[r][0]), stuck[r][1]) for r in path[path.index(rank) :]]


def _run(
    rows: Sequence[Sequence[ActionKey]], waits: Mapping[ActionKey, Sequence[ActionKey]]
) -> dict[int, tuple[int, ActionKey]]:
    """Run all ranks as far as possible; return where they are blocked, and by what."""
    steps = [0] * len(rows)
    done: set[ActionKey] = set()
    sleepers: defaultdict[ActionKey, list[int]] = defaultdict(list)
    stuck: dict[int, tuple[int, ActionKey]] = {}
    awake = deque(range(len(rows)))
    while awake:
        rank = awake.popleft()
        stuck.pop(rank, None)
        for step in range(steps[rank], len(rows[rank])):
            key = rows[rank][step]
            wanted = next((k for k in waits.get(key, ()) if k not in done), None)
            steps[rank] = step
            if wanted is not None:
                stuck[rank] = step, wanted
                sleepers[wanted].append(rank)
                break
            done.add(key)
            awake.extend(sleepers.pop(key, ()))
    return stuck

"""Times of works that ran alone, scaled to what stages of several works take.

Operations of several works become one in a stage, and values between them need not be
written. So a stage takes less than its works alone add up to.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch_xla_pp.schedule import Kind

# Work or stage, and kind of action → seconds.
ActionSeconds = Mapping[tuple[int, Kind], float]


def even_stages(apart: ActionSeconds, num_works: int, most: int) -> tuple[int, ...]:
    """Return a stage for each work: runs of works that take about as long.

    Args:
        apart: The times of works, in the order of data flow.
        num_works: Number of works.
        most: Number of stages, if none of the works takes longer than a stage.
    """
    loads = [apart[n, "F"] + apart[n, "B"] for n in range(num_works)]
    whole, done = sum(loads), 0.0
    found = []
    for load in loads:
        found.append(int(most * (done + load / 2) / whole) if whole else 0)
        done += load
    numbers = {old: new for new, old in enumerate(dict.fromkeys(found))}
    return tuple(numbers[old] for old in found)


def scaled_seconds(
    apart: ActionSeconds,
    together: ActionSeconds,
    stages: Sequence[int],
    action_s: float,
) -> dict[tuple[int, Kind], float]:
    """Return the times of works, without starts, that add up to those of stages.

    Where a stage has no I, its W is a whole backward: then I and W of its works are
    scaled as those of all other stages together, or as B if there are none, or these
    take less than what is to be scaled: small times vary too much to scale large ones.

    Args:
        apart: The times of works that ran as a stage each.
        together: The times of stages of several works.
        stages: Stage of each work.
        action_s: The time to start a program, which is part of all of these.
    """
    own = {key: max(0.0, seconds - action_s) for key, seconds in apart.items()}
    added: defaultdict[tuple[int, Kind], float] = defaultdict(float)
    for (work, kind), seconds in own.items():
        added[stages[work], kind] += seconds

    def factor(stage: int, kind: Kind) -> float:
        keys: list[tuple[int, Kind]] = [(stage, kind)]
        if kind in "IW" and together[stage, "I"] <= action_s:
            others = {*stages} - {stage}
            keys = [(n, kind) for n in others if together[n, "I"] > action_s]
            if sum(added[key] for key in keys) < added[stage, kind]:
                keys = [(stage, "B")]
        taken_s = sum(max(0.0, together[key] - action_s) for key in keys)
        added_s = sum(added[key] for key in keys)
        return taken_s / added_s if added_s else 1.0

    return {(n, kind): s * factor(stages[n], kind) for (n, kind), s in own.items()}

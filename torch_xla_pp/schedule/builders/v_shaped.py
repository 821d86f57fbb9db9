"""Schedules with two stages on each rank, placed in the shape of a V.

Rank r of P has stage r on the way down, here called *a*, and stage 2P - 1 - r on the
way up, *b*: the last stage is on the rank of the first. A rank's order is written as
phases, each a pattern that is repeated; `aF bI` is the next forward of stage a, then
the next backward of stage b for its inputs. Microbatches are counted per stage.
"""

from collections.abc import Iterable
from itertools import count
from typing import cast

from torch_xla_pp.schedule.action import Action, Kind
from torch_xla_pp.schedule.builders.counts import check_counts
from torch_xla_pp.schedule.schedule import Schedule

_Phases = Iterable[tuple[int, str]]  # repetitions, and the pattern


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """Fill the bubble with the gradients of weights, over two stages per rank.

    There is no bubble from the first backward on if F, I and W take equally long.
    Every rank holds as much as rank 0 of 1F1B, as its two stages are half as large.
    With less than `2 * num_ranks - 1` microbatches it is the order for that many,
    without those that do not exist.

    Source: Qi et al., "Zero Bubble (Almost) Pipeline Parallelism", ICLR 2024, section
    6 (ZB-V).

    Raises:
        ValueError: A count is below one.
    """
    check_counts("zbv", num_ranks=num_ranks, num_microbatches=num_microbatches)
    counted = max(2 * num_ranks - 1, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        ahead = num_ranks - rank
        phases = (
            (2 * ahead - 1, "aF"),
            (rank, "bF aF"),
            (ahead, "bF bI bW"),
            (counted - num_ranks - ahead + 1, "aF aI aW bF bI bW"),
            (ahead - 1, "aI aW bF bI bW"),
            (rank, "aI bI"),
            (ahead, "aI aW"),
            (rank, "bW"),
            (rank, "aW"),
        )
        row = _numbered(rank, num_ranks, phases)
        rows.append(tuple(a for a in row if a.microbatch < num_microbatches))
    return Schedule(actions=tuple(rows))


def dualpipev(num_ranks: int, num_microbatches: int) -> Schedule:
    """Pair a forward of one stage with a backward of the other.

    The two are independent, so that one can compute while the other communicates. A
    few backwards are split, where the pipeline drains.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1
    (DualPipe), folded into a V by Qi et al., "DualPipe could be better without the
    Dual", 2025.

    Raises:
        ValueError: A count is below one, or there are fewer microbatches than stages.
    """
    check_counts("dualpipev", num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            "dualpipev: expected at least as many microbatches as the "
            f"{2 * num_ranks} stages, got {num_microbatches}. Use more, or zbv."
        )
    rows = []
    for rank in range(num_ranks):
        after = num_ranks - 1 - rank
        draining = ["bB", "aB"] * (rank + 1), ["bI", "aI"] * (rank + 1)
        half = rank + 1
        phases = (
            (2 * after, "aF"),
            (rank + 1, "aF bF"),
            (after, "bI bW bF"),
            (num_microbatches - num_ranks - after, "aF bB bF aB"),
            (after, "bB bF aB"),
            (1, " ".join(draining[0][:half] + draining[1][half:])),
            (after, "W aI"),
            (rank + 1, "W"),
        )
        rows.append(_numbered(rank, num_ranks, phases))
    return Schedule(actions=tuple(rows))


def _numbered(rank: int, num_ranks: int, phases: _Phases) -> tuple[Action, ...]:
    """Give each action of the phases its stage and microbatch.

    A `W` without a stage is that of the longest-waiting microbatch of either stage.
    """
    stages = {"a": rank, "b": 2 * num_ranks - 1 - rank}
    forwards = {name: count() for name in stages}
    backwards = {name: count() for name in stages}
    waiting: list[tuple[str, int]] = []
    row = []
    words = [word for times, pattern in phases for word in pattern.split() * times]
    for word in words:
        name, kind = word[:-1], cast(Kind, word[-1])
        if kind == "W":
            place = next(i for i, (n, _) in enumerate(waiting) if name in ("", n))
            name, microbatch = waiting.pop(place)
        else:
            microbatch = next((forwards if kind == "F" else backwards)[name])
        if kind == "I":
            waiting.append((name, microbatch))
        row.append(Action(stage=stages[name], kind=kind, microbatch=microbatch))
    return tuple(row)

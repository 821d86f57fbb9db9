"""The collectives that XLA is expected to put into the programs of a cut's stages.

Terms: `when` is the action, F, I or W (B has those of I and W), or "step" for what
happens once at the end of a step. Laws: `work_costs` counts the time of just these.
"""

from collections import defaultdict
from collections.abc import Iterator

from torch_xla_pp.planner.evaluation import Cut
from torch_xla_pp.planner.plan_values import PredictedCollective
from torch_xla_pp.planner.work_costs import WorkCosts

# Place of a work, what, over which axis, when, and bytes.
_Found = tuple[int, str, str, str, float]


def predicted_collectives(
    works: WorkCosts, cut: Cut
) -> tuple[PredictedCollective, ...]:
    """Return the collectives of each stage, equal ones together.

    Args:
        works: What works cost with the cut's strategy and rows.
        cut: The cut.
    """
    totals: dict[tuple[int, str, str, str], list[float]] = defaultdict(list)
    for place, kind, axis, when, num_bytes in [*_tensor(works), *_data(works)]:
        stage = cut.stages[place]
        totals[stage, when, kind, axis].append(num_bytes)
        if when == "F" and cut.remat[stage] == "full":
            totals[stage, "I", kind, axis].append(num_bytes)
    return tuple(
        PredictedCollective(
            stage=stage,
            when=when,
            kind=kind,
            axis=axis,
            count=len(sizes),
            bytes=round(sum(sizes)),
        )
        for (stage, when, kind, axis), sizes in sorted(totals.items())
    )


def _tensor(works: WorkCosts) -> Iterator[_Found]:
    """Yield the sums of results in F, and of gradients of inputs in I."""
    table = works.table
    for number, value in enumerate(table.graph.values):
        producer = table.producers[number]
        if works.strategy.model == 1 or not value.has_gradient or producer < 0:
            continue
        size = float(works.value_bytes[number])
        if works.is_split[producer]:
            yield producer, "all-reduce", "model", "F", size
        for user in table.users[number]:
            if works.is_split[user]:
                yield user, "all-reduce", "model", "I", size


def _data(works: WorkCosts) -> Iterator[_Found]:
    """Yield what parameters and their gradients take over the axis `data`."""
    if works.strategy.data == 1:
        return
    for place, size in enumerate(works.gathered_bytes.tolist()):
        if not size:
            continue
        if works.strategy.has_fsdp:
            yield place, "all-gather", "data", "F", size
            yield place, "all-gather", "data", "I", size
            yield place, "reduce-scatter", "data", "W", size
        else:
            yield place, "all-reduce", "data", "step", size

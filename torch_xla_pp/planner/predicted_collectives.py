"""The collectives that XLA is expected to put into the programs of a cut's stages.

Terms: `when` is the action, F, I or W (B has those of I and W), or "step" for those at
the end of a step. Law: these are the collectives whose time `work_costs` counts.
"""

from collections import defaultdict
from collections.abc import Iterator

from torch_xla_pp.planner.evaluation import Cut
from torch_xla_pp.planner.plan_values import PredictedCollective
from torch_xla_pp.planner.strategies import MODEL
from torch_xla_pp.planner.work_costs import WorkCosts

# Place of a work, kind, axis, action, and bytes.
_Found = tuple[int, str, str, str, float]


def predicted_collectives(
    works: WorkCosts, cut: Cut
) -> tuple[PredictedCollective, ...]:
    """Return the collectives of each stage, equal ones together.

    Args:
        works: The costs of works with the cut's strategy and rows.
        cut: The cut.
    """
    totals: dict[tuple[int, str, str, str], list[float]] = defaultdict(list)
    if works.by_rules is None:
        exchanged = [*_tensor(works), *_data(works)]
    else:
        exchanged = [*_by_rules(works), *_at_borders(works, cut)]
    for place, kind, axis, when, num_bytes in exchanged:
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


def _by_rules(works: WorkCosts) -> Iterator[_Found]:
    """Yield what rules make works exchange."""
    for one in () if works.by_rules is None else works.by_rules.collectives:
        size = one.size.of(works.device_rows)
        yield one.place, one.kind, one.axis, one.when, size


def _at_borders(works: WorkCosts, cut: Cut) -> Iterator[_Found]:
    """Yield what makes values whole that stages send, and gradients of them."""
    table = works.table
    for number, value in enumerate(table.graph.values):
        producer = table.producers[number]
        if producer < 0 or works.inner_bytes[number] == works.value_bytes[number]:
            continue
        home, size = cut.stages[producer], float(works.value_bytes[number])
        places = {cut.stages[user]: user for user in table.users[number]}
        others = [user for stage, user in places.items() if stage != home]
        if others and value.name not in table.graph.outputs:
            yield producer, "all-gather", MODEL, "F", size
        for user in others if value.has_gradient else ():
            yield user, "all-gather", MODEL, "I", size


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
    """Yield the collectives of parameters and gradients over the axis `data`."""
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

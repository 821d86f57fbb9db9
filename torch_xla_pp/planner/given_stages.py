"""Stages that the user has chosen, around which the rest is planned.

A stage is named by operations, works or modules. A work that is not named goes to the
last stage that makes a value it uses, so that modules may be named without the
operations between them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_xla_pp.planner.evaluation import Cut, Evaluation, Evaluator, with_remat
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.work import Work, WorkGraph

_MOST_FAULTS = 20
StageNames = Sequence[Sequence[str]]


def names_in_file(path: str | Path) -> StageNames:
    """Return the stages of a plan, or a list of lists of names.

    Raises:
        ValueError: The file is neither.
    """
    text = Path(path).read_text()
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"stages: expected JSON, got a text that is none ({error}). Write a list "
            'of lists of names, such as [["embed"], ["layers.0", "layers.1"]].'
        ) from None
    if isinstance(data, dict):
        return [stage.ops for stage in PipelinePlan.from_json(path).stages]
    is_names = isinstance(data, list) and all(
        isinstance(stage, list) and all(isinstance(name, str) for name in stage)
        for stage in data
    )
    if not is_names:
        raise ValueError(
            f"stages: expected a plan, or a list of lists of names, got "
            f"{text.strip()[:60]!r}. Write e.g. "
            '[["embed"], ["layers.0", "layers.1"]].'
        )
    return [tuple(stage) for stage in data]


def stages_of_works(names: StageNames, graph: WorkGraph) -> tuple[int, ...]:
    """Return the stage of each work.

    Args:
        names: For each stage the operations, works or modules that it has.
        graph: The model.

    Raises:
        ValueError: A name is unknown, a stage is empty, an operation is in two, a work
            is cut apart, or values go to lower stages; all faults are listed.
    """
    named = [_named(graph, stage) for stage in names]
    faults = [*_name_faults(names, named, graph)]
    if not faults:
        found = _completed(named, graph)
        faults = [*_order_faults(found, len(names), graph)]
    if faults:
        more = len(faults) - _MOST_FAULTS
        lines = [f"stages: {fault}" for fault in faults[:_MOST_FAULTS]]
        lines += [f"and {more} more"] if more > 0 else []
        raise ValueError("\n".join(lines))
    return found


def given_cut(
    evaluator: Evaluator, start: Evaluation, remat: Sequence[str]
) -> Evaluation:
    """Return the cut with the best choice of values that stages compute again.

    Args:
        evaluator: Evaluates cuts.
        start: The first cut; its stages are kept.
        remat: What stages may choose.
    """
    best = start
    while True:
        near = [*_with_other_remat(best.cut, remat)]
        found = min(map(evaluator.evaluate, near), key=_key, default=best)
        if not _key(found) < _key(best):
            return best
        best = found


def _key(found: Evaluation) -> tuple[int, float, float]:
    return found.sort_key


def _with_other_remat(cut: Cut, remat: Sequence[str]) -> Iterator[Cut]:
    for stage, own in enumerate(cut.remat):
        for choice in remat:
            if choice != own:
                yield with_remat(cut, {stage: choice})


def _named(graph: WorkGraph, names: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the operations that each name stands for."""
    return {name: [*_ops_named(graph.works, name)] for name in names}


def _ops_named(works: Sequence[Work], name: str) -> Iterator[str]:
    """Yield the operation of a name, or else those of the module of that name."""
    if any(name in work.ops for work in works):
        yield name
        return
    for work in works:
        inside = work.module == name or work.module.startswith(f"{name}.")
        if work.name == name or inside:
            yield from work.ops


def _name_faults(
    names: StageNames, named: Sequence[Mapping[str, list[str]]], graph: WorkGraph
) -> Iterator[str]:
    modules = dict.fromkeys(work.module for work in graph.works if work.module)
    for number, stage in enumerate(named):
        if not names[number]:
            yield f"stage {number}: expected names, got none. Remove the stage."
        for name, ops in stage.items():
            if not ops:
                yield (
                    f"stage {number}: expected operations, works or modules of the "
                    f"model, got {name!r}. Its modules are {_first(modules)}."
                )
    homes: dict[str, set[int]] = {}
    for number, stage in enumerate(named):
        for op in (op for ops in stage.values() for op in ops):
            homes.setdefault(op, set()).add(number)
    for op, found in homes.items():
        if len(found) > 1:
            yield (
                f"operation {op}: expected in one stage, got it in "
                f"{_first(sorted(found))}. Keep one."
            )
    for work in graph.works:
        own = {home for op in work.ops for home in homes.get(op, ())}
        is_whole = all(len(homes.get(op, ())) <= 1 for op in work.ops)
        if len(own) > 1 and is_whole:
            yield (
                f"work {work.name}: expected in one stage, got its operations in "
                f"stages {_first(sorted(own))}. Keep {_first(work.ops)} together."
            )


def _completed(
    named: Sequence[Mapping[str, list[str]]], graph: WorkGraph
) -> tuple[int, ...]:
    """Return the stage of each work, also of works that are not named."""
    homes = {
        op: number
        for number, stage in enumerate(named)
        for ops in stage.values()
        for op in ops
    }
    found: list[int] = []
    for place, work in enumerate(graph.works):
        own = [homes[op] for op in work.ops if op in homes]
        before = [found[p] for p, consumer in graph.edges if consumer == place]
        found.append(own[0] if own else max(before, default=0))
    return tuple(found)


def _order_faults(stages: Sequence[int], count: int, graph: WorkGraph) -> Iterator[str]:
    for number in sorted(set(range(count)) - set(stages)):
        yield f"stage {number}: expected operations, got none. Remove the stage."
    index = graph.index
    for value in graph.values:
        if value.producer is None:
            continue
        home = stages[index[value.producer]]
        for user in value.users:
            if stages[index[user]] < home:
                yield (
                    f"value {value.name}: expected to go to higher stages, got it from "
                    f"stage {home}, which has {value.producer}, to stage "
                    f"{stages[index[user]]}, which has {user}. Number stages by data "
                    "flow, or move one of the two."
                )


def _first(names: Sequence[object] | Mapping[str, None]) -> str:
    """List names, only the first few of many."""
    words = [*map(str, names)]
    return ", ".join(words[:8]) + (", ..." if len(words) > 8 else "")

"""Check a plan against its model, by other means than the search's.

What is counted here is counted from the work graph's own fields, a stage and a value
at a time; nothing of the search, of its tables or of its evaluation is used.

Laws: the plan is of this model; every operation is in one stage, and no work is cut
apart; values go to higher stages only; stages and ranks count from 0 without gaps; rows
divide; the order of actions can run, with the edges that the model has; no device needs
more memory than it has, and the plan does not state less than it needs.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_faults import plan_faults
from torch_xla_pp.planner.plan_splits import PlanSplits
from torch_xla_pp.schedule import carriers_of, verify
from torch_xla_pp.work import WorkGraph, WorkValue

_TOLERANCE = 0.01


def check(plan: PipelinePlan, graph: WorkGraph) -> None:
    """Refuse a plan that breaks one of the laws above.

    Args:
        plan: The plan.
        graph: The work of the model that it is to run.

    Raises:
        ValueError: The plan breaks some; all faults are listed.
    """
    faults = faults_in(plan, graph)
    if faults:
        raise ValueError("\n".join(f"plan: {fault}" for fault in faults))


def faults_in(plan: PipelinePlan, graph: WorkGraph) -> list[str]:
    """Return the faults of a plan; checks later laws only if the stages are sound."""
    if found := [*_model_faults(plan, graph)]:
        return found
    if found := [*plan_faults(plan), *_op_faults(plan, graph)]:
        return found
    if found := [*_edge_faults(plan, graph)]:
        return found
    return [*_order_faults(plan)] or [*_memory_faults(plan, graph)]


def _model_faults(plan: PipelinePlan, graph: WorkGraph) -> Iterator[str]:
    if plan.model.digest != graph.digest:
        known = {op for work in graph.works for op in work.ops}
        planned = [op for stage in plan.stages for op in stage.ops]
        other = next((op for op in planned if op not in known), None)
        where = "" if other is None else f"; it lacks the planned operation {other}"
        yield (
            f"model: expected digest {plan.model.digest}, got {graph.digest}{where}. "
            "Plan this model."
        )


def _op_faults(plan: PipelinePlan, graph: WorkGraph) -> Iterator[str]:
    """Find operations in no stage, unknown ones, and works that are cut apart."""
    known = {op for work in graph.works for op in work.ops}
    counts = Counter(op for stage in plan.stages for op in stage.ops)
    for op in counts:
        if op not in known:
            yield f"operation {op}: expected one of the model, got another. Remove it."
    for work in graph.works:
        missing = [op for op in work.ops if op not in counts]
        if missing:
            yield (
                f"operation {missing[0]}: expected in a stage, got it in none. Add it "
                "to one."
            )
        homes = {plan.stage_of[op] for op in work.ops if op in counts}
        if len(homes) > 1:
            yield (
                f"work {work.name}: expected in one stage, got it cut into stages "
                f"{', '.join(map(str, sorted(homes)))}. Keep its operations together."
            )


def _homes(plan: PipelinePlan, graph: WorkGraph) -> dict[str, int]:
    """Return the stage of each work."""
    return {work.name: plan.stage_of[work.ops[0]] for work in graph.works}


def _true_edges(plan: PipelinePlan, graph: WorkGraph) -> set[tuple[int, int]]:
    """Return the edges between stages that the values of the model make."""
    homes = _homes(plan, graph)
    return {
        (homes[value.producer], homes[user])
        for value in graph.values
        if value.producer is not None
        for user in value.users
        if homes[value.producer] != homes[user]
    }


def _edge_faults(plan: PipelinePlan, graph: WorkGraph) -> Iterator[str]:
    edges = _true_edges(plan, graph)
    for producer, consumer in sorted(edges):
        if producer > consumer:
            yield (
                f"stages: expected values to go to higher stages, got them from "
                f"{producer} to {consumer}. Number stages by data flow; stages that "
                "use each other in a circle cannot run."
            )
    for producer, consumer in sorted(edges - set(plan.edges)):
        yield (
            f"edges: expected {producer}->{consumer}, as a value goes there, got none. "
            "Plan again."
        )
    sized = {
        edge for flow in plan.predicted.flows if flow.num_bytes for edge in flow.edges
    }
    for producer, consumer in sorted(sized - edges):
        # The first stage may pass the model's inputs on.
        if producer != 0:
            yield (
                f"edges: expected no {producer}->{consumer}, as no value goes there. "
                "Plan again."
            )


def _order_faults(plan: PipelinePlan) -> Iterator[str]:
    placement = {number: stage.rank for number, stage in enumerate(plan.stages)}
    users: dict[int, set[int]] = {}
    for producer, consumer in plan.edges:
        users.setdefault(producer, set()).add(consumer)
    try:
        verify(
            plan.table(),
            plan.edges,
            placement=placement,
            num_microbatches=plan.batch.microbatches,
            carriers=carriers_of(
                [(producer, sorted(found)) for producer, found in users.items()],
                placement,
            ),
        )
    except (ScheduleError, ValueError) as error:
        yield f"schedule {plan.schedule.name}: {error}"


def _memory_faults(plan: PipelinePlan, graph: WorkGraph) -> Iterator[str]:
    for number, rank in enumerate(plan.ranks):
        own = [n for n, stage in enumerate(plan.stages) if stage.rank == number]
        needed = _rank_need(plan, graph, number, own)
        stated = plan.predicted.ranks[number].bytes.total
        if needed > rank.capacity_bytes:
            yield (
                f"rank {number}: expected at most {rank.capacity_bytes} bytes on a "
                f"device, got {needed:.0f}. Use remat, more ranks or fewer rows."
            )
        if abs(needed - stated) > _TOLERANCE * max(needed, stated) + 64:
            yield (
                f"rank {number}: expected the stated {stated} bytes, got {needed:.0f}. "
                "Plan again."
            )


def _rank_need(
    plan: PipelinePlan, graph: WorkGraph, number: int, own: Sequence[int]
) -> float:
    """Return the most bytes that a device of a rank holds."""
    split = PlanSplits(plan, number)
    rows = plan.batch.rows_per_microbatch / split.strategy.data
    homes = _homes(plan, graph)
    touched: defaultdict[str | None, float] = defaultdict(float)
    for value in graph.values:
        is_used = value.users or value.name in graph.outputs
        for name in (value.producer, *value.users) if is_used else ():
            touched[name] += value.size.of(rows) * split.share(value.dims)
    state, largest = 0.0, 0.0
    saved = dict.fromkeys(own, 0.0)
    passed = dict.fromkeys(own, 0.0)
    made = dict.fromkeys(own, 0.0)
    outputs = dict.fromkeys(own, 0.0)
    for stage in own:
        names = {work.name for work in graph.works if homes[work.name] == stage}
        remat = plan.stages[stage].remat
        in_input = _in_input_backward(graph, names)
        lasts = _last_computed(graph, names)
        again_last = lasts if remat == "full" else set()
        seen: set[str] = set()
        for work in graph.works:
            if work.name not in names:
                continue
            for parameter in work.parameters:
                if parameter.tied is None or parameter.tied not in seen:
                    kept = split.kept_bytes(parameter)
                    state += kept * (2 + plan.costs.optimizer_bytes)
                seen |= {parameter.tied} if parameter.tied is not None else set()
            saved[stage] += split.saved(work, remat, rows)
            is_late = work.name not in in_input
            is_last = work.name in lasts
            again = remat if is_last else "none"
            if is_late:
                passed[stage] += split.saved(work, remat, rows)
            else:
                passed[stage] += split.passed(work, again, rows)
                is_again = remat == "full" and not is_last
                count = split.passed if is_again else split.made
                made[stage] += count(work, again, rows)
            held = split.saved(work, "none", rows) + touched[work.name]
            if split.strategy.has_fsdp:
                held += sum(map(split.used_bytes, work.parameters))
            largest = max(largest, held)
        entering = [
            value
            for value in graph.values
            if value.producer not in names and names & set(value.users)
        ]
        entered = {value.name for value in entering}
        readers_of = {
            value.name: names.intersection(value.passed_by)
            | again_last.intersection(value.passed_again_by)
            for value in graph.values
        }
        _read_operands(graph, names & again_last, readers_of)
        kept_here: set[str] = set()
        late_here: set[str] = set()
        held_here: set[str] = set()
        for value in graph.values:
            enters = value.name in entered
            keepers = names.intersection(value.kept_by)
            if remat == "full":
                unread = lasts.intersection(value.unread_by)
                computing = names.intersection(value.users) - unread
                keepers = computing | readers_of[value.name] if enters else set()
            readers = readers_of[value.name] & in_input
            readers |= names & ({*value.kept_by} - in_input)
            kept_here |= {value.name} if keepers else set()
            late_here |= {value.name} if readers else set()
            is_held = readers and (enters or remat == "none")
            held_here |= {value.name} if is_held else set()
        sizes: dict[str, float] = {}
        for value in graph.values:
            is_whole = value.name in graph.outputs or {
                homes[user] for user in value.users
            } != {homes.get(value.producer or "")}
            size = value.size.of(rows) * (1 if is_whole else split.share(value.dims))
            sizes[value.name] = size
            if value.name in graph.outputs and value.producer in names:
                outputs[stage] += size
        saved[stage] += _least_bytes(graph, names, kept_here, sizes)
        late = _least_bytes(graph, names, late_here, sizes)
        passed[stage] += late
        made[stage] += late - _least_bytes(graph, names, held_here, sizes)
        if not any(value.has_gradient for value in entering):
            # W is the whole backward.
            passed[stage], made[stage] = saved[stage], 0.0
        for value in graph.values:
            if value.has_gradient and value.producer in names - in_input:
                # Others are received by W itself.
                users = {homes[user] for user in value.users}.intersection(own)
                users -= {stage}
                passed[stage] += len(users) * sizes[value.name]
                made[stage] += len(users) * sizes[value.name]
        saved[stage] += outputs[stage]
    return state + _most_kept(plan, number, saved, passed, made) + largest


def _least_bytes(
    graph: WorkGraph, names: set[str], read: set[str], sizes: Mapping[str, float]
) -> float:
    """Return what a stage of some works keeps: views that it makes, or their wholes."""
    views: defaultdict[str | None, list[WorkValue]] = defaultdict(list)
    for value in graph.values:
        views[value.view_of if value.producer in names else None].append(value)

    def least(value: WorkValue) -> float:
        parts = sum(map(least, views[value.name]))
        return (
            sizes[value.name] if value.name in read else min(parts, sizes[value.name])
        )

    return sum(map(least, views[None]))


def _last_computed(graph: WorkGraph, names: set[str]) -> set[str]:
    """Return the works of a stage whose values its I does not compute again."""
    read: set[str | None] = set()
    found: set[str] = set()
    for work in reversed(graph.works):
        if work.name not in names:
            continue
        is_last = work.name not in read
        found |= {work.name} if is_last else set()
        for value in graph.values:
            is_unread = is_last and work.name in value.unread_by
            if work.name in value.users and not is_unread:
                read.add(value.producer)
    return found


def _read_operands(
    graph: WorkGraph, lasts: set[str], readers_of: dict[str, set[str]]
) -> None:
    """Let W read the operands of the works that it computes again itself.

    Args:
        graph: All works.
        lasts: Works of the stage whose values I does not compute again.
        readers_of: The works of the stage whose W reads each value.
    """
    for work in reversed(graph.works):
        own = [v for v in graph.values if v.producer == work.name in lasts]
        if any(readers_of[value.name] - {work.name} for value in own):
            for value in own:
                readers_of[value.name] &= {work.name}
            for value in graph.values:
                if work.name in value.users:
                    readers_of[value.name].add(work.name)


def _in_input_backward(graph: WorkGraph, names: set[str]) -> set[str]:
    """Return the works of a stage from which a gradient goes to an earlier one."""
    used: defaultdict[str, list[str | None]] = defaultdict(list)
    for value in graph.values:
        for user in names.intersection(value.users) if value.has_gradient else ():
            used[user].append(value.producer)
    found: set[str] = set()
    for work in graph.works:
        if any(made not in names or made in found for made in used[work.name]):
            found.add(work.name)
    return found


def _most_kept(
    plan: PipelinePlan,
    number: int,
    saved: dict[int, float],
    passed: dict[int, float],
    made: dict[int, float],
) -> float:
    """Walk a rank's actions, and return the most that they keep at a time.

    What an I makes for W is there before what F has saved goes.
    """
    kept = most = 0.0
    for action in plan.table().actions[number]:
        stage = action.stage
        if action.kind == "F":
            kept += saved[stage]
            most = max(most, kept)
        elif action.kind == "W":
            kept -= passed[stage]
        elif action.kind == "B":
            kept -= saved[stage]
        else:
            most = max(most, kept + made[stage])
            kept += passed[stage] - saved[stage]
    return most

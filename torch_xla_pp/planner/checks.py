"""Check a plan against the model it is for, by other means than the search's.

What is counted here is counted from the work graph's own fields, a stage and a value
at a time; nothing of the search, of its tables or of its evaluation is used.

Laws: the plan is of this model; every operation is in one stage, and no work is cut
apart; values go to higher stages only; stages and ranks count from 0 without gaps; rows
divide; the order of actions can run, with the edges that the model has; no device holds
more than it has, and the plan does not state less than it holds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torch_xla_pp.errors import ScheduleError
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_faults import plan_faults
from torch_xla_pp.schedule import carriers_of, verify
from torch_xla_pp.work import WorkGraph, WorkParameter

_TOLERANCE = 0.01


def check(plan: PipelinePlan, graph: WorkGraph) -> None:
    """Refuse a plan that breaks one of the laws above.

    Args:
        plan: The plan.
        graph: The work of the model that it is to run.

    Raises:
        ValueError: It does; all faults are listed.
    """
    faults = faults_in(plan, graph)
    if faults:
        raise ValueError("\n".join(f"plan: {fault}" for fault in faults))


def faults_in(plan: PipelinePlan, graph: WorkGraph) -> list[str]:
    """Return what is wrong with a plan; later laws only if the stages are sound."""
    if found := [*_model_faults(plan, graph)]:
        return found
    if found := [*plan_faults(plan), *_op_faults(plan, graph)]:
        return found
    if found := [*_edge_faults(plan, graph)]:
        return found
    return [*_order_faults(plan, graph)] or [*_memory_faults(plan, graph)]


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
        # The first stage may send the model's inputs on.
        if producer != 0:
            yield (
                f"edges: expected no {producer}->{consumer}, as no value goes there. "
                "Plan again."
            )


def _order_faults(plan: PipelinePlan, graph: WorkGraph) -> Iterator[str]:
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
    """Count what a device of a rank holds at most."""
    mesh = plan.ranks[number].mesh
    is_fsdp = "fsdp" in plan.ranks[number].rules
    data, model = mesh.get("data", 1), mesh.get("model", 1)
    rows = plan.batch.rows_per_microbatch / data
    homes = _homes(plan, graph)
    touched: defaultdict[str | None, float] = defaultdict(float)
    for value in graph.values:
        for name in (value.producer, *value.users):
            touched[name] += value.size.of(rows)
    state, largest = 0.0, 0.0
    saved = dict.fromkeys(own, 0.0)
    passed = dict.fromkeys(own, 0.0)
    outputs = dict.fromkeys(own, 0.0)
    for stage in own:
        names = {work.name for work in graph.works if homes[work.name] == stage}
        remat = plan.stages[stage].remat
        in_input = _in_input_backward(graph, names)
        seen: set[str] = set()
        for work in graph.works:
            if work.name not in names:
                continue
            is_split = any(_is_split(p, model) for p in work.parameters)
            share = 1 / model if is_split else 1.0
            whole = 0.0
            for parameter in work.parameters:
                split = model if _is_split(parameter, model) else 1
                whole += parameter.bytes / split
                if parameter.tied is None or parameter.tied not in seen:
                    kept = parameter.bytes / split / (data if is_fsdp else 1)
                    state += kept * (2 + plan.costs.optimizer_bytes)
                seen |= {parameter.tied} if parameter.tied is not None else set()
            saved[stage] += work.saved[remat].of(rows) * share
            is_late = work.name not in in_input
            is_last = not any(
                value.producer == work.name and names & set(value.users)
                for value in graph.values
            )
            late = work.passed[remat if is_last else "none"]
            if is_late:
                late = work.saved[remat]
            passed[stage] += late.of(rows) * share
            held = work.saved["none"].of(rows) * share + touched[work.name]
            largest = max(largest, held + (whole if is_fsdp else 0.0))
        entering = [
            value
            for value in graph.values
            if value.producer not in names and names & set(value.users)
        ]
        entered = {value.name for value in entering}
        for value in graph.values:
            enters = value.name in entered
            is_kept = enters if remat == "full" else names & set(value.kept_by)
            if is_kept:
                saved[stage] += value.size.of(rows)
            readers = names & (
                {*value.passed_by} & in_input | {*value.kept_by} - in_input
            )
            if readers:
                passed[stage] += value.size.of(rows)
            if value.name in graph.outputs and value.producer in names:
                outputs[stage] += value.size.of(rows)
        if not any(value.has_gradient for value in entering):
            # W is the whole backward.
            passed[stage] = saved[stage]
        saved[stage] += outputs[stage]
    return state + _most_kept(plan, number, saved, passed) + largest


def _in_input_backward(graph: WorkGraph, names: set[str]) -> set[str]:
    """Return the works of a stage from which a gradient goes to an earlier one."""
    found: set[str] = set()
    for work in graph.works:
        used = [v for v in graph.values if v.has_gradient and work.name in v.users]
        if any(v.producer not in names or v.producer in found for v in used):
            found.add(work.name)
    return found & names


def _most_kept(
    plan: PipelinePlan, number: int, saved: dict[int, float], passed: dict[int, float]
) -> float:
    """Walk a rank's actions, and return the most that they keep at a time."""
    kept = most = 0.0
    for action in plan.table().actions[number]:
        if action.kind == "F":
            kept += saved[action.stage]
        elif action.kind == "W":
            kept -= passed[action.stage]
        else:
            kept -= saved[action.stage]
            kept += passed[action.stage] if action.kind == "I" else 0.0
        most = max(most, kept)
    return most


def _is_split(parameter: WorkParameter, model: int) -> bool:
    sizes = parameter.shape
    return model > 1 and len(sizes) > 1 and any(s and s % model == 0 for s in sizes)

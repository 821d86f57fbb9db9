"""From the best cut of a search to the parts of a plan."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch_xla_pp.planner.comparisons import options_text, pinned, reasons_of
from torch_xla_pp.planner.devices import DeviceSpec
from torch_xla_pp.planner.evaluation import Cut, Evaluation, Evaluator
from torch_xla_pp.planner.orders import LISTED
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_load import load_of
from torch_xla_pp.planner.plan_values import (
    Alternative,
    Candidate,
    CostSource,
    PlannedBatch,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    PredictedCollective,
    PredictedRank,
    PredictedStage,
    Prediction,
    SearchCounts,
)
from torch_xla_pp.planner.predicted_collectives import predicted_collectives
from torch_xla_pp.planner.rank_links import links_of, planned_link
from torch_xla_pp.planner.search import SearchResult
from torch_xla_pp.planner.settings import Request
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.schedule import peak_live
from torch_xla_pp.text import bytes_text
from torch_xla_pp.work import WorkGraph

_MOST_CANDIDATES = 100
# The share of a model's bytes that operations of unknown cost may write.
_UNKNOWN_SHARE = 0.05


def plan_of(
    request: Request,
    evaluator: Evaluator,
    best: Evaluation,
    result: SearchResult,
    alternatives: tuple[Alternative, ...],
    baselines: dict[str, float],
) -> PipelinePlan:
    """Describe the best cut of a search.

    Args:
        request: The request.
        evaluator: The evaluator of the cuts.
        best: The best cut.
        result: The result of the search.
        alternatives: Plans in which one choice differs.
        baselines: Planner → seconds of its plan's step.
    """
    setting, graph = best.cut.setting, evaluator.table.graph
    replica_link = evaluator.cluster.replica_link
    kinds = _kinds_of_devices(evaluator)
    return PipelinePlan(
        model=_model(graph),
        batch=PlannedBatch(
            rows=request.rows,
            replicas=setting.replicas,
            microbatches=setting.num_microbatches,
            rows_per_microbatch=setting.rows,
        ),
        stages=tuple(_stages(graph, best)),
        ranks=_ranks(evaluator, best),
        schedule=_schedule(best),
        predicted=_prediction(request, evaluator, best),
        costs=CostSource(
            source=_source(evaluator),
            device=", ".join(kind.name for kind in kinds),
            is_verified=all(kind.is_verified for kind in kinds),
            optimizer_bytes=evaluator.optimizer_bytes,
            links=links_of(evaluator.cluster.network),
            warnings=tuple(_warnings(evaluator)),
            replica_link=None if replica_link is None else planned_link(replica_link),
        ),
        reasons=tuple(reasons_of(evaluator, best, alternatives)),
        alternatives=alternatives,
        baselines=baselines,
        search=SearchCounts(
            settings=result.num_settings,
            pruned=result.num_pruned,
            evaluated=result.num_evaluated,
        ),
        candidates=tuple(_candidates(request, result)),
        # Advice is on devices that are all alike.
        device_load=None if setting.strategies else load_of(evaluator, best),
        rules=evaluator.table.rules,
    )


def _kinds_of_devices(evaluator: Evaluator) -> list[DeviceSpec]:
    cluster = evaluator.cluster
    kinds = [rank.device for rank in cluster.ranks] or [cluster.device]
    return [*dict.fromkeys(kinds)]


def _source(evaluator: Evaluator) -> str:
    measured = evaluator.table.measured
    if measured is None:
        return "roofline"
    return str(measured)


def _schedule(best: Evaluation) -> PlannedSchedule:
    setting = best.cut.setting
    if setting.schedule != LISTED and not best.cut.sequence:
        return PlannedSchedule(
            name=setting.schedule, stages_per_rank=setting.stages_per_rank
        )
    # The order of a name is that of ranks 0, 1, …; of others it is written out.
    return PlannedSchedule(
        name=LISTED,
        stages_per_rank=best.cut.stages_per_rank,
        csv=best.order.schedule.to_csv(),
    )


def _candidates(request: Request, result: SearchResult) -> Iterator[Candidate]:
    for found in result.ranking[:_MOST_CANDIDATES]:
        setting = found.cut.setting
        replicas = f"{setting.replicas} x " if setting.replicas > 1 else ""
        presets = f" {'+'.join(setting.strategy.presets)}"
        sharding = f"{setting.strategy}{presets if setting.strategy.presets else ''}"
        if setting.strategies:
            sharding = " ".join(strategy.text for strategy in setting.strategies)
        stages = setting.stages_per_rank
        yield Candidate(
            label=f"{replicas}{setting.num_ranks} ranks, {sharding}, "
            f"{setting.num_microbatches} of {setting.rows} rows, {setting.schedule}"
            f"{f' x {stages}' if stages > 1 else ''}",
            options=options_text(pinned(request, found)),
            step_s=found.step_s,
            peak_bytes=found.peak_bytes,
            fits=found.fits,
        )


def _model(graph: WorkGraph) -> PlannedModel:
    tied, total = set(), 0
    for work in graph.works:
        for parameter in work.parameters:
            total += 0 if parameter.tied in tied else parameter.bytes
            tied |= {parameter.tied} - {None}
    return PlannedModel(
        digest=graph.digest,
        num_ops=graph.num_ops,
        parameter_bytes=total,
        tied=tuple(sorted(name for name in tied if name is not None)),
        op_digests=graph.op_digests,
        source=graph.source,
    )


def _stages(graph: WorkGraph, best: Evaluation) -> Iterator[PlannedStage]:
    placement = best.order.placement
    cut = best.cut
    homes = dict(zip((w.name for w in graph.works), cut.stages, strict=True))
    for stage in range(cut.num_stages):
        works = [work for work in graph.works if homes[work.name] == stage]
        inputs = [
            value.name
            for value in graph.values
            if any(homes[user] == stage for user in value.users)
            and (value.producer is None or homes[value.producer] != stage)
        ]
        yield PlannedStage(
            rank=placement[stage],
            ops=tuple(op for work in works for op in work.ops),
            modules=_outermost(work.module for work in works),
            remat=cut.remat[stage],
            inputs=tuple(inputs),
        )


def _outermost(paths: Iterator[str]) -> tuple[str, ...]:
    """Return each path once, without paths within another."""
    unique = [*dict.fromkeys(path for path in paths if path)]
    known = set(unique)
    return tuple(
        path
        for path in unique
        if not any(
            ".".join(path.split(".")[:end]) in known
            for end in range(1, path.count(".") + 1)
        )
    )


def _ranks(evaluator: Evaluator, best: Evaluation) -> tuple[PlannedRank, ...]:
    setting, cluster = best.cut.setting, evaluator.cluster
    count = setting.num_ranks
    kinds = [rank.device for rank in cluster.ranks[:count]] or [cluster.device] * count
    strategies = setting.strategies or (setting.strategy,) * count
    return tuple(
        PlannedRank(
            devices=strategy.num_devices,
            device=kind.name,
            mesh={axis: size for axis, size in strategy.sizes.items() if size > 1},
            rules=strategy.presets,
            batch_axis="data" if strategy.data > 1 else None,
            capacity_bytes=capacity,
        )
        for kind, strategy, capacity in zip(
            kinds, strategies, best.capacities, strict=True
        )
    )


def _prediction(request: Request, evaluator: Evaluator, best: Evaluation) -> Prediction:
    costs, schedule = best.costs, best.order.schedule
    live = peak_live(schedule)
    ranks, busy = [], []
    for number, row in enumerate(schedule.actions):
        busy.append(sum(costs.seconds[a.stage, a.kind] for a in row))
        ranks.append(
            PredictedRank(
                busy_s=busy[-1],
                live=sum(live[stage] for stage in schedule.stages_of(number)),
                bytes=best.ranks[number],
            )
        )
    depths = [1] * best.cut.num_stages
    for producer, consumer in reversed(costs.edges):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    return Prediction(
        step_s=best.step_s,
        rows_per_s=request.rows / best.step_s if best.step_s else 0.0,
        bubble=1 - sum(busy) / len(busy) / best.step_s if best.step_s else 0.0,
        depth=max(depths),
        ranks=tuple(ranks),
        stages=tuple(
            PredictedStage(
                forward_s=costs.seconds[stage, "F"],
                input_s=costs.seconds[stage, "I"],
                weight_s=costs.seconds[stage, "W"],
                final_s=costs.final_s[stage],
                saved_bytes=costs.saved_bytes[stage],
                passed_bytes=costs.passed_bytes[stage],
            )
            for stage in range(best.cut.num_stages)
        ),
        flows=costs.flows,
        collectives=tuple(_collectives(evaluator, best.cut)),
    )


def _collectives(evaluator: Evaluator, cut: Cut) -> Iterator[PredictedCollective]:
    setting = cut.setting
    if not setting.strategies:
        works = evaluator.works(setting.strategy, setting.rows)
        yield from predicted_collectives(works, cut)
        return
    of_ranks = evaluator.works_of_ranks(setting)
    every = {works: predicted_collectives(works, cut) for works in {*of_ranks}}
    for stage, rank in enumerate(cut.ranks):
        yield from (one for one in every[of_ranks[rank]] if one.stage == stage)


def _warnings(evaluator: Evaluator) -> Iterator[str]:
    kinds = _kinds_of_devices(evaluator)
    for device in kinds:
        if not device.is_verified:
            yield f"figures of {device.name} are not measured: {device.source}"
    measured = evaluator.table.measured
    if measured is not None and measured.compiler:
        yield (
            f"no work ran: times are cycles that {measured.compiler} expects of "
            f"{measured.device}"
        )
    yield from _work_warnings(evaluator.table.graph, kinds)
    yield from _rule_warnings(evaluator.table)
    if not evaluator.has_own_inputs:
        count = sum(v.producer is None for v in evaluator.table.graph.values)
        if count > 1:
            yield f"the {count} inputs of the model go through the first stage"


def _rule_warnings(table: WorkTable) -> Iterator[str]:
    if table.rules is None:
        return
    works = table.graph.works
    names = {p.name for work in works for p in work.parameters}
    if missed := table.rules.unmatched(names):
        yield f"rules match no parameter of the work: {', '.join(missed)}"
    if not any(work.sums for work in works) and names:
        yield (
            "the work does not say which dimensions products sum over, so that of what "
            "rules split parameters alone are known; trace it with this version"
        )


def _work_warnings(graph: WorkGraph, kinds: Sequence[DeviceSpec]) -> Iterator[str]:
    if not graph.has_loss:
        yield (
            "no loss was given: what it and its gradient take is not counted; trace "
            "the model with loss_fn and target"
        )
    share = sum(graph.unknown_ops.values())
    if share > _UNKNOWN_SHARE:
        yield (
            f"operations of unknown FLOPs write {100 * share:.0f} % of all bytes, and "
            f"count as moving bytes alone: {', '.join(graph.unknown_ops)}"
        )
    sizes: Counter[str] = Counter()
    for parameter in (p for work in graph.works for p in work.parameters):
        sizes[parameter.dtype] += parameter.bytes
    for device in kinds:
        others = sorted(sizes.keys() - {device.dtype}) if device.dtype else []
        held = ", ".join(f"{dtype} ({bytes_text(sizes[dtype])})" for dtype in others)
        if held:
            yield (
                f"the peak of {device.name} is that of {device.dtype}, and is taken "
                f"for parameters of {held}, too; a device file can have another"
            )

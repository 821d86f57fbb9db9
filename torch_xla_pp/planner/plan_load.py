"""The work and the exchanges of a cut's stages, for advice."""

from collections.abc import Iterator

import numpy as np

from torch_xla_pp.advice import Exchange, Machine, PipelineLoad, StageLoad
from torch_xla_pp.planner.evaluation import Cut, Evaluation, Evaluator
from torch_xla_pp.planner.plan_values import PredictedCollective
from torch_xla_pp.planner.predicted_collectives import predicted_collectives
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import Array, WorkCosts

# Stands for a link without a bound, which JSON has no number for.
_UNBOUNDED = 1e18


def load_of(evaluator: Evaluator, best: Evaluation) -> PipelineLoad:
    """Return the load of a device in a step of a cut.

    Args:
        evaluator: The evaluator of the cut.
        best: The cut.
    """
    cut, setting = best.cut, best.cut.setting
    works = evaluator.works(setting.strategy, setting.rows)
    flops, accessed = (_work_of(works, cut, first) for first in (0, 2))
    exchanges: list[list[Exchange]] = [[] for _ in range(cut.num_stages)]
    for one in predicted_collectives(works, cut):
        exchanges[one.stage].append(_within(one, setting.strategy))
    for stage, exchange in [*_between_stages(best), *_of_replicas(works, cut)]:
        exchanges[stage].append(exchange)
    strategy = setting.strategy
    data = "fsdp" if strategy.has_fsdp else "dp"
    return PipelineLoad(
        stages=tuple(
            StageLoad(
                stage=stage,
                flops={kind: float(flops[kind][stage]) for kind in flops},
                accessed_bytes={kind: float(accessed[kind][stage]) for kind in flops},
                exchanges=tuple(exchanges[stage]),
            )
            for stage in range(cut.num_stages)
        ),
        num_microbatches=setting.num_microbatches,
        num_ranks=setting.num_ranks,
        stages_per_rank=cut.stages_per_rank,
        mesh={"data": strategy.data, "model": strategy.model},
        strategies={"data": data, "model": "tp"},
        machine=_machine_of(evaluator, strategy),
    )


def _machine_of(evaluator: Evaluator, strategy: Strategy) -> Machine:
    """Return the devices; those of a rank share the links that leave it."""
    device, network = evaluator.cluster.device, evaluator.cluster.network
    links = [network.default, *network.links.values()]
    between = min(_UNBOUNDED, *(link.bytes_per_s for link in links))
    replicas = min(_UNBOUNDED, evaluator.cluster.link_of_replicas.bytes_per_s)
    count = strategy.num_devices
    return Machine(
        name=device.name,
        flops_per_s=device.flops_per_s,
        memory_bytes_per_s=device.bytes_per_s,
        link_bytes_per_s=device.link_bytes_per_s,
        links={"pp": between / count, "replicas": replicas / count},
    )


def _work_of(works: WorkCosts, cut: Cut, first: int) -> dict[str, Array]:
    """Return the FLOPs of each stage in F, I and W, or the bytes that it accesses.

    Args:
        works: The costs of works.
        cut: The stages.
        first: The column of their costs for a row; the next column is fixed.
    """
    stages = np.array(cut.stages)
    found: dict[str, Array] = {}
    for kind, cost in zip("FIW", works.table.costs, strict=True):
        own = (cost[:, first] * works.device_rows + cost[:, first + 1]) * works.share
        found[kind] = np.bincount(stages, own, cut.num_stages).astype(float)
    found["I"] += found["F"] * [remat == "full" for remat in cut.remat]
    return found


def _within(one: PredictedCollective, strategy: Strategy) -> Exchange:
    size = strategy.data if one.axis == "data" else strategy.model
    return Exchange(
        when=one.when,
        kind=one.kind,
        axis=one.axis,
        num_devices=size,
        count=one.count,
        num_bytes=float(one.bytes),
    )


def _between_stages(best: Evaluation) -> Iterator[tuple[int, Exchange]]:
    """Yield the values that stages send to other ranks, and their gradients."""
    ranks = best.order.placement
    share = best.cut.setting.strategy.num_devices
    for flow in best.costs.flows:
        num_bytes = flow.num_bytes / share
        others = [c for c in flow.consumers if ranks[c] != ranks[flow.producer]]
        for consumer in others if num_bytes else ():
            yield flow.producer, _boundary("F", num_bytes)
            if flow.has_gradient:
                yield consumer, _boundary("I", num_bytes)


def _boundary(when: str, num_bytes: float) -> Exchange:
    return Exchange(
        when=when,
        kind="boundary",
        axis="pp",
        num_devices=1,
        count=1,
        num_bytes=num_bytes,
    )


def _of_replicas(works: WorkCosts, cut: Cut) -> Iterator[tuple[int, Exchange]]:
    """Yield the sums of gradients over replicas: each parameter once for a rank."""
    replicas, share = cut.setting.replicas, works.strategy.num_devices
    sizes = np.bincount(np.array(cut.stages), works.table.parameter_bytes)
    for stage, num_bytes in enumerate(sizes.tolist()):
        if replicas > 1 and num_bytes:
            yield (
                stage,
                Exchange(
                    when="step",
                    kind="all-reduce",
                    axis="replicas",
                    num_devices=replicas,
                    count=1,
                    num_bytes=num_bytes / share,
                ),
            )

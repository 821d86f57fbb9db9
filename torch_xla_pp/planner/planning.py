"""From a model's work and a cluster to a plan with its reasons."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch_xla_pp.planner.checks import faults_in
from torch_xla_pp.planner.comparisons import (
    alternative_of,
    other_plans,
    with_other_stages,
)
from torch_xla_pp.planner.devices import (
    Cluster,
    DeviceSpec,
    RankDevices,
    link_between_ranks,
)
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.given_stages import names_in_file, stages_of_works
from torch_xla_pp.planner.joined_works import joined_evaluator, with_all_works
from torch_xla_pp.planner.measured_costs import MeasuredCosts
from torch_xla_pp.planner.parameter_rules import HasRules, ParameterRules
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.plan_parts import plan_of
from torch_xla_pp.planner.rank_strategies import devices_of_ranks
from torch_xla_pp.planner.remedies import nothing_fits
from torch_xla_pp.planner.search import best_of, search
from torch_xla_pp.planner.settings import PlannerName, Request
from torch_xla_pp.planner.strategies import PRESETS, Strategy
from torch_xla_pp.planner.work_costs import OPTIMIZERS, WorkTable
from torch_xla_pp.simulate import Link, Network
from torch_xla_pp.work import WorkGraph

_BASELINES: tuple[PlannerName, ...] = ("spp", "pipedream", "graphpipe")


def make_plan(
    work: WorkGraph | str | Path,
    *,
    rows: int,
    ranks: int | None = None,
    devices_per_rank: int | Sequence[int] | None = None,
    devices: int | None = None,
    device: DeviceSpec | str | Sequence[DeviceSpec | str] = "cpu",
    memory_bytes: int | None = None,
    reserve: float = 0.08,
    network: Network | None = None,
    replica_link: Link | None = None,
    optimizer: str | float = "adamw",
    replicas: Sequence[int] | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    stages_per_rank: Sequence[int] = (2,),
    sharding: Sequence[str] = PRESETS,
    meshes: Sequence[tuple[int, int]] | None = None,
    rank_sharding: Sequence[str] | None = None,
    remat: Sequence[str] = ("none", "full"),
    stages: Sequence[Sequence[str]] | str | Path | None = None,
    planner: PlannerName = "full",
    has_own_inputs: bool = False,
    compare: bool = False,
    costs: MeasuredCosts | str | Path | None = None,
    rules: HasRules | str | Path | None = None,
) -> PipelinePlan:
    """Plan how to train a model: stages, ranks, sharding, microbatches and order.

    Returns the plan with the shortest predicted step that fits the devices' memory.
    Every choice that is not given is the planner's. Equal arguments give equal plans.

    Args:
        work: The model's work, or a file that `WorkGraph.to_json` wrote.
        rows: Rows of a step, those of all replicas.
        ranks: Number of ranks, those of all replicas.
        devices_per_rank: Devices of each rank, one number for all or one for each; 1
            if only ranks are given. If ranks differ, here or in `device`, each replica
            has the same sequence of them.
        devices: Devices in all, in place of ranks times devices per rank.
        device: A known device's name, a file with its figures, or the figures; one
            for all ranks or one for each.
        memory_bytes: Memory of a device, None for all that it has.
        reserve: Share of it that is left free.
        network: Links between ranks; None for the link between devices of a rank.
        replica_link: The link from a rank to that of the next replica, if it differs:
            replicas may be on different hosts or slices, and a pipeline within one.
        optimizer: "sgd", "momentum" or "adamw", or bytes of state for a parameter's
            byte.
        replicas: Numbers of pipelines to try.
        microbatches: Numbers of microbatches to try.
        schedules: Orders of actions to try: 1f1b, zb1p, dag, gpipe, interleaved, zbv,
            and list, an order that is made for the plan and written out in it.
        stages_per_rank: Numbers of stages on a rank to try for interleaved and list.
        sharding: Presets to try inside a rank: dp, fsdp, tp.
        meshes: Sizes of the axes data and model to try.
        rank_sharding: How the devices of each rank share its work, if that is given:
            the sizes of data and model, after fsdp: or dp: if data is above 1, such as
            1x1 and fsdp:2x1. Then `sharding` and `meshes` do not count.
        remat: What stages may choose, none or full.
        stages: Stages that are given: the names of operations, works or modules of
            each, or a file with such lists or a plan. An operation that no stage names
            goes to the last one that makes a value it uses.
        planner: "full", or one to compare with: spp, pipedream or graphpipe. Plans of
            the first two predict steps in which each stage waits for the one before; as
            they run, it waits for the values that it uses.
        has_own_inputs: Whether stages take the model's inputs on their own rank, and
            not from the first stage.
        compare: Whether to run the other planners, too.
        costs: Measured times of the works, or estimates of `compile_work`, or a file
            with either; None for rooflines of the device's figures.
        rules: `AxisRules` with the model's patterns, or a file of `AxisRules.to_json`,
            by which splits and exchanges are predicted; the plan keeps them. None to
            judge by the shapes of parameters.

    Raises:
        ValueError: An argument is at fault, or nothing fits; the text says what to
            change.
    """
    graph = work if isinstance(work, WorkGraph) else WorkGraph.from_json(Path(work))
    kinds = [device] if isinstance(device, str | DeviceSpec) else [*device]
    measured = _measured(costs)
    found = [DeviceSpec.named(k) if isinstance(k, str) else k for k in kinds]
    found = _as_measured(found, measured)
    given = devices_per_rank
    if given is None and devices is None:
        given = 1
    counts = [given] if isinstance(given, int) else [*(given or ())]
    strategies = tuple(map(Strategy.from_text, rank_sharding or ()))
    of_ranks = devices_of_ranks(ranks, found, counts or [1], strategies)
    are_counts_equal = len({*counts}) == 1
    total = _total(ranks, counts, devices, of_ranks)
    request = Request(
        rows=rows,
        num_ranks=ranks,
        devices_per_rank=counts[0] if are_counts_equal else None,
        counts=() if are_counts_equal else tuple(counts),
        strategies=strategies,
        replicas=None if replicas is None else tuple(replicas),
        microbatches=None if microbatches is None else tuple(microbatches),
        stages_per_rank=tuple(stages_per_rank),
        presets=tuple(sharding),
        meshes=None if meshes is None else tuple(meshes),
        remat=tuple(remat),
        planner=planner,
        stages=_given(stages, graph),
        **({} if schedules is None else {"schedules": tuple(schedules)}),
    )
    if of_ranks and (planner != "full" or compare):
        raise ValueError(
            "plan: expected planner full and no comparison with others for ranks that "
            f"differ, got {'a comparison' if planner == 'full' else planner}. Leave it "
            "out, or plan for equal ranks."
        )
    cluster = Cluster(
        device=found[0],
        num_devices=total,
        memory_bytes=memory_bytes,
        reserve=reserve,
        network=network or link_between_ranks(*found),
        replica_link=replica_link,
        ranks=of_ranks,
    )
    evaluator = Evaluator(
        table=WorkTable(graph, measured, _rules(rules, graph)),
        cluster=cluster,
        optimizer_bytes=optimizer_ratio(optimizer),
        has_own_inputs=has_own_inputs,
    )
    return planned(request, _of(planner, evaluator), compare=compare)


def planned(
    request: Request, evaluator: Evaluator, *, compare: bool = False
) -> PipelinePlan:
    """Search for the best plan, and for those in which one choice differs.

    Args:
        request: The request.
        evaluator: Evaluates cuts.
        compare: Whether to run the other planners, too.

    Raises:
        ValueError: Nothing fits, or no setting is possible.
    """
    whole = evaluator
    evaluator = joined_evaluator(whole) if request.stages is None else whole
    result = search(request, evaluator)
    if not result.best or not best_of(result).fits:
        raise ValueError(nothing_fits(request, evaluator, result))
    while True:
        best = best_of(result)
        others = [*other_plans(request, evaluator, best)]
        better = [e for _, e, _ in others if e.sort_key < best.sort_key]
        if not better:
            break
        # Moves begin from a few cuts only; a comparison may find a better one.
        for evaluation in better:
            result.add(evaluation)
    if request.stages is not None:
        free = with_other_stages(request, evaluator, best)
        others += [free] if free else []
    alternatives = tuple(alternative_of(*other) for other in others)
    baselines: dict[str, float] = {}
    for name in _BASELINES if compare else ():
        other = joined_evaluator(_of(name, whole))
        found = search(replace(request, planner=name), other)
        if found.best and best_of(found).fits:
            baselines[name] = best_of(found).step_s
    best = with_all_works(best, evaluator)
    plan = plan_of(request, whole, best, result, alternatives, baselines)
    if faults := faults_in(plan, whole.table.graph):
        text = "\n".join(faults)
        raise RuntimeError(f"make_plan: expected a sound plan, got:\n{text}")
    return plan


def _measured(costs: MeasuredCosts | str | Path | None) -> MeasuredCosts | None:
    if costs is None or isinstance(costs, MeasuredCosts):
        return costs
    return MeasuredCosts.from_json(costs)


def _rules(
    given: HasRules | str | Path | None, graph: WorkGraph
) -> ParameterRules | None:
    if given is None:
        return None
    found = ParameterRules.of(given)
    parameters = (p for work in graph.works for p in work.parameters)
    faults = [*found.model_faults({p.name: p.shape for p in parameters})]
    if faults:
        raise ValueError("\n".join(f"plan, rules: {fault}" for fault in faults))
    return found


def _of(planner: PlannerName, evaluator: Evaluator) -> Evaluator:
    """Return the evaluator of a planner's cuts: two planners know only chains."""
    return replace(evaluator, has_chain=planner in ("spp", "pipedream"))


def _given(
    stages: Sequence[Sequence[str]] | str | Path | None, graph: WorkGraph
) -> tuple[int, ...] | None:
    if stages is None:
        return None
    names = names_in_file(stages) if isinstance(stages, str | Path) else stages
    return stages_of_works(names, graph)


def _as_measured(
    devices: list[DeviceSpec], measured: MeasuredCosts | None
) -> list[DeviceSpec]:
    """Return devices with the time to start a program that was measured.

    Raises:
        ValueError: Costs are of another device, or devices differ.
    """
    if measured is None:
        return devices
    names = [*dict.fromkeys(device.name for device in devices)]
    if len(names) > 1:
        raise ValueError(
            f"plan: expected costs for {', '.join(names)}, got some that are "
            f"{measured}: one kind of device. Leave the costs out, or plan for that "
            "device."
        )
    # A compiler does not know the time to start a program.
    if not measured.compiler:
        return [replace(device, action_s=measured.action_s) for device in devices]
    if measured.device != names[0]:
        raise ValueError(
            f"plan: expected costs for {names[0]}, got some that are {measured}. "
            "Compile them again, or plan for that device."
        )
    return devices


def _total(
    ranks: int | None,
    counts: Sequence[int],
    devices: int | None,
    of_ranks: Sequence[RankDevices],
) -> int:
    """Return the number of devices in all."""
    if of_ranks:
        total = sum(rank.count for rank in of_ranks)
        if devices not in (None, total):
            raise ValueError(
                f"plan, devices: expected {total}, as ranks differ and have "
                f"{', '.join(map(str, of_ranks))}, got {devices}. Leave it out."
            )
        return total
    if devices is not None:
        return devices
    if ranks is None or not counts:
        raise ValueError(
            "plan: expected ranks (and devices per rank), or devices, got neither. "
            "Give e.g. ranks=8, devices_per_rank=4, or devices=32."
        )
    return ranks * counts[0]


def optimizer_ratio(optimizer: str | float) -> float:
    """Return bytes of an optimizer's state for each byte of parameters.

    Args:
        optimizer: "sgd", "momentum" or "adamw", or that ratio itself.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    try:
        found = float(optimizer)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(
            f"optimizer: expected one of {', '.join(OPTIMIZERS)}, or bytes of state "
            f"for a parameter's byte, got {optimizer!r}. AdamW has 2."
        )
    return found

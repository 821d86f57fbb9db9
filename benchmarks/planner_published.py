"""What published systems report, beside what the planner predicts for the same.

Nothing here runs on a device: every figure of ours is a prediction, from a device's
figures and the formulas of `planner_models`. `ratio` is ours over the published one.

Sources, looked up:

* GraphPipe: Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN
  Training with Graph Pipeline Parallelism", ASPLOS 2025 (arXiv 2406.17145): section 2
  with figure 2 (depth and microbatches in flight), 6 with figure 5 (samples in flight),
  7.3 with figure 7 ("up to 2x at 16 branches"), 7.4 with figure 9 (1.12 to 1.40 by
  stages in parallel alone, 1.25 to 1.61 in all, at 32 GPUs), 7.5 (case study), A.3
  (sequential models are as fast as with others). Sizes of batches and the numbers of
  its tables and plots are pictures there, and were not looked up: rows of a step are
  ours. In 7.5 the concatenation is in the last stage of one branch: as the other branch
  goes into that stage, ours has one stage more on its longest path than the paper says.
* Megatron-LM: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
  Clusters Using Megatron-LM", SC 2021 (arXiv 2104.04473): table 1, equation 3, and
  section 5 (A100 of 80 GB, 312 teraFLOP/s, eight links of 200 Gbit/s a node,
  interleaved schedule, activations computed again, vocabulary 51,200, length 2,048).
  What it does not state is ours: rows of a microbatch (1, 2, 4 or 8), 16 bytes
  for each parameter, and the share of the peak that products reach: one number for all
  ten models, fitted to them. Bandwidth of memory and of NVLink (600 GB/s both ways):
  NVIDIA's data sheet of the A100.

Run: python benchmarks/planner_published.py [graphpipe|megatron]
Columns: source, case, published, ours, ratio.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from planner_models import (
    candle,
    case_study,
    dlrm,
    gpt,
    mmt,
    sequential,
    three_branches,
)
from planner_search import SETTINGS, evaluator_of

from torch_xla_pp.planner.devices import Cluster, DeviceSpec
from torch_xla_pp.planner.evaluation import Evaluation, Evaluator
from torch_xla_pp.planner.search import best_of, search
from torch_xla_pp.planner.settings import PlannerName, Request
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.schedule import peak_live
from torch_xla_pp.simulate import Link, Network
from torch_xla_pp.work import WorkGraph

Row = tuple[str, str, str, str, str]

A100 = DeviceSpec(
    name="a100",
    flops_per_s=312e12,
    efficiency=0.56,
    bytes_per_s=2039e9,
    memory_bytes=80 * 10**9,
    action_s=1e-4,
    link_bytes_per_s=300e9,
    link_latency_s=5e-6,
    dtype="bfloat16",
    source="see this file",
)
# One link of 200 Gbit/s for each of a node's eight devices.
NODE_LINK_BYTES_PER_S = 25e9
# 16 bytes for a parameter of 2: itself, its gradient, and 12 of mixed-precision Adam.
OPTIMIZER_BYTES = 6.0
VOCAB, LENGTH = 51_200, 2048
# Billions of parameters, hidden size, layers, tensor and pipeline sizes, GPUs, batch,
# teraFLOP/s per GPU.
TABLE_1 = (
    (1.7, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 25600, 128, 8, 64, 3072, 3072, 163),
)


def best_plan(
    graph: WorkGraph, devices: int, setting: str, planner: PlannerName, request: Request
) -> Evaluation:
    """Return the best plan of a planner; two of them run stages as a chain."""
    evaluator = evaluator_of(graph, devices, setting)
    if planner in ("spp", "pipedream"):
        evaluator = replace(evaluator, has_chain=True)
    return best_of(search(replace(request, planner=planner), evaluator))


def depth_of(found: Evaluation) -> int:
    """Return the number of stages on the longest path."""
    depths = [1] * found.cut.num_stages
    for producer, consumer in sorted(found.costs.edges, reverse=True):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    return max(depths)


def live_of(found: Evaluation) -> int:
    """Return the most microbatches that a stage has in flight."""
    live = peak_live(found.order.schedule)
    return max(live[stage] for stage in range(found.cut.num_stages))


def depth_rows(
    name: str, graph: WorkGraph, ranks: int, published: dict[PlannerName, int]
) -> Iterator[Row]:
    """Yield depths, and microbatches in flight, of one stage on each device."""
    asked = Request(
        rows=8 * ranks,
        num_ranks=ranks,
        devices_per_rank=1,
        replicas=(1,),
        microbatches=(4 * ranks,),
        schedules=("dag", "1f1b"),
    )
    for planner, expected in published.items():
        schedule = "1f1b" if planner == "spp" else "dag"
        request = replace(asked, schedules=(schedule,))
        found = best_plan(graph, ranks, "40g25u", planner, request)
        for what, ours in (("depth", depth_of(found)), ("in flight", live_of(found))):
            yield row("GraphPipe", f"{name}, {what} by {planner}", expected, ours)


def graphpipe_rows() -> Iterator[Row]:
    """Yield the figures of GraphPipe's paper."""
    yield from depth_rows("figure 2", three_branches(), 4, {"spp": 4, "graphpipe": 2})
    yield from depth_rows("7.5", case_study(), 8, {"spp": 8, "graphpipe": 4})
    chain = Request(
        rows=64,
        num_ranks=3,
        devices_per_rank=1,
        replicas=(1,),
        microbatches=(16,),
        schedules=("1f1b",),
    )
    found = best_plan(sequential(3), 3, "40g25u", "full", chain)
    samples = live_of(found) * found.cut.setting.rows
    yield row("GraphPipe", "figure 5a, samples in flight of stage 1", 12, samples)
    yield "GraphPipe", "figure 5b, microbatches by stage", "10", "not planned", ""
    for devices in (4, 8, 16, 32):
        for setting in SETTINGS:
            ours = gain_of(sequential(), devices, setting, 8, has_same_rows=False)
            case = f"A.3, sequential, {devices} devices, {setting}"
            yield row("GraphPipe", case, 1.0, ours)
    models: dict[str, tuple[Callable[[], WorkGraph], int]] = {
        "mmt4": (lambda: mmt(4), 8),
        "dlrm": (dlrm, 128),
        "candle7": (candle, 128),
    }
    for name, (make, rows) in models.items():
        for setting in SETTINGS:
            for same, low, high in ((True, 1.12, 1.40), (False, 1.25, 1.61)):
                ours = gain_of(make(), 32, setting, rows, has_same_rows=same)
                what = "same microbatches" if same else "total"
                yield (
                    "GraphPipe",
                    f"figure 9, {name}, {what}, {setting}",
                    f"{low} to {high}",
                    f"{ours:.3f}",
                    "within" if low <= ours <= high else "outside",
                )
    for devices in (4, 8, 16):
        for branches in (2, 4, 8, 16):
            graph = candle(branches)
            for setting in SETTINGS if devices <= len(graph.works) else ():
                ours = gain_of(graph, devices, setting, 128, has_same_rows=False)
                case = f"figure 7, {branches} branches, {devices} devices, {setting}"
                if branches == 16:
                    yield row("GraphPipe", f"{case} (up to)", 2.0, ours)
                else:
                    yield "GraphPipe", case, "not looked up", f"{ours:.3f}", ""


def gain_of(
    graph: WorkGraph, devices: int, setting: str, rows: int, *, has_same_rows: bool
) -> float:
    """Return how much longer a step of a chain of stages takes than ours.

    Args:
        graph: The model.
        devices: Number of devices.
        setting: Links and the cost of an action.
        rows: Rows of a step for each device.
        has_same_rows: Whether ours must have the microbatches of the chain.
    """
    request = Request(
        rows=rows * devices,
        devices_per_rank=1,
        num_ranks=devices,
        replicas=(1,),
        schedules=("1f1b", "dag"),
    )
    chain = best_plan(graph, devices, setting, "spp", request)
    if has_same_rows:
        count = chain.cut.setting.num_microbatches
        request = replace(request, microbatches=(count,))
    ours = best_plan(graph, devices, setting, "full", request)
    return chain.step_s / ours.step_s


def megatron_rows() -> Iterator[Row]:
    """Yield throughput of table 1, and the published sizes beside the best ones."""
    for line in TABLE_1:
        billions, width, layers, tensor, ranks, devices, batch, published = line
        graph = gpt(layers, width, LENGTH, VOCAB)
        case = f"table 1, {billions:g} B"
        theirs = megatron_plan(graph, devices, batch, tensor, ranks)
        if theirs is None or not theirs.fits:
            yield "Megatron-LM", f"{case}, teraFLOP/s", str(published), "no room", ""
            continue
        speed = round(speed_of(theirs, line), 1)
        yield row("Megatron-LM", f"{case}, teraFLOP/s", published, speed)
        plans = [
            found
            for size in (1, 2, 4, 8)
            if (found := megatron_plan(graph, devices, batch, size, None))
            and found.fits
        ]
        best = min(plans, key=lambda found: found.step_s)
        setting = best.cut.setting
        ours = f"t {setting.strategy.model} p {setting.num_ranks}"
        ratio = f"step {theirs.step_s / best.step_s:.3f} of ours"
        yield "Megatron-LM", f"{case}, sizes", f"t {tensor} p {ranks}", ours, ratio


def speed_of(
    found: Evaluation, line: tuple[float, int, int, int, int, int, int, int]
) -> float:
    """Return teraFLOP/s of a device by equation 3 of the paper."""
    _, width, layers, _, _, devices, batch, _ = line
    attention, head = LENGTH / (6 * width), VOCAB / (16 * layers * width)
    flops = 96.0 * batch * LENGTH * layers * width**2 * (1 + attention + head)
    return flops / devices / 1e12 / found.step_s


def megatron_plan(
    graph: WorkGraph, devices: int, batch: int, tensor: int, ranks: int | None
) -> Evaluation | None:
    """Return the best plan with a tensor size, and a pipeline's size if it is given."""
    link = Link(latency_s=1e-5, bytes_per_s=tensor * NODE_LINK_BYTES_PER_S)
    cluster = Cluster(
        device=A100, num_devices=devices, network=Network(default=link), reserve=0.05
    )
    evaluator = Evaluator(
        table=WorkTable(graph), cluster=cluster, optimizer_bytes=OPTIMIZER_BYTES
    )
    world = devices // tensor
    pipelines = [n for n in range(1, world + 1) if world % n == 0 and batch % n == 0]
    if ranks is not None:
        pipelines = [world // ranks]
    counts = {batch // n // rows for n in pipelines for rows in (1, 2, 4, 8)} - {0}
    request = Request(
        rows=batch,
        devices_per_rank=tensor,
        num_ranks=world,
        replicas=tuple(pipelines),
        microbatches=tuple(sorted(counts)),
        schedules=("1f1b", "interleaved"),
        stages_per_rank=(2, 3, 4),
        presets=("tp",) if tensor > 1 else ("dp",),
        meshes=((1, tensor),),
        remat=("full",),
    )
    try:
        found = search(request, evaluator)
    except ValueError:
        return None
    return best_of(found) if found.best else None


def row(source: str, case: str, published: float, ours: float) -> Row:
    """Return a line with the ratio of two numbers."""
    return source, case, f"{published:g}", f"{ours:.4g}", f"{ours / published:.3f}"


def main() -> None:
    """Print the rows of the sources that are named, or of all."""
    parts = {"graphpipe": graphpipe_rows, "megatron": megatron_rows}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["source", "case", "published", "ours", "ratio"])
    for name in sys.argv[1:] or parts:
        for found in parts[name]():
            writer.writerow(found)
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""How far the planner's cuts are from the best of all: random graphs, brute force.

Every partition of the works into as many stages as ranks is evaluated, as long as the
stages do not use each other in a circle; then the planners search for one. A gap is the
step of a planner's cut over the best step, less one. Where memory binds, a device has
so much that some partitions fit and others do not.

Run: python benchmarks/planner_exact.py --graphs 200
Columns: ranks, ops, bound, graphs, planner, optimal_share, mean_gap, p90_gap,
worst_gap, infeasible_agree.
"""

import argparse
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from planner_models import random_graph

from torch_xla_pp.planner.devices import DEVICES, Cluster
from torch_xla_pp.planner.evaluation import Cut, Evaluation, Evaluator, renumbered
from torch_xla_pp.planner.search import best_of, search
from torch_xla_pp.planner.settings import PlannerName, Request, settings_for
from torch_xla_pp.planner.work_costs import WorkTable

PLANNERS: tuple[PlannerName, ...] = ("full", "graphpipe", "spp")
HEADER = (
    "ranks,ops,bound,graphs,planner,optimal_share,mean_gap,p90_gap,worst_gap,"
    "infeasible_agree"
)


def partitions(count: int, num_stages: int) -> Iterator[list[int]]:
    """Yield the stage of each work for all partitions into so many stages."""

    def grown(labels: list[int], used: int) -> Iterator[list[int]]:
        left = count - len(labels)
        if left == 0:
            yield labels
            return
        for stage in range(min(used + 1, num_stages)):
            more = max(used, stage + 1)
            if num_stages - more <= left - 1:
                yield from grown([*labels, stage], more)

    yield from grown([], 0)


def brute_force(evaluator: Evaluator, request: Request) -> list[Evaluation]:
    """Evaluate every partition with every setting."""
    found = []
    edges = evaluator.table.graph.edges
    for setting in settings_for(request, evaluator):
        for labels in partitions(evaluator.table.num_works, setting.num_stages):
            stages = renumbered(labels, edges)
            if stages is not None:
                remat = ("none",) * setting.num_stages
                cut = Cut(setting=setting, stages=stages, remat=remat)
                found.append(evaluator.evaluate(cut))
    return found


def case(seed: int, is_bound: bool) -> tuple[int, int, dict[str, float | None]]:
    """Return ranks, works and the gap of each planner, None if only one side fits."""
    draw = random.Random(seed)
    num_ranks, num_works = draw.randint(2, 4), draw.randint(5, 9)
    graph = random_graph(draw, num_works)
    count = draw.choice([2, 4, 8])
    cluster = Cluster(device=DEVICES["cpu"], num_devices=num_ranks, reserve=0.0)
    table = WorkTable(graph)
    evaluator = Evaluator(table=table, cluster=cluster, has_own_inputs=True)
    request = Request(
        rows=8,
        num_ranks=num_ranks,
        devices_per_rank=1,
        replicas=(1,),
        microbatches=(count,),
        schedules=("dag",),
        remat=("none",),
    )
    everything = brute_force(evaluator, request)
    if is_bound:
        peaks = sorted(found.peak_bytes for found in everything)
        memory = peaks[int(draw.choice([0.0, 0.05, 0.3]) * len(peaks))]
        most = max(1, memory - draw.choice([0, 1]))
        cluster = replace(cluster, memory_bytes=most)
        evaluator = Evaluator(table=table, cluster=cluster, has_own_inputs=True)
    fitting = [e for e in everything if e.peak_bytes <= cluster.capacity_bytes]
    gaps: dict[str, float | None] = {}
    for planner in PLANNERS:
        asked = Request(
            **{
                **{f: getattr(request, f) for f in request.__dataclass_fields__},
                "planner": planner,
            }
        )
        result = search(asked, evaluator)
        fits = bool(result.best) and best_of(result).fits
        if fits != bool(fitting):
            gaps[planner] = None
        elif fits:
            least = min(e.step_s for e in fitting)
            gaps[planner] = best_of(result).step_s / least - 1
        else:
            gaps[planner] = 0.0
    return num_ranks, num_works, gaps


def main() -> None:
    """Print a line for each number of ranks and planner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    count = parser.parse_args()
    gaps: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    disagreed: dict[tuple[str, str, str], int] = defaultdict(int)
    for seed in range(count.first, count.first + count.graphs):
        bound = "memory" if seed % 2 else "none"
        ranks, _, found = case(seed, seed % 2 == 1)
        for planner, gap in found.items():
            for group in (str(ranks), "all"):
                key = group, bound, planner
                if gap is None:
                    disagreed[key] += 1
                else:
                    gaps[key].append(gap)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEADER.split(","))
    for (ranks, bound, planner), values in sorted(gaps.items()):
        values.sort()
        optimal = sum(gap < 1e-6 for gap in values) / len(values)
        total = len(values) + disagreed[ranks, bound, planner]
        writer.writerow(
            [
                ranks,
                "5-9",
                bound,
                total,
                planner,
                f"{optimal:.3f}",
                f"{sum(values) / len(values):.4f}",
                f"{values[int(0.9 * len(values))]:.4f}",
                f"{values[-1]:.4f}",
                f"{len(values) / total:.3f}",
            ]
        )


if __name__ == "__main__":
    main()

"""How long the planner searches, and what its plans gain on those of others.

Every search runs in this process, on one core; its time is processor time, the median
of some runs. `command_s` is that of `python -m torch_xla_pp plan` on a file, with the
start of Python and the comparisons that a plan comes with. The steps are predictions,
from a device file's figures: nothing here is measured on a device. The other planners
have the same settings to choose from; spp and pipedream run their stages as a chain.

Run: python benchmarks/planner_search.py --devices 4,8,16,32
Columns: model, setting, devices, works, search_s, command_s, settings, pruned,
evaluated, step_s, depth, live, and for spp, pipedream and graphpipe the step over ours
and the search's seconds.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from planner_models import candle, dlrm, gpt, mmt, uneven_gpt

from torch_xla_pp.planner.devices import DEVICES, Cluster, link_between_ranks
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.search import SearchResult, best_of, search
from torch_xla_pp.planner.settings import PlannerName, Request
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.work import WorkGraph

OTHERS: tuple[PlannerName, ...] = ("spp", "pipedream", "graphpipe")
# Name → graph and rows of a step for each device.
MODELS: dict[str, tuple[Callable[[], WorkGraph], int]] = {
    "mmt2": (lambda: mmt(2), 8),
    "mmt4": (lambda: mmt(4), 8),
    "dlrm": (dlrm, 128),
    "candle2": (lambda: candle(2), 128),
    "candle7": (lambda: candle(7), 128),
    "candle16": (lambda: candle(16), 128),
    "gpt": (lambda: gpt(30), 8),
    "uneven": (uneven_gpt, 8),
}
DEEP: dict[str, tuple[Callable[[], WorkGraph], int]] = {
    "gpt200": (lambda: gpt(200, 8192, 2048), 2),
}
# Links in bytes/s and seconds of starting a program, as in the table of GraphPipe's
# simulations: fast and slow links, small and large costs of an action.
SETTINGS = {
    "40g25u": (40e9, 25e-6),
    "10g25u": (10e9, 25e-6),
    "40g60u": (40e9, 60e-6),
    "10g60u": (10e9, 60e-6),
}


def evaluator_of(graph: WorkGraph, devices: int, setting: str) -> Evaluator:
    """Return what evaluates cuts of a model on so many devices."""
    link, action_s = SETTINGS[setting]
    device = replace(DEVICES["v5e"], action_s=action_s, link_bytes_per_s=link)
    if graph.num_ops > 300:
        device = replace(DEVICES["v5p"], action_s=action_s, link_bytes_per_s=link)
    network = link_between_ranks(device)
    cluster = Cluster(device=device, num_devices=devices, network=network)
    return Evaluator(table=WorkTable(graph), cluster=cluster, has_own_inputs=True)


def timed(
    graph: WorkGraph,
    request: Request,
    devices: int,
    setting: str,
    repeats: int,
    has_chain: bool,
) -> tuple[float, SearchResult]:
    """Return the median seconds of a search, and what it found."""
    seconds = []
    for _ in range(repeats):
        fresh = WorkGraph.from_json(graph.to_json())
        evaluator = replace(evaluator_of(fresh, devices, setting), has_chain=has_chain)
        began = time.process_time()
        result = search(request, evaluator)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds), result


def command_seconds(graph: WorkGraph, rows: int, devices: int) -> float:
    """Return the processor time of the command on the model's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        graph.to_json(path)
        device = "v5p" if graph.num_ops > 300 else "v5e"
        options = ["--rows", str(rows), "--devices", str(devices), "--device", device]
        command = [sys.executable, "-m", "torch_xla_pp", "plan", str(path), *options]
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system


def line(
    name: str, setting: str, devices: int, repeats: int, ranks: bool
) -> list[object]:
    """Return the figures of one model on so many devices."""
    make, per_device = {**MODELS, **DEEP}[name]
    graph = make()
    rows = per_device * devices
    request = Request(rows=rows)
    if ranks:
        request = replace(request, num_ranks=devices, devices_per_rank=1, replicas=(1,))
    search_s, result = timed(graph, request, devices, setting, repeats, False)
    best = best_of(result)
    order = best.order
    live = max(
        int((row.live + row.waiting - row.both).sum(1).max()) for row in order.live_rows
    )
    depths = [1] * best.cut.num_stages
    for producer, consumer in reversed(best.costs.edges):
        depths[producer] = max(depths[producer], 1 + depths[consumer])
    found: list[object] = [
        name,
        setting,
        devices,
        graph.num_ops,
        f"{search_s:.2f}",
        f"{command_seconds(graph, rows, devices):.2f}" if not ranks else "",
        result.num_settings,
        result.num_pruned,
        result.num_evaluated,
        f"{best.step_s:.5f}" if best.fits else "none",
        max(depths),
        live,
    ]
    for planner in OTHERS:
        asked = replace(request, planner=planner)
        is_chain = planner != "graphpipe"
        other_s, other = timed(graph, asked, devices, setting, 1, is_chain)
        ratio = "none"
        if other.best and best_of(other).fits:
            ratio = f"{best_of(other).step_s / best.step_s:.3f}"
        found += [ratio, f"{other_s:.2f}"]
    return found


def main() -> None:
    """Print a line for each model, setting and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="4,8,16,32")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--one-pipeline",
        action="store_true",
        help="as many ranks as devices and no replicas, as GraphPipe plans",
    )
    options = parser.parse_args()
    writer = csv.writer(sys.stdout, lineterminator="\n")
    header = "model,setting,devices,works,search_s,command_s,settings,pruned,evaluated"
    others = [f"{planner}_{what}" for planner in OTHERS for what in ("ratio", "s")]
    writer.writerow([*header.split(","), "step_s", "depth", "live", *others])
    for name in options.models.split(","):
        for setting in options.settings.split(","):
            for devices in map(int, options.devices.split(",")):
                make, _ = {**MODELS, **DEEP}[name]
                if options.one_pipeline and devices > make().num_ops:
                    continue
                writer.writerow(
                    line(name, setting, devices, options.repeats, options.one_pipeline)
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()

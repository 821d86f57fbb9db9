"""The slowest stage of a plan, beside PipeDream's on its own profiles.

    git clone https://github.com/msr-fiddle/pipedream
    pip install graphviz numpy
    python benchmarks/planner_profiles.py pipedream --ranks 4 8

Nothing runs on a device: both sides cut the same graphs, with the times of operators
that Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019, measured on a GPU. The data is theirs and stays in their checkout, which runs
its own optimizer in a process of its own, with one stage for each rank
(`--straight_pipeline`); with these options neither side counts messages or memory.
Ours plans 1F1B with so many microbatches that the slowest stage decides, and may have
stages side by side.

Columns, as the JSON names them:

model: Folder of the profile.
ranks: Number of ranks, each with a stage.
operators: Number of operators, without inputs.
theirs_s, ours_s: Time of the slowest stage: forward and backward of a microbatch.
ratio: ours_s / theirs_s; at most 1 is as good.
theirs_search_s, ours_search_s: Time to find it, with the start of Python for theirs.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner_models import WorkBuilder

from torch_xla_pp.planner import (
    DeviceSpec,
    MeasuredCosts,
    RowSeconds,
    WorkSeconds,
    make_plan,
)
from torch_xla_pp.simulate import Network
from torch_xla_pp.work import WorkGraph

MICROBATCHES = 256
_NODE = re.compile(
    r"(?P<name>node\d+) -- (?P<text>.*) -- forward_compute_time=(?P<forward>[\d.]+), "
    r"backward_compute_time=(?P<backward>[\d.]+),"
)
_EDGE = re.compile(r"\t(?P<producer>node\d+) -- (?P<consumer>node\d+)")
_FOUND = re.compile(r"Time per stage in pipeline: (?P<seconds>[\d.e-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator of a profile.

    Args:
        name: Its name.
        inputs: Names of the operators whose values it uses.
        forward_s: Time of its forward.
        backward_s: Time of its backward.
    """

    name: str
    inputs: tuple[str, ...]
    forward_s: float
    backward_s: float


def operators_of(text: str) -> list[Operator]:
    """Return the operators of a profile in the order of data flow.

    Inputs, and parts of values that nothing uses, are left out, as PipeDream does.
    """
    nodes = {m["name"]: m for m in map(_NODE.match, text.splitlines()) if m}
    edges = [m for m in map(_EDGE.match, text.splitlines()) if m]
    used = {edge["producer"] for edge in edges}
    kept = {
        name
        for name, node in nodes.items()
        if not node["text"].startswith("Input")
        and (name in used or not node["text"].startswith("__getitem__"))
    }
    inputs: dict[str, list[str]] = {name: [] for name in nodes if name in kept}
    for edge in edges:
        if edge["producer"] in kept and edge["consumer"] in kept:
            inputs[edge["consumer"]].append(edge["producer"])
    found: dict[str, Operator] = {}
    while len(found) < len(inputs):
        for name, own in inputs.items():
            if name not in found and all(producer in found for producer in own):
                found[name] = Operator(
                    name=name,
                    inputs=tuple(own),
                    forward_s=float(nodes[name]["forward"]) / 1e3,
                    backward_s=float(nodes[name]["backward"]) / 1e3,
                )
    return list(found.values())


def work_of(operators: list[Operator]) -> tuple[WorkGraph, MeasuredCosts]:
    """Return the operators as works of a row each, and their times."""
    builder = WorkBuilder()
    values: dict[str, str] = {}
    for number, one in enumerate(operators):
        inputs = [values[name] for name in one.inputs]
        inputs = inputs or [builder.given(f"{one.name}_in", 1)]
        # FLOPs only tell works apart here.
        values[one.name] = builder.add(one.name, inputs, 1, float(number))
    graph = builder.graph("PipeDream's profile")
    works = [
        WorkSeconds(
            digest=work.digest,
            name=work.name,
            forward=RowSeconds(seconds_per_row=0.0, seconds=one.forward_s),
            backward=RowSeconds(seconds_per_row=0.0, seconds=one.backward_s),
            backward_input=RowSeconds(seconds_per_row=0.0, seconds=one.backward_s),
            backward_weight=RowSeconds(seconds_per_row=0.0, seconds=0.0),
        )
        for work, one in zip(graph.works, operators, strict=True)
    ]
    device = DeviceSpec.named("cpu").name
    costs = MeasuredCosts(device=device, rows=(1,), action_s=0.0, works=tuple(works))
    return graph, costs


def ours(operators: list[Operator], ranks: int) -> float:
    """Return the time of the slowest stage of the planner's choice."""
    graph, costs = work_of(operators)
    plan = make_plan(
        graph,
        rows=MICROBATCHES,
        ranks=ranks,
        replicas=(1,),
        microbatches=(MICROBATCHES,),
        schedules=("1f1b", "dag"),
        remat=("none",),
        optimizer=0.0,
        network=Network(),
        costs=costs,
        has_own_inputs=True,
    )
    stages = plan.predicted.stages
    return max(stage.forward_s + stage.input_s + stage.weight_s for stage in stages)


def theirs(checkout: Path, profile: Path, ranks: int, timeout_s: float) -> float | None:
    """Return the same of PipeDream's optimizer, None if it does not end in time."""
    options = ["-f", str(profile), "-n", str(ranks), "--straight_pipeline"]
    command = [sys.executable, "optimizer_graph_hierarchical.py", *options]
    try:
        done = subprocess.run(
            command,
            cwd=checkout / "optimizer",
            check=True,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return None
    found = _FOUND.search(done.stdout)
    if found is None:
        raise RuntimeError(f"{profile}: expected a time per stage, got {done.stdout}")
    return float(found["seconds"])


def rows_of(
    checkout: Path, counts: list[int], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each profile and number of ranks."""
    for profile in sorted(checkout.resolve().glob("profiler/*/profiles/*/graph.txt")):
        operators = operators_of(profile.read_text())
        for ranks in counts:
            began = time.perf_counter()
            their_s = theirs(checkout.resolve(), profile, ranks, timeout_s)
            between = time.perf_counter()
            our_s = ours(operators, ranks)
            yield {
                "model": profile.parent.name,
                "ranks": ranks,
                "operators": len(operators),
                "theirs_s": their_s,
                "ours_s": our_s,
                "ratio": None if their_s is None else our_s / their_s,
                "theirs_search_s": between - began,
                "ours_search_s": time.perf_counter() - between,
            }


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    theirs = "none in time" if row["theirs_s"] is None else f"{row['theirs_s']:.5f} s"
    ratio = "" if row["ratio"] is None else f"  ratio {row['ratio']:.4f}"
    return (
        f"{row['model']:14} {row['ranks']:2} ranks {row['operators']:5} operators"
        f"  theirs {theirs} ({row['theirs_search_s']:.1f} s)"
        f"  ours {row['ours_s']:.5f} s ({row['ours_search_s']:.1f} s){ratio}"
    )


def main() -> None:
    """Compare what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for row in rows_of(options.checkout, options.ranks, options.timeout):
        print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()

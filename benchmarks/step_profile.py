"""Where the processors' time of a training step goes, here and in the peer.

    python benchmarks/step_profile.py
    python benchmarks/step_profile.py --schedules 1F1B ZBVZeroBubble --size large --json
    python benchmarks/step_profile.py --functions 20       the longest beside products

Needs `perf` and the right to sample own processes. The steps are those of
`step_time.py`: two ranks of one device, each on one core. Each side does some steps
while samples are taken of both ranks' threads. Columns, as the JSON names them:

step_s: Time of a step on the cores, both ranks together, the waiting left out.
products_s, loops_s, runtime_s, python_s, kernel_s, other_s: Its parts: what multiplies
    matrices; loops over values, of XLA's programs and of libraries; the runtimes of XLA
    and torch_xla, or of torch; the interpreter; the system; and what is left, such as
    copies and malloc.
bound (of ours): The ratio of ours to the peer's, if ours took no time but that of its
    products.
functions (with `--functions`): Those that take longest beside products, each with its
    part and its share of the step.
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import gpt
import sides
import torch.distributed as dist
from sides import NUM_RANKS, SCHEDULES, Side

STEPS = 8
WARM_UP_STEPS = 3
HERTZ = 997
PARTS = ("products", "loops", "runtime", "python", "kernel", "other")
SAMPLE = re.compile(
    r"\s*(?P<pid>\d+)\s+(?P<time>[\d.]+):\s+(?P<symbol>.*)\((?P<file>[^()]*)\)\s*$"
)


# Samples by part of the step and by function.
Counts: TypeAlias = Counter[tuple[str, str]]


class Window(NamedTuple):
    """When a rank did the steps of a side, by the monotonic clock."""

    pid: int
    side: str
    begin_s: float
    end_s: float


def sampled(
    schedule: str, microbatches: int, size_name: str, cores: Sequence[int]
) -> list[Window]:
    """Do steps of both sides; every rank calls, and gets the windows of all."""
    sides.join(cores)
    from torch_xla_pp import xla_compat

    size, rank = gpt.SIZES[size_name], dist.get_rank()
    indices, num_stages = (
        sides.stage_indices(schedule, rank),
        sides.num_stages_of(schedule),
    )
    make = sides.peer(dist.new_group(backend="gloo"))
    both = {
        "ours": sides.our_side(schedule, microbatches, size),
        "peer": Side(make, schedule, indices, num_stages, microbatches, size),
    }
    own = []
    for name, side in both.items():
        for count in (WARM_UP_STEPS, STEPS):
            dist.barrier()
            begin_s = time.monotonic()
            for _ in range(count):
                side.step()
            xla_compat.wait_device()
        own.append(Window(os.getpid(), name, begin_s, time.monotonic()))
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, own)
    return [window for windows in found for window in windows]


def part_of(symbol: str, file: str) -> str:
    """Return what a function belongs to."""
    name = Path(file).name
    if re.search("mkl|gemm|openblas|blas", symbol + name, re.IGNORECASE):
        return "products"
    if "kernel" in name or "vdso" in name:
        return "kernel"
    if name.startswith(("python", "libpython")):
        return "python"
    # Programs that XLA has compiled are in memory without a file.
    if name.startswith(("_native", "[unknown]", "//anon", "[JIT]", "anon", "perf-")):
        return "loops"
    if re.search("vectorized|parallel|loop|kernel|sleef", symbol, re.IGNORECASE):
        return "loops"
    if name.startswith(("_XLAC", "libtorch", "libc10", "libuc", "libgloo")):
        return "runtime"
    return "other"


def name_of(symbol: str) -> str:
    """Return a function's name without its address and its arguments."""
    name = symbol.split(maxsplit=1)[-1].replace("(anonymous namespace)::", "")
    return re.split("[<(]", name)[0].strip()


def samples(data: str) -> Iterator[tuple[int, float, str, str]]:
    """Yield process, time, part and function of each sample."""
    fields = ["-F", "pid,time,ip,sym,dso", "--ns"]
    text = subprocess.run(
        ["perf", "script", "-i", data, *fields],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    ).stdout
    for found in map(SAMPLE.match, text.splitlines()):
        if found:
            part = part_of(found["symbol"], found["file"])
            name = name_of(found["symbol"])
            yield int(found["pid"]), float(found["time"]), part, name


def counts_of(data: str, windows: Sequence[Window]) -> dict[str, Counts]:
    """Return for each side how many samples each part and function of a step has."""
    counts: dict[str, Counts] = {window.side: Counter() for window in windows}
    for pid, time_s, part, name in samples(data):
        for window in windows:
            if window.pid == pid and window.begin_s <= time_s <= window.end_s:
                counts[window.side][part, name] += 1
    return counts


def row_of(counts: Counts) -> dict[str, float]:
    """Return the seconds of a step and of its parts."""
    parts = Counter[str]()
    for (part, _), count in counts.items():
        parts[part] += count
    return {
        "step_s": parts.total() / HERTZ / STEPS,
        **{f"{part}_s": parts[part] / HERTZ / STEPS for part in PARTS},
    }


def longest(counts: Counts, most: int) -> list[tuple[str, str, float]]:
    """Return part, name and share of the functions that take longest but products."""
    others = ((key, n) for key, n in counts.most_common() if key[0] != "products")
    total = counts.total()
    return [(*key, count / total) for key, count in itertools.islice(others, most)]


def main() -> None:
    """Take samples of the schedules of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=gpt.SIZES, default="small")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["1F1B"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--functions", type=int, default=0, help="how many to name for each side"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import step_profile

    from torch_xla_pp.testing import Worlds

    cores = sorted(os.sched_getaffinity(0))
    for schedule in options.schedules:
        job = (schedule, options.microbatches, options.size, cores)
        with tempfile.TemporaryDirectory() as folder, Worlds() as worlds:
            data = f"{folder}/perf.data"
            command = ["perf", "record", "-q", "-a", "-k", "CLOCK_MONOTONIC"]
            recording = subprocess.Popen(
                [*command, "-e", "cpu-clock", "-F", str(HERTZ), "-o", data],
                stderr=subprocess.DEVNULL,
            )
            try:
                windows, _ = worlds.run(
                    step_profile.sampled, ranks=NUM_RANKS, args=job, timeout_s=900
                )
            finally:
                recording.send_signal(signal.SIGINT)
                recording.wait()
            counts = counts_of(data, windows)
        found = {side: row_of(own) for side, own in counts.items()}
        found["ours"]["bound"] = found["ours"]["products_s"] / found["peer"]["step_s"]
        for side, row in found.items():
            functions = longest(counts[side], options.functions)
            if options.json:
                named = {"functions": functions} if functions else {}
                print(json.dumps({"schedule": schedule, "side": side, **row, **named}))
                continue
            texts = [f"{name} {value:.3f}" for name, value in row.items()]
            print(f"{schedule:21} {side:5} {'  '.join(texts)}", flush=True)
            for part, name, share in functions:
                print(f"  {share:6.2%} {part:8} {name}", flush=True)


if __name__ == "__main__":
    main()

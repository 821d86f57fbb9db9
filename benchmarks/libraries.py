"""UCX and gloo as carriers of bytes between two processes of one host.

    python benchmarks/libraries.py          prints one table; --json one object a row

Each process has a core of its own and waits asleep. UCX is measured by its own
`ucx_perftest` (active messages, endpoints that notice a peer's death), gloo through
`torch.distributed`. "busy" rows share both cores with two processes that compute; the
CPU time is that of both ends together. "death" is the time from a SIGKILL until the
other side's error, for a stage's receive in either transport.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import libucx

UCX = Path(libucx.__file__).parent
TRIPS = 500
GLOO = """
import os, resource, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
os.sched_setaffinity(0, {int(os.environ["RANK"])})
size, count, one_way = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "bw"
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.zeros(size, dtype=torch.uint8)
def run(count):
    for _ in range(count):
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        if not one_way:
            dist.recv(x, 1) if rank == 0 else dist.send(x, 0)
run(20)
dist.barrier()
start, cpu = time.perf_counter(), time.process_time()
run(count)
dist.barrier()
took = (time.perf_counter() - start) / count
print(took if one_way else took / 2, time.process_time() - cpu, flush=True)
dist.destroy_process_group()
"""


def gloo(size: int, count: int, kind: str) -> tuple[float, float]:
    """Return seconds per message, and CPU seconds of both ends for all of them."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29631",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ends = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO, str(size), str(count), kind],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    texts = [end.communicate(timeout=300)[0].split()[-2:] for end in ends]
    return float(texts[0][0]), sum(float(text[1]) for text in texts)


def ucx(size: int, count: int, kind: str) -> tuple[float, float]:
    """Do the same for UCX; its processes' starts count as CPU time."""
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(UCX / "lib"),
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
    }
    tool = str(UCX / "bin" / "ucx_perftest")
    options = ["-p", "29632", "-E", "sleep"]
    test = ["-t", f"ucp_am_{kind}", "-s", str(size), "-n", str(count), "-w", "20", "-e"]
    before = os.times()
    server = subprocess.Popen(
        ["taskset", "-c", "1", tool, *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(1)
    client = subprocess.run(
        ["taskset", "-c", "0", tool, "localhost", *options, *test],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    server.wait(timeout=60)
    after = os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    final = next(s for s in client.stdout.splitlines() if s.startswith("Final:"))
    # Columns: count, median, average and overall microseconds, ...
    return float(final.split()[4]) / 1e6, cpu_s


@contextmanager
def busy_cores() -> Iterator[None]:
    """Let one process compute on each core."""
    code = "while True: sum(range(10000))"
    burners = [
        subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", code])
        for core in (0, 1)
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def killed(transport: str, when: str) -> float:
    """Rank 0 dies; rank 1 returns how many seconds later its receive has failed."""
    os.environ["TORCH_XLA_PP_TRANSPORT"] = transport
    import torch
    import torch.distributed as dist

    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat
    from torch_xla_pp.hlo import REPLICATED
    from torch_xla_pp.transport import Message, ShardLayout, of_group

    xpp.device()
    dist.init_process_group("xla_pp")
    group = of_group(None)
    group.transport.expect(Message("F", 1, 0, 0), 1 - group.rank())
    if group.rank() == 0:
        time.sleep(1)
        Path(when).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    layout = ShardLayout.of_sharding((4,), torch.float32, REPLICATED)
    try:
        group.transport.recv(Message("F", 1, 0, 0), 0, [layout])
        group.transport.settle()
    except RuntimeError:
        return time.time() - float(Path(when).read_text())
    finally:
        xla_compat.wait_device()
    return float("inf")


def death_s(transport: str) -> float:
    """Return how long a death goes unnoticed."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import libraries

    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds, tempfile.TemporaryDirectory() as folder:
        outcomes = worlds.run_outcomes(
            libraries.killed, ranks=2, devices=1, args=(transport, f"{folder}/when")
        )
    return float(outcomes[1].value)


def main() -> None:
    """Measure both libraries in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []

    def add(what: str, unit: str, ucx_value: float, gloo_value: float) -> None:
        row = {"what": what, "unit": unit, "ucx": ucx_value, "gloo": gloo_value}
        row["ratio"] = ucx_value / gloo_value
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            figures = f"{ucx_value:10.3g} {gloo_value:10.3g} {row['ratio']:8.3f}"
            print(f"{what:28} {unit:8} {figures}", flush=True)

    if not options.json:
        print(f"{'':28} {'':8} {'UCX':>10} {'gloo':>10} {'ratio':>8}")
    add("latency, 64 B", "us", *(1e6 * f(64, TRIPS, "lat")[0] for f in (ucx, gloo)))
    for size in (1 << 20, 1 << 24):
        times = [f(size, 200 if size < 1 << 24 else 50, "bw")[0] for f in (ucx, gloo)]
        add(f"bandwidth, {size >> 20} MB", "MB/s", *(size / t / 1e6 for t in times))
    with busy_cores():
        found = [f(64, TRIPS, "lat") for f in (ucx, gloo)]
    add("latency, 64 B, busy", "us", *(1e6 * wall for wall, _ in found))
    add(f"CPU of {TRIPS} trips, busy", "s", *(cpu for _, cpu in found))
    add("death noticed after", "s", death_s("in_graph"), death_s("host"))


if __name__ == "__main__":
    main()

"""Sending values between ranks: in-graph, host-staged and gloo, side by side.

    python benchmarks/p2p.py                latency and bandwidth, 64 B to 64 MB
    python benchmarks/p2p.py --overlap      step time with a slow network
    python benchmarks/p2p.py --json

Two ranks of one device each, pinned to one core each. One-way latency is half of a
round trip; bandwidth is that of messages in one direction, answered once. The sides
take turns, several times; medians are printed.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

SIDES = ("in_graph", "host", "gloo")
SIZES = (64, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
ROUNDS = 5
WIDTH = 256
MICROBATCHES = 8


def pin() -> int:
    """Bind this rank to a core; return the rank."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    return rank


def in_graph_side(size: int) -> tuple[Callable[[], None], Callable[[int], None]]:
    """Return a round trip, and the sending of a number of messages in one direction."""
    from torch_xla_pp import xla_compat
    from torch_xla_pp.compile import Function, Program, ProgramSpec
    from torch_xla_pp.transport import (
        Message,
        ShardLayout,
        of_group,
        receive_op,
        send_op,
    )

    transport = of_group(None).transport
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    name = Message("F", 1, 0, 0)
    x = torch.zeros(size // 4, device="xla")
    xla_compat.materialize([x])
    layouts = [ShardLayout.of_tensor(x)]

    def receive(route: Tensor) -> tuple[Tensor, ...]:
        (value,), token = receive_op(route, layouts)
        return value, token

    def send(route: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return (send_op(route, [value], layouts),)

    def program(name: str, module: Any, inputs: Any, outputs: Any) -> Program:
        function = Function(name=name, module=module, inputs=inputs, outputs=outputs)
        return Program(ProgramSpec(function=function))

    receiving = program("recv", receive, ("route",), ("x", "token"))
    sending = program("send", send, ("route", "x"), ("token",))

    def give(value: Tensor) -> None:
        sending({"route": transport.send_route(name, peer, layouts), "x": value})

    def take() -> Tensor:
        return receiving({"route": transport.receive_route(name, peer, layouts)})["x"]

    def round_trip() -> None:
        if rank == 0:
            give(x)
            take()
            transport.settle()
        else:
            give(take())

    def one_way(count: int) -> None:
        if rank == 0:
            for _ in range(count):
                give(x)
            take()
            transport.settle()
        else:
            for _ in range(count):
                take()
            give(x)

    return round_trip, one_way


def host_side(size: int) -> tuple[Callable[[], None], Callable[[int], None]]:
    """Do the same through the host-staged transport."""
    from torch_xla_pp import xla_compat
    from torch_xla_pp.transport import Message, ShardLayout, of_group
    from torch_xla_pp.transport.host import HostTransport

    transport = HostTransport(of_group(None).wire)
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    name = Message("F", 1, 0, 0)
    x = torch.zeros(size // 4, device="xla")
    xla_compat.materialize([x])
    layouts = [ShardLayout.of_tensor(x)]

    def round_trip() -> None:
        if rank == 0:
            transport.send(name, peer, [x])
            transport.recv(name, peer, layouts)
        else:
            transport.send(name, peer, transport.recv(name, peer, layouts))

    def one_way(count: int) -> None:
        if rank == 0:
            for _ in range(count):
                transport.send(name, peer, [x])
            transport.recv(name, peer, layouts)
        else:
            for _ in range(count):
                transport.recv(name, peer, layouts)
            transport.send(name, peer, [x])

    return round_trip, one_way


def gloo_side(size: int) -> tuple[Callable[[], None], Callable[[int], None]]:
    """Do the same with `dist.send` of tensors that are on the host already."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    x = torch.zeros(size // 4)

    def round_trip() -> None:
        if rank == 0:
            dist.send(x, peer)
            dist.recv(x, peer)
        else:
            dist.recv(x, peer)
            dist.send(x, peer)

    def one_way(count: int) -> None:
        if rank == 0:
            for _ in range(count):
                dist.send(x, peer)
            dist.recv(x, peer)
        else:
            for _ in range(count):
                dist.recv(x, peer)
            dist.send(x, peer)

    return round_trip, one_way


def timed(call: Callable[[], None], count: int) -> float:
    """Return the seconds of one call, the ranks having started together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def latency_and_bandwidth() -> list[dict[str, float | str]]:
    """Measure every size and side; only rank 0 returns rows."""
    import torch_xla_pp as xpp

    xpp.device()
    dist.init_process_group("xla_pp")
    rank = pin()
    rows: list[dict[str, float | str]] = []
    makers = dict(zip(SIDES, (in_graph_side, host_side, gloo_side), strict=True))
    for size in SIZES:
        calls = {side: make(size) for side, make in makers.items()}
        trips = 50 if size < 1 << 20 else 5
        messages = 20 if size < 1 << 24 else 4
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        streams: dict[str, list[float]] = {side: [] for side in SIDES}
        for attempt in range(ROUNDS + 1):
            for side, (round_trip, one_way) in calls.items():
                trip_s = timed(round_trip, trips) / 2
                stream_s = timed(lambda: one_way(messages), 1) / messages  # noqa: B023
                if attempt:  # the first one compiles and connects
                    seconds[side].append(trip_s)
                    streams[side].append(stream_s)
        for side in SIDES:
            one_way_s = statistics.median(seconds[side])
            rows.append(
                {
                    "side": side,
                    "bytes": size,
                    "latency_us": one_way_s * 1e6,
                    "mb_per_s": size / statistics.median(streams[side]) / 1e6,
                }
            )
    dist.barrier()
    return rows if rank == 0 else []


class Part(nn.Module):
    """A stage that computes for some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like `x`."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss; the target comes from the host."""
    return (output - target.to(output.device)).square().mean()


def step_time_with_delay() -> list[dict[str, float | str]]:
    """Measure a pipeline's step while messages are held back for some time."""
    import torch_xla_pp as xpp
    from torch_xla_pp.transport import of_group

    device = xpp.device()
    dist.init_process_group("xla_pp")
    rank = pin()
    torch.manual_seed(0)
    stage = xpp.PipelineStage(Part(), rank, 2, device)
    # In GPipe only the first and the last message of a step can be waited for; 1F1B
    # waits for more of a slow network, whatever carries the messages.
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=squared_error)
    x = torch.randn(128 * MICROBATCHES, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        stage.submod.zero_grad()

    transport = of_group(None).transport
    times: dict[float, list[float]] = {0.0: [], 0.002: [], 0.01: []}
    for attempt in range(2 * ROUNDS + 2):
        for delay_s, seconds in times.items():
            transport.engine.delay(delay_s)
            seconds_per_step = timed(step, 3)
            if attempt > 1:
                seconds.append(seconds_per_step)
    base_s = statistics.median(times[0.0])
    rows: list[dict[str, float | str]] = []
    for delay_s, seconds in times.items():
        extra_s = statistics.median(seconds) - base_s
        rows.append(
            {
                "delay_ms": delay_s * 1e3,
                "step_ms": (base_s + extra_s) * 1e3,
                "extra_ms": extra_s * 1e3,
                "extra_per_delay": extra_s / delay_s if delay_s else 0.0,
            }
        )
    dist.barrier()
    return rows if rank == 0 else []


def main() -> None:
    """Run one of the two measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import p2p

    from torch_xla_pp.testing import Worlds

    measure = p2p.step_time_with_delay if options.overlap else p2p.latency_and_bandwidth
    with Worlds() as worlds:
        rows, _ = worlds.run(measure, ranks=2, devices=1, timeout_s=900)
    if options.json:
        for row in rows:
            print(json.dumps(row))
    elif options.overlap:
        print(f"GPipe, 2 ranks, {MICROBATCHES} microbatches; messages held back for")
        for row in rows:
            print(
                f"{row['delay_ms']:6.1f} ms: step {row['step_ms']:7.1f} ms, "
                f"{row['extra_ms']:6.1f} ms more = {row['extra_per_delay']:.1f} delays"
            )
        print(
            "Receives that overlap computation cost about 2 delays (fill and drain), "
            f"others {2 * MICROBATCHES}."
        )
    else:
        print_table(rows)


def print_table(rows: list[dict[str, float]]) -> None:
    """Print both figures of all sides, and the ratios to gloo and to the host."""
    by_size = {
        size: {r["side"]: r for r in rows if r["bytes"] == size} for size in SIZES
    }
    for figure, unit in (("latency_us", "one-way, us"), ("mb_per_s", "MB/s")):
        print(f"\n{unit:>12} {'in_graph':>10} {'host':>10} {'gloo':>10}", end="")
        print(f" {'to host':>10} {'to gloo':>10}")
        for size, sides in by_size.items():
            found = [sides[side][figure] for side in SIDES]
            ratios = [found[0] / found[1], found[0] / found[2]]
            print(
                f"{size:>12} " + " ".join(f"{value:>10.1f}" for value in found), end=""
            )
            print(" " + " ".join(f"{ratio:>10.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()

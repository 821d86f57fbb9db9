"""Sending values between ranks: in-graph, host-staged and gloo, side by side.

    python benchmarks/p2p.py                latency and bandwidth, 64 B to 64 MB
    python benchmarks/p2p.py --bytes 16777216 67108864
    python benchmarks/p2p.py --overlap      step time with a slow network, of both
                                            transports of stages
    python benchmarks/p2p.py --json

Two ranks of one device each, pinned to one core each. One-way latency is half of a
round trip; bandwidth is that of messages in one direction, answered once. With it come
the processor time and the page faults of both ranks, for each of these messages: other
work on the machine changes them little. "memcpy" copies as many bytes within a process
between buffers that are used again and again. The sides take turns, several times;
medians are printed, and as JSON their quartiles, too. "in-graph to" is the ratio of the
bandwidths in the same round.
"""

import argparse
import asyncio
import functools
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from spread import medians_of, ratios, sums, text_of
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

SIDES = ("in_graph", "host", "gloo", "memcpy")
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

    transport: Any = of_group(None).transport
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

    group = of_group(None)
    transport = HostTransport(group.wire, group.rendezvous)
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


def memcpy_side(size: int) -> tuple[Callable[[], None], Callable[[int], None]]:
    """Copy as much within each process, there and back, and for each message."""
    x, y = torch.ones(size // 4), torch.zeros(size // 4)

    def round_trip() -> None:
        y.copy_(x)
        x.copy_(y)

    def one_way(count: int) -> None:
        for _ in range(count):
            y.copy_(x)

    return round_trip, one_way


def timed(call: Callable[[], None], count: int) -> float:
    """Return the seconds of one call, the ranks having started together."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


class Stream(NamedTuple):
    """What a message in one direction took; the rank's own, or that of both ranks."""

    seconds: float
    cpu_s: float
    page_faults: float


def streamed(one_way: Callable[[int], None], count: int) -> Stream:
    """Send messages in one direction; return what one took on this rank."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = timed(lambda: one_way(count), 1) / count
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Stream(seconds, cpu_s / count, (after.ru_minflt - before.ru_minflt) / count)


def figures_of(
    size: int, trips_s: Sequence[float], streams: Sequence[Stream]
) -> dict[str, list[float]]:
    """Return the figures of each round, of both ranks together for what adds up."""
    both: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(both, list(streams))
    return {
        "latency_us": [trip_s * 1e6 for trip_s in trips_s],
        "mb_per_s": [size / stream.seconds / 1e6 for stream in streams],
        "cpu_us": sums([[x.cpu_s * 1e6 for x in own] for own in both]),
        "page_faults": sums([[x.page_faults for x in own] for own in both]),
    }


def latency_and_bandwidth(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Measure every size and side; only rank 0 returns rows."""
    import torch_xla_pp as xpp

    xpp.device()
    dist.init_process_group("xla_pp")
    rank = pin()
    rows: list[dict[str, Any]] = []
    sides = (in_graph_side, host_side, gloo_side, memcpy_side)
    makers = dict(zip(SIDES, sides, strict=True))
    for size in sizes:
        calls = {side: make(size) for side, make in makers.items()}
        trips = 50 if size < 1 << 20 else 5
        messages = 20 if size < 1 << 26 else 4
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        streams: dict[str, list[Stream]] = {side: [] for side in SIDES}
        for attempt in range(ROUNDS + 1):
            for side, (round_trip, one_way) in calls.items():
                trip_s = timed(round_trip, trips) / 2
                stream = streamed(one_way, messages)
                if attempt:  # the first one compiles and connects
                    seconds[side].append(trip_s)
                    streams[side].append(stream)
        found = {side: figures_of(size, seconds[side], streams[side]) for side in SIDES}
        ours = found["in_graph"]["mb_per_s"]
        for side, rounds in found.items():
            rounds["in_graph_to"] = ratios(ours, rounds["mb_per_s"])
            rows.append({"side": side, "bytes": size} | medians_of(rounds))
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


def delayed(transport: str) -> tuple[Any, Callable[[float], None]]:
    """Return a group with a transport, and what holds its messages back for a time."""
    from torch_xla_pp.transport import of_group

    group = of_group(dist.new_group(backend="xla_pp"))
    with mock.patch.dict(os.environ, TORCH_XLA_PP_TRANSPORT=transport):
        carrier: Any = group.transport
    if transport == "in_graph":
        return group, carrier.engine.delay
    arrived = group.wire._arrived

    def delay(time_s: float) -> None:
        def later(*message: Any) -> None:
            if message[1][1][0] == "end of step":  # no value
                arrived(*message)
            else:
                asyncio.get_running_loop().call_later(time_s, arrived, *message)

        group._sockets.on("data", later if time_s else arrived)

    return group, delay


def step_time_with_delay() -> list[dict[str, Any]]:
    """Measure a pipeline's step while messages are held back for some time."""
    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    device = xpp.device()
    dist.init_process_group("xla_pp")
    rank = pin()
    x = torch.randn(128 * MICROBATCHES, WIDTH)
    delays, steps = {}, {}
    for name in ("in_graph", "host"):
        group, delays[name] = delayed(name)
        torch.manual_seed(0)
        stage = xpp.PipelineStage(Part(), rank, 2, device, group=group)
        # In GPipe only the first and the last message of a step can be waited for; 1F1B
        # waits for more of a slow network, whatever carries the messages.
        schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=squared_error)
        steps[name] = functools.partial(train, schedule, stage, x)
    times: dict[tuple[str, float], list[float]] = {}
    for attempt in range(2 * ROUNDS + 2):
        for delay_s in (0.0, 0.002, 0.01):
            for name, step in steps.items():
                delays[name](delay_s)
                xla_compat.wait_device()
                seconds = timed(step, 3)
                if attempt > 1:
                    times.setdefault((name, delay_s), []).append(seconds)
    rows = []
    for (name, delay_s), found in times.items():
        more = [x - base for x, base in zip(found, times[name, 0.0], strict=True)]
        rounds = {
            "step_ms": [step_s * 1e3 for step_s in found],
            "extra_ms": [extra_s * 1e3 for extra_s in more],
            "extra_per_delay": [x / delay_s if delay_s else 0.0 for x in more],
            "to_in_graph": ratios(found, times["in_graph", delay_s]),
        }
        row = {"side": name, "delay_ms": delay_s * 1e3}
        rows.append(row | medians_of(rounds))
    dist.barrier()
    return rows if rank == 0 else []


def train(schedule: Any, stage: Any, x: Tensor) -> None:
    """Do a training step without an optimizer."""
    schedule.step(*((x,) if stage.is_first else ()), target=x)
    stage.submod.zero_grad()


def main() -> None:
    """Run one of the two measurements and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import p2p

    from torch_xla_pp.testing import Worlds

    measure: Any = p2p.step_time_with_delay
    args: tuple[Any, ...] = ()
    if not options.overlap:
        measure, args = p2p.latency_and_bandwidth, (options.bytes,)
    with Worlds() as worlds:
        rows, _ = worlds.run(measure, ranks=2, devices=1, args=args, timeout_s=900)
    if options.json:
        for row in rows:
            print(json.dumps(row))
    elif options.overlap:
        print(f"GPipe, 2 ranks, {MICROBATCHES} microbatches; messages held back for")
        for row in rows:
            print(
                f"{row['side']:8} {row['delay_ms']:6.1f} ms: step "
                f"{row['step_ms']:7.1f} ms, {row['extra_ms']:6.1f} ms more = "
                f"{text_of(row, 'extra_per_delay', '.1f')} delays, "
                f"{text_of(row, 'to_in_graph')} of in_graph"
            )
        print(
            "Receives that overlap computation cost about 2 delays (fill and drain), "
            f"others {2 * MICROBATCHES}."
        )
    else:
        print_table(rows)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all figures of all sides, and ratios of in-graph to the others."""
    figures = {
        "latency_us": "one-way, us",
        "mb_per_s": "MB/s",
        "cpu_us": "CPU, us",
        "page_faults": "page faults",
    }
    by_size: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_size.setdefault(row["bytes"], {})[row["side"]] = row
    others = SIDES[1:]
    heads = [*SIDES, *(f"to {other}" for other in others)]
    for figure, unit in figures.items():
        print(f"\n{unit:>12} " + " ".join(f"{head:>10}" for head in heads))
        for size, sides in by_size.items():
            found = {side: sides[side][figure] for side in SIDES}
            to_others = [
                found["in_graph"] / found[other] if found[other] else float("nan")
                for other in others
            ]
            texts = [f"{value:>10.1f}" for value in found.values()]
            texts += [f"{ratio:>10.2f}" for ratio in to_others]
            print(f"{size:>12} " + " ".join(texts))
    print("\nin-graph to, by MB/s of the same round")
    for size, sides in by_size.items():
        texts = [f"{other} {text_of(sides[other], 'in_graph_to')}" for other in others]
        print(f"{size:>12}  {', '.join(texts)}")


if __name__ == "__main__":
    main()

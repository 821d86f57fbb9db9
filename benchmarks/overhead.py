"""What an action costs beside its work, for more ranks, and what that means for many.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --ranks 2 4 --json
    python benchmarks/overhead.py --ranks 2 4 --blocks 4 --microbatches 16 64
    python benchmarks/overhead.py --ranks 2 --blocks 4 --width 144 --length 32
    python benchmarks/overhead.py --ranks 2 --blocks 4 --microbatches 64 --calls
    python benchmarks/overhead.py --action-us 170      simulates, and measures nothing

One layer of width 32 a rank, so that there is next to no work; 1F1B with 16
microbatches. With --blocks, as many transformer blocks of that width a rank, of 12
parameters each: 4 have as many parameters and dispatches as a rank of the small model
in `step_time.py`. All their values are small, so what a stage saves passes as one; with
--width 144 --length 32 most are larger than 64 KiB, as in that model, and some are
written into larger ones. All ranks share this machine's cores, so processor time is
measured, not time: of the main thread (which dispatches) and of the whole process, per
action. It should not grow with the number of ranks or of microbatches. With --calls,
the main thread's time of each rank is told apart: in torch_xla's call that runs a
program, in its wait until the one before is launched, in its uploads, in dropping the
values whose memory programs have taken, and in all else. The clock adds to each.
Medians of steps, as JSON with their quartiles.

Then the simulator lets stages of `--work-ms` for a forward and twice that for a
backward run on up to 1,024 ranks under 1F1B with a microbatch for each rank, 128 at
most. The share of the ideal speed, in which no rank ever waits, is given without any
cost, so that only the bubble counts, and with costs that are added one by one: that
of an action, that of a message (`p2p.py`, as if none of it were dispatch), and that of
telling all ranks the kind of the step (`control_plane.py`), as if all waited for it.

At last it scales one job as JaxPP was: GPT-3 175B on 64 to 1,024 GPUs, in pipelines of
8 ranks of 8 GPUs, interleaved 1F1B with 3 stages a rank, 64 microbatches of 2 x 2,048
tokens a replica, 1 to 16 replicas. Compute is assumed, costs are those above; replicas
add up their gradients once a step, while nothing else runs. The share is that of the
speed per GPU with 64.

Source: github.com/NVIDIA/maxtext-jaxpp, slurm/gpt3-175b-scaling.sh and maxtext.sh.
"""

import argparse
import contextlib
import itertools
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import gpt
import torch
from spread import medians_of, text_of
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp.schedule import Schedule, interleaved_1f1b, one_f_one_b
from torch_xla_pp.simulate import Costs, Link, Network, ring_all_reduce_s, simulate

HEADS, ROWS, STEPS, WARM_UP = 4, 4, 10, 3
MANY = (2, 8, 64, 256, 1024)
MOST_MICROBATCHES = 128
ACTIVATION_BYTES = 16 * 2**20
# What torch_xla does for an action, and its functions.
CALLS = {
    "run": "_run_cached_graph",
    "launch": "_xla_sync_multi",
    "upload": "_global_tensor_from_cpu_shards",
}
# Destructors of torch_xla's are called where values are dropped.
DROP = "drop"
# docs/performance/p2p.md, in-graph: latency of 64 bytes, bandwidth of 16 MiB.
MESSAGES = Link(latency_s=157e-6, bytes_per_s=11305e6)
# docs/performance/liveness.md: one rank tells 31 others, which all are its children in
# the tree of connections.
HOP_S = 1.46e-3
CHILDREN = 32

# Of the job as JaxPP scales it.
PARAMETERS, TOKENS, MODEL_WIDTH = 175e9, 2 * 2048, 12288
PIPELINE, GPUS, REPEATS, COUNT = 8, 8, 3, 64
REPLICAS = (1, 2, 4, 8, 16)
# Assumed: half of what an H100 SXM multiplies in bfloat16 without sparsity (NVIDIA's
# data sheet: 989 TFLOP/s), and a network card of 400 Gbit/s for each GPU.
FLOPS_PER_S = 0.5 * 989e12
CARD_BYTES_PER_S = 50e9
GRADIENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead:
    """What a step pays beside its work.

    Args:
        action_s: Of each action.
        link: What a message takes.
        hop_s: Of each hop of what one rank tells all, once a step.
    """

    action_s: float = 0.0
    link: Link = Link()
    hop_s: float = 0.0

    def step_s(
        self, schedule: Schedule, num_stages: int, work_s: float, num_bytes: int
    ) -> float:
        """Return the time of a step of equal stages.

        Args:
            schedule: The order of a pipeline's actions.
            num_stages: Number of its stages.
            work_s: Of a forward; a backward takes twice as long.
            num_bytes: Size of a message.
        """
        costs = Costs.uniform(
            num_stages,
            forward_s=work_s + self.action_s,
            input_s=work_s + self.action_s / 2,
            weight_s=work_s + self.action_s / 2,
            num_bytes=num_bytes,
        )
        return simulate(schedule, costs, Network(default=self.link)).step_s

    def told_s(self, ranks: int) -> float:
        """Return the time until all ranks have heard what one tells."""
        return self.hop_s * num_hops(ranks)


def num_hops(ranks: int) -> int:
    """Return the depth of the tree of connections between ranks."""
    depth, reached = 0, 1
    while reached < ranks:
        depth += 1
        reached += CHILDREN**depth
    return depth


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares."""
    return F.mse_loss(output, target.to(output.device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What each rank computes.

    Args:
        blocks: Transformer blocks of a rank, none for a linear layer.
        width: Of their layers.
        length: Of the sequences that blocks get.
    """

    blocks: int
    width: int
    length: int

    def stage(self) -> nn.Module:
        """Return the module of a rank."""
        if not self.blocks:
            return nn.Linear(self.width, self.width)
        return nn.Sequential(
            *(gpt.Block(self.width, HEADS) for _ in range(self.blocks))
        )

    def inputs(self, microbatches: int) -> Tensor:
        """Return a batch."""
        lengths = [self.length] if self.blocks else []
        return torch.randn(microbatches * ROWS, *lengths, self.width)


@contextlib.contextmanager
def timed_calls() -> Iterator[dict[str, float]]:
    """Sum up the CPU seconds of this thread in torch_xla's calls, by name."""
    from torch_xla import _XLAC

    from torch_xla_pp.state import DonatedValues

    spent, thread = dict.fromkeys([*CALLS, DROP], 0.0), threading.get_ident()

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if threading.get_ident() != thread:
                return call(*args)
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                spent[name] += time.thread_time() - start

        return run

    places = [(name, _XLAC, attribute) for name, attribute in CALLS.items()]
    with contextlib.ExitStack() as stack:
        for name, owner, attribute in [*places, (DROP, DonatedValues, "add")]:
            call = timed(name, getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, call))
        yield spent


def cpu_times(work: Work, microbatches: int, has_calls: bool) -> list[dict[str, float]]:
    """Return the CPU seconds per action of this rank: main thread, whole process.

    There is a row for each step.

    Args:
        work: What each rank computes.
        microbatches: Microbatches of a step.
        has_calls: Whether to add those of torch_xla's calls.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    device = xpp.device()
    dist.init_process_group("xla_pp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = xpp.PipelineStage(work.stage(), rank, ranks, device)
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_fn)
    x = work.inputs(microbatches)
    args = (x,) if stage.is_first else ()
    target = x if stage.is_last else None
    found = []
    with contextlib.ExitStack() as stack:
        spent = stack.enter_context(timed_calls()) if has_calls else {}
        for _ in range(WARM_UP + STEPS):
            dist.barrier()
            spent.update(dict.fromkeys(spent, 0.0))
            main, whole = time.thread_time(), time.process_time()
            schedule.step(*args, target=target)
            xla_compat.wait_device()
            times = {
                "main": time.thread_time() - main,
                "process": time.process_time() - whole,
            }
            found.append(times | spent)
    return [
        {f"{name}_s": spent_s / (2 * microbatches) for name, spent_s in times.items()}
        for times in found[WARM_UP:]
    ]


def levels(action_s: float) -> dict[str, Overhead]:
    """Return what is paid, from nothing to everything."""
    return {
        "free": Overhead(),
        "action": Overhead(action_s=action_s),
        "message": Overhead(action_s=action_s, link=MESSAGES),
        "control": Overhead(action_s=action_s, link=MESSAGES, hop_s=HOP_S),
    }


def efficiency(ranks: int, work_s: float, overhead: Overhead) -> float:
    """Return the ideal time of a step of one pipeline by the simulated one."""
    microbatches = min(ranks, MOST_MICROBATCHES)
    schedule = one_f_one_b(ranks, microbatches)
    step_s = overhead.step_s(schedule, ranks, work_s, ACTIVATION_BYTES)
    return microbatches * 3 * work_s / (step_s + overhead.told_s(ranks))


def pipeline_rows(action_s: float, work_s: float) -> Iterator[dict[str, Any]]:
    """Simulate longer and longer pipelines."""
    for ranks in MANY:
        found = {
            name: efficiency(ranks, work_s, overhead)
            for name, overhead in levels(action_s).items()
        }
        ratio = found["control"] / found["free"]
        yield {"what": "pipeline", "ranks": ranks, **found, "ratio": ratio}


def replica_rows(action_s: float) -> Iterator[dict[str, Any]]:
    """Simulate more and more replicas of one pipeline."""
    link = Link(latency_s=MESSAGES.latency_s, bytes_per_s=CARD_BYTES_PER_S)
    overhead = Overhead(action_s=action_s, link=link, hop_s=HOP_S)
    num_stages = PIPELINE * REPEATS
    work_s = 2 * PARAMETERS * TOKENS / num_stages / (GPUS * FLOPS_PER_S)
    schedule = interleaved_1f1b(PIPELINE, COUNT, REPEATS)
    # A message is cut into a part for each pair of GPUs.
    num_bytes = 2 * TOKENS * MODEL_WIDTH // GPUS
    pipeline_s = overhead.step_s(schedule, num_stages, work_s, num_bytes)
    gradients = GRADIENT_BYTES * PARAMETERS / (PIPELINE * GPUS)
    first_s = math.nan
    for replicas in REPLICAS:
        ranks = replicas * PIPELINE
        step_s = pipeline_s + overhead.told_s(ranks)
        step_s += ring_all_reduce_s(gradients, replicas, link)
        first_s = step_s if replicas == 1 else first_s
        share = first_s / step_s
        gpus = ranks * GPUS
        yield {"what": "replicas", "gpus": gpus, "step_s": step_s, "share": share}


def measured_rows(
    ranks: list[int], work: Work, microbatches: list[int], has_calls: bool
) -> Iterator[dict[str, Any]]:
    """Measure what an action costs, for some numbers of ranks and microbatches."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import overhead

    from torch_xla_pp.testing import Worlds

    for count, number in itertools.product(ranks, microbatches):
        with Worlds() as worlds:
            found = worlds.run(
                overhead.cpu_times,
                ranks=count,
                args=(work, number, has_calls),
                timeout_s=900,
            )
        job = {"ranks": count, **asdict(work), "microbatches": number}
        steps = list(zip(*found, strict=True))
        middle = {
            name: [statistics.median(own[name] for own in step) for step in steps]
            for name in ("main_s", "process_s")
        }
        yield {"what": "action"} | job | medians_of(middle)
        for rank, own in enumerate(found if has_calls else ()):
            times = {name: [step[name] for step in own] for name in own[0]}
            yield {"what": "calls"} | job | {"rank": rank} | medians_of(times)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    if row["what"] == "action":
        return (
            f"{row['ranks']:4} ranks, {row['microbatches']:3} microbatches: "
            f"{text_of(row, 'main_s', '.0f', 1e6)} us of CPU per action in the main "
            f"thread, {text_of(row, 'process_s', '.0f', 1e6)} us in all threads"
        )
    if row["what"] == "calls":
        calls = {name: row[f"{name}_s"] * 1e6 for name in [*CALLS, DROP]}
        calls["else"] = row["main_s"] * 1e6 - sum(calls.values())
        return f"  rank {row['rank']}: " + ", ".join(
            f"{us:.0f} us {name}" for name, us in calls.items()
        )
    if row["what"] == "replicas":
        return (
            f"{row['gpus']:5} GPUs, simulated: a step of {row['step_s']:.2f} s, "
            f"{row['share']:.3f} of the speed per GPU with the first"
        )
    shares = ", ".join(
        f"{row[n]:.3f} with {n}" for n in ("action", "message", "control")
    )
    return (
        f"{row['ranks']:4} ranks, simulated: {row['free']:.3f} of the ideal speed, "
        f"{shares}, ratio {row['ratio']:.3f}"
    )


def main() -> None:
    """Measure, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[16])
    parser.add_argument("--blocks", type=int, default=0, help="of a rank")
    parser.add_argument("--width", type=int, default=32, help="of layers")
    parser.add_argument("--length", type=int, default=8, help="of sequences")
    parser.add_argument("--action-us", type=float, help="cost of an action, if known")
    parser.add_argument("--calls", action="store_true", help="of torch_xla apart")
    parser.add_argument("--work-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row) if options.json else line_of(row), flush=True)

    action_s = (options.action_us or 0.0) / 1e6
    if options.action_us is None:
        work = Work(blocks=options.blocks, width=options.width, length=options.length)
        for row in measured_rows(
            options.ranks, work, options.microbatches, options.calls
        ):
            if row["what"] == "action":
                action_s = max(action_s, row["main_s"])
            show(row)
    for row in pipeline_rows(action_s, options.work_ms / 1e3):
        show(row)
    for row in replica_rows(action_s):
        show(row)


if __name__ == "__main__":
    main()

"""What an action costs beside its work, for more ranks, and what that means for many.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --ranks 2 4 --json

One layer of width 32 a rank, so that there is next to no work; 1F1B with 16
microbatches. All ranks share this machine's cores, so processor time is measured, not
time: of the main thread (which dispatches) and of the whole process, per action. It
should not grow with the number of ranks.

Then the simulator lets stages of `--work-ms` for a forward and twice that for a
backward run on up to 1,024 ranks under 1F1B with a microbatch for each rank, 128 at
most, with and without that cost, over links of 20 us and 10 GB/s: the share of the
ideal speed, of which the bubble takes half or more.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_xla_pp.schedule import one_f_one_b
from torch_xla_pp.simulate import Costs, Link, Network, simulate

WIDTH, ROWS, MICROBATCHES, STEPS, WARM_UP = 32, 4, 16, 10, 3
MANY = (2, 8, 64, 256, 1024)
MOST_MICROBATCHES = 128
LATENCY_S = 20e-6
BYTES_PER_S = 10e9
ACTIVATION_BYTES = 16 * 2**20


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of squares."""
    return F.mse_loss(output, target.to(output.device))


def cpu_times() -> tuple[float, float]:
    """Return the CPU seconds per action of this rank: main thread, whole process."""
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    device = xpp.device()
    dist.init_process_group("xla_pp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = xpp.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, ranks, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    args = (x,) if stage.is_first else ()
    target = x if stage.is_last else None
    found = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        main, whole = time.thread_time(), time.process_time()
        schedule.step(*args, target=target)
        xla_compat.wait_device()
        found.append((time.thread_time() - main, time.process_time() - whole))
    main_s, whole_s = (
        statistics.median(column) for column in zip(*found[WARM_UP:], strict=True)
    )
    return main_s / (2 * MICROBATCHES), whole_s / (2 * MICROBATCHES)


def efficiency(ranks: int, work_s: float, action_s: float) -> float:
    """Return the ideal time of a step by the simulated one."""
    microbatches = min(ranks, MOST_MICROBATCHES)
    costs = Costs.uniform(
        ranks,
        forward_s=work_s + action_s,
        input_s=work_s + action_s / 2,
        weight_s=work_s + action_s / 2,
        num_bytes=ACTIVATION_BYTES,
    )
    link = Link(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
    step = simulate(one_f_one_b(ranks, microbatches), costs, Network(default=link))
    return microbatches * 3 * work_s / step.step_s


def main() -> None:
    """Measure, then predict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--work-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import overhead

    from torch_xla_pp.testing import Worlds

    action_s = 0.0
    for ranks in options.ranks:
        with Worlds() as worlds:
            found = worlds.run(overhead.cpu_times, ranks=ranks, timeout_s=900)
        main_s, whole_s = (
            statistics.median(column) for column in zip(*found, strict=True)
        )
        action_s = max(action_s, main_s)
        row: dict[str, Any] = {"ranks": ranks, "main_s": main_s, "process_s": whole_s}
        print(
            json.dumps(row)
            if options.json
            else f"{ranks:4} ranks: {main_s * 1e6:5.0f} us of CPU per action in the "
            f"main thread, {whole_s * 1e6:5.0f} us in all threads",
            flush=True,
        )
    work_s = options.work_ms / 1e3
    for ranks in MANY:
        free, real = (efficiency(ranks, work_s, cost) for cost in (0.0, action_s))
        row = {"ranks": ranks, "free": free, "with_cost": real, "ratio": real / free}
        print(
            json.dumps(row)
            if options.json
            else f"{ranks:4} ranks, simulated: {free:.3f} of the ideal speed, "
            f"{real:.3f} with that cost, ratio {real / free:.3f}"
        )


if __name__ == "__main__":
    main()

"""Memory of ranks that evaluate in a loop while the last one is slow.

    python benchmarks/eval_memory.py
    python benchmarks/eval_memory.py --calls 300 --mib 16 --json

Two ranks of one device. The first one does next to nothing and hands activations of
`--mib` MiB a microbatch to the last one, which takes its time. Columns, as the JSON
names them, which are medians of rounds in fresh processes, with their quartiles as
`..._spread`:

rank, calls: Whose figures they are, after how many calls of `schedule.eval`.
first_mib: Resident memory after a tenth of the calls.
most_mib: The most after that.
grown_mib: The difference; that of an unbounded run grows with the calls.
"""

import argparse
import json
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spread import medians_of, text_of
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F

import torch_xla_pp as xpp

MICROBATCHES = 2


class Scale(nn.Module):
    """A stage with one weight, and work that nobody needs."""

    def __init__(self, work: int) -> None:
        super().__init__()
        self.work = work
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like `x`."""
        square = torch.eye(512, device=x.device)
        for _ in range(self.work):
            square = torch.cos(square @ square)
        return x * self.weight + 0 * square[0, 0]


def sizes_of(calls: int, mib: int) -> list[float]:
    """Evaluate in a loop; return the resident memory after each call, in MiB."""
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    stage = xpp.PipelineStage(Scale(8 * rank), rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    x = torch.ones(MICROBATCHES, mib << 18)
    sizes = []
    for _ in range(calls):
        schedule.eval(*(() if rank else (x,)), **({"target": x} if rank else {}))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        sizes.append(pages * resource.getpagesize() / (1 << 20))
    dist.barrier()
    return sizes


def run(calls: int, mib: int) -> list[dict[str, float]]:
    """Return what each rank of new processes takes."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import eval_memory

    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        found = worlds.run(
            eval_memory.sizes_of, ranks=2, args=(calls, mib), timeout_s=1800
        )
    rows = []
    for sizes in found:
        first, most = sizes[calls // 10], max(sizes[calls // 10 :])
        rows.append({"first_mib": first, "most_mib": most, "grown_mib": most - first})
    return rows


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [run(options.calls, options.mib) for _ in range(options.rounds)]
    for rank, own in enumerate(zip(*found, strict=True)):
        row: dict[str, Any] = {"rank": rank, "calls": options.calls}
        row |= medians_of({name: [one[name] for one in own] for name in own[0]})
        print(json.dumps(row) if options.json else line_of(row), flush=True)


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    first, most, grown = (
        text_of(row, f"{name}_mib", ".0f") for name in ("first", "most", "grown")
    )
    return (
        f"rank {row['rank']}, {row['calls']} calls: {first} MiB, at most {most} MiB, "
        f"grown by {grown} MiB"
    )


if __name__ == "__main__":
    main()

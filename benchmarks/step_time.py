"""A training step here and in torch.distributed.pipelining on gloo, side by side.

    python benchmarks/step_time.py                 small model, GPipe and 1F1B
    python benchmarks/step_time.py --size large --microbatches 4 8 16 --json

Two ranks, one core and one thread each, one local device each; the same model, data and
unmodified schedule classes; SGD. Both sides run in the same processes in turns of a few
steps; medians over turns are printed. The peer is eager CPU PyTorch; only its handshake
is left out, whose two sides disagree on the size of a message in torch 2.9.
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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

SIZES = {
    "small": {"width": 256, "heads": 4, "layers": 8, "length": 128},
    "large": {"width": 512, "heads": 8, "layers": 8, "length": 256},
}
VOCAB = 512
ROWS = 2
ROUNDS = 7
STEPS = 2
NUM_RANKS = 2
ONE_STAGE = ("GPipe", "1F1B")


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like `x`, `(B, L, width)`."""
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (
            part.reshape(shape).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Part(nn.Module):
    """One of equal stages of a GPT."""

    def __init__(
        self, stage: int, num_stages: int, width: int, heads: int, layers: int
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width) if stage == 0 else None
        count = layers // num_stages
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(count))
        self.head = nn.Linear(width, VOCAB) if stage == num_stages - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens or activations; return activations or logits."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class PeerStage(PipelineStage):
    """Upstream's stage without its handshake, which fails on gloo."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    target = target.to(logits.device)
    return F.cross_entropy(logits.reshape(-1, VOCAB), target.reshape(-1))


def stage_indices(schedule: str, rank: int) -> list[int]:
    """Return the stages of a rank; V-shaped schedules have the last one on rank 0."""
    if schedule in ONE_STAGE:
        return [rank]
    is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
    return [rank, 2 * NUM_RANKS - 1 - rank if is_v else rank + NUM_RANKS]


def make_side(
    make: Callable[[nn.Module, int, int], Any],
    schedule: str,
    microbatches: int,
    size: dict[str, int],
) -> tuple[Callable[[], None], list[Any]]:
    """Return a function that does one training step, and its stages."""
    rank = dist.get_rank()
    indices = stage_indices(schedule, rank)
    num_stages = NUM_RANKS * len(indices)
    sizes = {k: v for k, v in size.items() if k != "length"}
    stages = []
    for index in indices:
        torch.manual_seed(index)
        stages.append(make(Part(index, num_stages, **sizes), index, num_stages))
    kind: Any = get_schedule_class(schedule)
    driven = stages[0] if schedule in ONE_STAGE else stages
    runner = kind(driven, microbatches, loss_fn=loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    torch.manual_seed(7)
    tokens = torch.randint(VOCAB, (ROWS * microbatches, size["length"] + 1))
    inputs = (tokens[:, :-1].contiguous(),) if 0 in indices else ()
    target = tokens[:, 1:].contiguous() if num_stages - 1 in indices else None

    def step() -> None:
        losses: list[Tensor] = []
        runner.step(*inputs, target=target, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        for loss in losses[-1:]:
            assert torch.isfinite(loss.detach()).item()

    return step, stages


def measure(
    schedules: list[str], counts: list[int], size_name: str
) -> list[dict[str, Any]]:
    """Measure all cells; every rank calls, rank 0 returns rows."""
    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    torch.set_num_threads(1)
    device = xpp.device()
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    gloo = dist.new_group(backend="gloo")
    size = SIZES[size_name]

    def ours(module: nn.Module, index: int, num_stages: int) -> Any:
        return xpp.PipelineStage(module, index, num_stages, device)

    def peer(module: nn.Module, index: int, num_stages: int) -> Any:
        return PeerStage(module, index, num_stages, torch.device("cpu"), group=gloo)

    rows = []
    for schedule in schedules:
        for count in counts:
            start = time.perf_counter()
            our_step, _ = make_side(ours, schedule, count, size)
            our_step()
            xla_compat.wait_device()
            first_s = time.perf_counter() - start
            our_step()
            peer_step, _ = make_side(peer, schedule, count, size)
            peer_step()
            seconds: dict[str, list[float]] = {"ours": [], "peer": []}
            for _ in range(ROUNDS):
                for name, step in (("ours", our_step), ("peer", peer_step)):
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(STEPS):
                        step()
                    xla_compat.wait_device()
                    dist.barrier()
                    seconds[name].append((time.perf_counter() - start) / STEPS)
            ours_s, peer_s = (statistics.median(s) for s in seconds.values())
            rows.append(
                {
                    "model": size_name,
                    "schedule": schedule,
                    "microbatches": count,
                    "ours_s": ours_s,
                    "peer_s": peer_s,
                    "ratio": ours_s / peer_s,
                    "first_step_s": first_s,
                }
            )
    return rows if rank == 0 else []


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--schedules", nargs="+", default=list(ONE_STAGE))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import step_time

    from torch_xla_pp.testing import Worlds

    arguments = (options.schedules, options.microbatches, options.size)
    with Worlds() as worlds:
        rows, _ = worlds.run(
            step_time.measure,
            ranks=NUM_RANKS,
            devices=1,
            args=arguments,
            timeout_s=3000,
        )
    for row in rows:
        if options.json:
            print(json.dumps(row))
            continue
        print(
            f"{row['model']} {row['schedule']:24} M={row['microbatches']:<3}"
            f" ours {row['ours_s']:7.3f} s  peer {row['peer_s']:7.3f} s"
            f"  ratio {row['ratio']:.2f}  first step {row['first_step_s']:.1f} s"
        )


if __name__ == "__main__":
    main()

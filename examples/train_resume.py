"""Train a job that may be killed at any moment, and goes on where it was.

One learns to save while training goes on, to resume, to leave when the job is asked to
end, and to go on with another number of stages.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_resume.py --folder runs

Kill a rank: torchrun starts all of them again, and they load the last checkpoint. Send
SIGTERM to a rank or to torchrun: all ranks save after the step that they are in and
leave with code 75, which means "try again". Start it again with 1, 2 or 4 ranks: it
goes on from there. The losses are in `runs/losses.txt`, one line `step loss` for each
step that was done; the last line printed is `done at step N, loss X`.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import checkpoint

WIDTH, BLOCKS, ROWS, MICROBATCHES = 32, 4, 16, 4
TRY_AGAIN = 75


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, x.flip(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between two saves")
    args = parser.parse_args()

    dist.init_process_group("xla_pp")
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), xpp.device()
    devices = int(os.environ.get("CPU_NUM_DEVICES", "1"))
    mesh = xpp.init_device_mesh("xla", (ranks, devices), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    cuts = [f"blocks.{i * BLOCKS // ranks}" for i in range(1, ranks)]
    pipe = xpp.pipeline(
        Model(),
        mb_args=(torch.zeros(ROWS // MICROBATCHES, WIDTH),),
        split_spec={name: SplitPoint.BEGINNING for name in cuts},
    )
    stage = pipe.build_stage(rank, device, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    progress = {"step": 0, "rates": rates}
    state = checkpoint.State(stages=stage, optimizer=optimizer, extra=progress)
    last = checkpoint.latest(args.folder)
    if last is not None:
        checkpoint.load(state, last)
    args.folder.mkdir(parents=True, exist_ok=True)
    log = (args.folder / "losses.txt").open("a") if stage.is_last else None

    # From here on there is something to save. The signal is only noted: the ranks must
    # leave after the same step.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

    mean = float("nan")
    while progress["step"] < args.steps:
        x, y = batch(progress["step"])
        losses: list[Tensor] = []
        inputs = (x.to(device),) if stage.is_first else ()
        targets = {"target": y.to(device), "losses": losses} if stage.is_last else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        progress["step"] += 1
        if log is not None:
            mean = sum(loss.item() for loss in losses) / MICROBATCHES
            print(progress["step"], repr(mean), file=log, flush=True)

        # One rank may have been asked before the others were.
        any_asked = torch.tensor(len(asked))
        dist.all_reduce(any_asked)
        folder = args.folder / f"step-{progress['step']}"
        if any_asked or progress["step"] == args.steps:
            checkpoint.save(state, folder, keep_last=2)
        elif progress["step"] % args.every == 0:
            # The bytes are written while the next steps run.
            checkpoint.async_save(state, folder, keep_last=2)
        if any_asked:
            break
    if stage.is_last:
        print(f"done at step {progress['step']}, loss {mean:.4f}", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if progress["step"] == args.steps else TRY_AGAIN)


if __name__ == "__main__":
    main()

"""Ten thousand steps of a small pipeline: nothing may grow.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 2000 --json

Two ranks of two devices train a small model whose batches have several sizes, evaluate
every 100 steps, and save every 500, asynchronously. Every 250 steps each rank notes its
resident memory, open files, threads, and how many programs it has compiled. After the
first 500 steps none of them may grow, and no step that does nothing else may take more
than 20 times the median: such steps are listed with what the process did meanwhile,
namely how long it waited for a core, how long Python collected garbage, and how many
programs it compiled.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, MICROBATCHES, ROWS = 16, 4, (16, 32, 8)
EVAL_EVERY, SAVE_EVERY, NOTE_EVERY, SETTLED = 100, 500, 250, 500
SLOW = 20.0


def train(num_steps: int, folder: str) -> dict[str, Any]:
    """Return what this rank has noted."""
    import torch.distributed as dist
    from torch.distributed.pipelining import Schedule1F1B

    import torch_xla_pp as xpp
    from torch_xla_pp import checkpoint

    dist.init_process_group("xla_pp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = xpp.init_device_mesh("xla", (ranks, 2), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())
    named = nn.ModuleDict({str(rank): part})
    stage = xpp.PipelineStage(Part(named), rank, ranks, xpp.device(), mesh=mesh["data"])
    # Two numbers that the host makes are equal in step 6,212: one more program.
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3, capturable=True)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    state = checkpoint.State(stages=stage, optimizer=optimizer, extra={"step": 0})
    batches = {rows: torch.randn(rows, WIDTH) for rows in ROWS}

    def run(call: Any, step: int) -> None:
        x = batches[ROWS[step // 7 % len(ROWS)]].to(xpp.device())
        losses: list[torch.Tensor] = []
        args = (x,) if stage.is_first else ()
        call(*args, **({"target": x, "losses": losses} if stage.is_last else {}))
        if losses:
            float(losses[-1])

    spent = Spent()
    gc.callbacks.append(spent.collected)
    notes, times, causes = [note(0)], [], []
    for step in range(1, num_steps + 1):
        begin, before = time.perf_counter(), spent.now()
        run(schedule.step, step)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        pairs = zip(spent.now().items(), before.values(), strict=True)
        causes.append({name: after - value for (name, after), value in pairs})
        if step % EVAL_EVERY == 0:
            run(schedule.eval, step)
        if step % SAVE_EVERY == 0:
            state.extra["step"] = step
            checkpoint.async_save(state, Path(folder) / f"step-{step}", keep_last=2)
        if step % NOTE_EVERY == 0:
            notes.append(note(step))
    checkpoint.save(state, Path(folder) / f"step-{num_steps + 1}", keep_last=2)
    dist.destroy_process_group()
    gc.callbacks.remove(spent.collected)
    median = statistics.median(times[SETTLED:] or times)
    slow = [
        {"step": step, "times": times[step - 1] / median, **causes[step - 1]}
        for step in range(SETTLED + 1, num_steps + 1)
        if times[step - 1] > SLOW * median
    ]
    return {"notes": notes, "median_s": median, "slow": slow}


class Part(nn.Module):
    """A part under the name that it has in the whole model."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def note(step: int) -> dict[str, int]:
    """Return what this process has now."""
    from torch_xla.debug import metrics

    status = Path("/proc/self/status").read_text().split()
    value = {
        name: int(status[status.index(name) + 1]) for name in ("VmRSS:", "Threads:")
    }
    return {
        "step": step,
        "resident_kib": value["VmRSS:"],
        "files": len([*Path("/proc/self/fd").iterdir()]),
        "threads": value["Threads:"],
        "programs": metrics.counter_value("UncachedCompile") or 0,
    }


class Spent:
    """What may make a step slow, summed up so far."""

    def __init__(self) -> None:
        self._collect_s = self._begin_s = 0.0

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """Take the time of a collection of garbage; called by Python."""
        if phase == "start":
            self._begin_s = time.perf_counter()
        else:
            self._collect_s += time.perf_counter() - self._begin_s

    def now(self) -> dict[str, float]:
        """Return the seconds without a core and in collections, and the programs."""
        from torch_xla.debug import metrics

        schedule = Path("/proc/self/schedstat").read_text().split()
        return {
            "waited_s": int(schedule[1]) / 1e9,
            "collect_s": self._collect_s,
            "programs": metrics.counter_value("UncachedCompile") or 0,
        }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import soak

    from torch_xla_pp.testing import Worlds

    with tempfile.TemporaryDirectory() as folder, Worlds() as worlds:
        found = worlds.run(
            soak.train,
            ranks=2,
            devices=2,
            args=(options.steps, folder),
            timeout_s=36_000,
        )
    if options.json:
        print(json.dumps(found))
        return
    for rank, own in enumerate(found):
        print(f"rank {rank}: median step {own['median_s'] * 1e3:.1f} ms")
        print("   step   resident   files  threads  programs")
        for row in own["notes"]:
            print(
                f"{row['step']:7} {row['resident_kib'] / 1024:6.0f} MiB "
                f"{row['files']:7} {row['threads']:8} {row['programs']:9}"
            )
        for row in own["slow"]:
            print(
                f"   step {row['step']} took {row['times']:.0f} times the median: "
                f"waited {row['waited_s']:.2f} s for a core, collected garbage for "
                f"{row['collect_s']:.2f} s, compiled {row['programs']} programs"
            )


if __name__ == "__main__":
    main()

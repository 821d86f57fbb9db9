"""How much memory of the host a save and a load take at most.

    python benchmarks/checkpoint_memory.py
    python benchmarks/checkpoint_memory.py --width 4096 --layers 4 --json

One rank has a stage of square linear layers, trained by AdamW. The process's largest
resident memory is noted for each of `save`, `async_save` until it is written, and
`load`, above what it has before: medians of rounds in fresh processes, in the JSON with
their quartiles as `..._spread`. On CPU devices what is on the devices is memory of the
host, too: a load has the old and the new value of what it replaces.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spread import medians_of, text_of
from torch import nn
from torch.nn import functional as F


def measure(width: int, layers: int, folder: str) -> dict[str, int]:
    """Return the bytes of all, of the largest tensor, and that each call takes."""
    import torch.distributed as dist
    from torch.distributed.pipelining import ScheduleGPipe

    import torch_xla_pp as xpp
    from torch_xla_pp import checkpoint, xla_compat

    dist.init_process_group("xla_pp")
    stage = xpp.PipelineStage(
        nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))),
        0,
        1,
        xpp.device(),
    )
    parameters = list(stage.submod.parameters())
    optimizer = torch.optim.AdamW(parameters)
    schedule = ScheduleGPipe(stage, 1, loss_fn=F.mse_loss)
    x = torch.randn(2, width)
    state = checkpoint.State(stages=stage, optimizer=optimizer)

    def step() -> None:
        schedule.step(x.to(xpp.device()), target=x.to(xpp.device()))
        optimizer.step()
        optimizer.zero_grad()
        xla_compat.sync_all()
        xla_compat.flush()
        xla_compat.wait_device()

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: checkpoint.save(state, f"{folder}/step-1"),
        "async_save": lambda: checkpoint.async_save(state, f"{folder}/step-2").result(),
        "load": lambda: checkpoint.load(state, f"{folder}/step-1"),
    }
    step()
    for call in calls.values():
        call()  # What is compiled and imported once does not count.
    found = {
        "all": sum(value.nbytes for value in parameters) * 3,
        "largest": max(value.nbytes for value in parameters),
    }
    for name, call in calls.items():
        step()
        found[name] = most_above(call)
    dist.destroy_process_group()
    return found


def most_above(call: Callable[[], Any]) -> int:
    """Return how far a call lets this process's resident memory rise, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS:")
    call()
    return _status("VmHWM:") - before


def _status(name: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index(name) + 1]) * 1024


def run(width: int, layers: int, devices: int) -> dict[str, int]:
    """Return what a new process measures."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import checkpoint_memory

    from torch_xla_pp.testing import Worlds

    with tempfile.TemporaryDirectory() as folder, Worlds() as worlds:
        (found,) = worlds.run(
            checkpoint_memory.measure,
            ranks=1,
            devices=devices,
            args=(width, layers, folder),
            timeout_s=1800,
        )
    return dict(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("width", 2048), ("layers", 8), ("devices", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = options.width, options.layers, options.devices
    found = [run(*sizes) for _ in range(options.rounds)]
    row = medians_of({name: [one[name] for one in found] for name in found[0]})
    if options.json:
        print(json.dumps(row))
        return
    for name in found[0]:
        share = row[name] / row["all"]
        size = text_of(row, name, ".0f", 2**-20)
        print(f"{name:>10} {size} MiB, {share:4.2f} of all")


if __name__ == "__main__":
    main()

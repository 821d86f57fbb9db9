"""How fast a run is saved, and how long training waits for it.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --ranks 2 --devices 2 --layers 8 --json

Each rank has a stage of square linear layers, trained by AdamW. In each round it is
saved three times: by `save`, by `async_save`, of which the time of the call and
the time until all is written count, and by torch.distributed.checkpoint's own `save`
of plain tensors on the host with the same names, shapes and bytes: the peer. Medians of
the slowest rank, with their quartiles; ratios are those of single rounds.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from spread import medians_of, ratios, text_of
from torch import nn
from torch.nn import functional as F

ROUNDS, WARM_UP = 7, 1


def measure(width: int, layers: int, folder: str) -> list[dict[str, float]]:
    """Return what each round of this rank took, in seconds, and its bytes."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.pipelining import ScheduleGPipe

    import torch_xla_pp as xpp
    from torch_xla_pp import checkpoint, xla_compat

    dist.init_process_group("xla_pp")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = xla_compat.num_local_devices()
    mesh = xpp.init_device_mesh("xla", (ranks, count), mesh_dim_names=("pp", "model"))
    blocks = {f"{rank}-{i}": nn.Linear(width, width) for i in range(layers)}
    stage = xpp.PipelineStage(
        Chain(blocks),
        rank,
        ranks,
        xpp.device(),
        mesh=mesh["model"],
        sharding={"*.weight": ("model", None)},
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    schedule = ScheduleGPipe(stage, ranks, loss_fn=F.mse_loss)
    x = torch.randn(2 * ranks, width)
    args = (x.to(xpp.device()),) if stage.is_first else ()
    kwargs = {"target": x.to(xpp.device())} if stage.is_last else {}
    state = checkpoint.State(stages=stage, optimizer=optimizer)
    found, plain = [], {}
    for number in range(WARM_UP + ROUNDS):
        schedule.step(*args, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
        plain = plain or on_host(stage.submod, optimizer)
        row: dict[str, float] = {"bytes": sum(v.nbytes for v in plain.values())}

        def timed(name: str, call: Callable[[], Any], own: dict[str, float]) -> Any:
            # What the optimizer left to be computed is no part of a save.
            xla_compat.sync_all()
            xla_compat.flush()
            dist.barrier()
            begin = time.perf_counter()
            result = call()
            own[name] = time.perf_counter() - begin
            return result

        path = Path(folder) / str(number)
        timed("total_s", lambda p=path: checkpoint.save(state, p / "sync"), row)
        begin = time.perf_counter()
        future = timed(
            "stall_s", lambda p=path: checkpoint.async_save(state, p / "async"), row
        )
        future.result()
        row["async_s"] = time.perf_counter() - begin
        timed(
            "peer_s",
            lambda p=path, v=plain: dcp.save(v, checkpoint_id=p / "peer"),
            row,
        )
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
        found.append(row)
    dist.destroy_process_group()
    return found[WARM_UP:]


class Chain(nn.Module):
    """Layers with names of their own."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply one after the other."""
        for layer in self.layers.values():
            x = layer(x)
        return x


def on_host(
    module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return tensors such as a checkpoint has, on the host."""
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = torch.randn(parameter.shape)
        for slot, value in optimizer.state[parameter].items():
            found[f"{name}.{slot}"] = torch.randn(value.shape)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("devices", 1), ("width", 2048), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where to write, by default a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # The workers import this file, so its functions must not be those of `__main__`.
    import checkpoint

    from torch_xla_pp.testing import Worlds

    with tempfile.TemporaryDirectory(dir=options.folder) as folder, Worlds() as worlds:
        ranks = worlds.run(
            checkpoint.measure,
            ranks=options.ranks,
            devices=options.devices,
            args=(options.width, options.layers, folder),
            timeout_s=1800,
        )
    rounds = {
        name: [max(rank[name] for rank in own) for own in zip(*ranks, strict=True)]
        for name in ("total_s", "stall_s", "async_s", "peer_s")
    }
    num_bytes = sum(rank[0]["bytes"] for rank in ranks)
    rounds |= {
        "mb_per_s": [num_bytes / total_s / 1e6 for total_s in rounds["total_s"]],
        "peer": [num_bytes / peer_s / 1e6 for peer_s in rounds["peer_s"]],
        "stall_ratio": ratios(rounds["stall_s"], rounds["total_s"]),
        "peer_ratio": ratios(rounds["peer_s"], rounds["total_s"]),
    }
    row = medians_of(rounds)
    if options.json:
        print(json.dumps({"bytes": int(num_bytes)} | row))
        return
    print(
        f"{num_bytes / 1e6:.0f} MB: save {row['total_s']:.2f} s, "
        f"{text_of(row, 'mb_per_s', '.0f')} MB/s, {text_of(row, 'peer_ratio')} of "
        f"DCP's own {row['peer']:.0f} MB/s of tensors on the host; async_save stalls "
        f"{row['stall_s']:.3f} s, {text_of(row, 'stall_ratio', '.1%')}, and takes "
        f"{row['async_s']:.2f} s"
    )


if __name__ == "__main__":
    main()

"""The processes of one side of `hybrid_time.py`, which starts them with torchrun.

Ours are two ranks of two devices each; the peer's four processes, two for each stage.
Processes of stage s have all their threads on core s. A turn begins when a number of
steps is in the store that `hybrid_time.py` keeps, 0 for the end.
"""

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gpt
import sides
import torch.distributed as dist
from pinning import check_pinned, pin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = {"dp": "data", "fsdp": "data", "tp": "model"}
LAYOUTS = tuple(AXES)
DEVICES = 2
COUNTERS = ("UncachedCompile", "CreateCompileHandles")
PATIENCE = timedelta(hours=2)


def key_of(side: str, turn: int) -> str:
    """Return where the store has the number of steps of a turn."""
    return f"{side} {turn}"


def answer_key_of(side: str, turn: int) -> str:
    """Return where the store has what was measured in a turn."""
    return f"{side} {turn} measured"


def rules_of(layout: str) -> Any:
    """Return our axis rules: a preset, and the names of the GPT's dimensions."""
    import torch_xla_pp as xpp
    from torch_xla_pp.mesh import presets

    preset = {
        "dp": presets.dp("data"),
        # What `reshard_after_forward=False` is for the peer.
        "fsdp": presets.fsdp("data", gather_once=True),
        "tp": presets.tp("model"),
    }[layout]
    return preset | xpp.AxisRules(
        parameters={
            "embed.weight": ("vocab", "embed"),
            "head.weight": ("vocab", "embed"),
            "head.bias": ("vocab",),
            "*.qkv.weight": ("heads", "embed"),
            "*.qkv.bias": ("heads",),
            "*.out.weight": ("embed", "heads"),
            "*.up.weight": ("mlp", "embed"),
            "*.up.bias": ("mlp",),
            "*.down.weight": ("embed", "mlp"),
        },
        activations={
            "*.qkv": ("batch", "sequence", "heads"),
            "*.out": ("batch", "norm_sequence", "embed"),
            "*.up": ("batch", "sequence", "mlp"),
            "*.down": ("batch", "norm_sequence", "embed"),
            "head": ("batch", "sequence", "vocab"),
        },
    )


def our_side(options: argparse.Namespace) -> tuple[sides.Side, Callable[[], None]]:
    """Return our side, and what waits until its devices are done."""
    import torch_xla_pp as xpp
    from torch_xla_pp import xla_compat

    xpp.device()
    dist.init_process_group("xla_pp")
    axis = AXES[options.layout]
    mesh = xpp.init_device_mesh(
        "xla", (sides.NUM_RANKS, DEVICES), mesh_dim_names=("pp", axis)
    )
    rules = rules_of(options.layout)

    def make(module: nn.Module, index: int, num_stages: int) -> Any:
        device, local = xpp.device(), mesh[axis]
        return xpp.PipelineStage(
            module, index, num_stages, device, mesh=local, sharding=rules
        )

    return side_of(make, options, dist.get_rank()), xla_compat.wait_device


def peer_side(options: argparse.Namespace) -> tuple[sides.Side, Callable[[], None]]:
    """Return the peer's side, and a wait that is none: its steps end when they return.

    A process has the rows of its place on the axis, all of them under `tp`.
    """
    dist.init_process_group("gloo")
    axis = AXES[options.layout]
    mesh = init_device_mesh(
        "cpu", (sides.NUM_RANKS, DEVICES), mesh_dim_names=("pp", axis)
    )
    make_stage = sides.peer(mesh.get_group("pp"))

    def make(module: nn.Module, index: int, num_stages: int) -> Any:
        split = {"dp": replicated, "fsdp": sharded, "tp": tensor_parallel}
        return make_stage(split[options.layout](module, mesh[axis]), index, num_stages)

    place = mesh.get_local_rank(axis)
    rows = slice(None) if axis == "model" else slice(place, None, DEVICES)
    rank = mesh.get_local_rank("pp")
    return side_of(make, options, rank, rows), lambda: None


def replicated(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a stage whose gradients torch averages over the axis."""
    return nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group())


def sharded(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a stage whose parameters torch gathers once a step."""
    from torch.distributed.fsdp import fully_shard

    for block in part.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(part, mesh=mesh, reshard_after_forward=False)
    return part


def tensor_parallel(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return a stage whose heads and hidden width torch splits over the axis."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: Any = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.qkv": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    held = {name for name in ("embed", "head") if getattr(part, name) is not None}
    plan = {k: v for k, v in plan.items() if k in held or k.startswith("blocks")}
    return parallelize_module(part, mesh, plan)


def side_of(
    make: sides.MakeStage,
    options: argparse.Namespace,
    rank: int,
    rows: slice = slice(None),
) -> sides.Side:
    """Return the part of a rank of the pipeline."""
    schedule = options.schedule
    return sides.Side(
        make,
        schedule,
        sides.stage_indices(schedule, rank),
        sides.num_stages_of(schedule),
        options.microbatches,
        gpt.SIZES[options.size],
        rows=rows,
    )


def num_compiles(is_ours: bool) -> int:
    """Return how often torch_xla has compiled a program or looked up a graph's."""
    if not is_ours:
        return 0
    from torch_xla.debug import metrics

    return sum(metrics.counter_value(name) or 0 for name in COUNTERS)


class Turns:
    """Do steps when they are asked for, and say what they took."""

    def __init__(self, options: argparse.Namespace) -> None:
        start = time.perf_counter()
        self._is_ours = options.side == "ours"
        self._side, self._wait = (our_side if self._is_ours else peer_side)(options)
        self.setup_s = time.perf_counter() - start

    def measure(self, num_steps: int) -> dict[str, Any]:
        """Do steps; every process calls, all return what they took together.

        Returns:
            Seconds of a step, processor time of all processes in one, the mean loss of
            the last one, and what was compiled meanwhile.
        """
        compiles = num_compiles(self._is_ours)
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self._side.step()
        self._wait()
        dist.barrier()
        step_s = (time.perf_counter() - start) / num_steps
        cpu_s = (time.process_time() - cpu_start) / num_steps
        losses = [loss.item() for loss in self._side.losses]
        compiles = num_compiles(self._is_ours) - compiles
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (cpu_s, losses, compiles))
        all_losses = [loss for _, values, _ in found for loss in values]
        return {
            "step_s": step_s,
            "cpu_s": sum(cpu for cpu, _, _ in found),
            "loss": sum(all_losses) / len(all_losses),
            "compiles": sum(count for _, _, count in found),
            "setup_s": self.setup_s,
        }


def main() -> None:
    """Be one process of a side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("ours", "peer"), required=True)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--size", choices=gpt.SIZES, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--cores", nargs="+", type=int, required=True)
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    stage = rank if options.side == "ours" else rank // DEVICES
    core = options.cores[stage % len(options.cores)]
    pin(core)
    store = dist.TCPStore("127.0.0.1", options.port, is_master=False, timeout=PATIENCE)
    turns = Turns(options)
    for turn in itertools.count():
        num_steps = int(store.get(key_of(options.side, turn)))
        if not num_steps:
            break
        measured = turns.measure(num_steps)
        check_pinned(core)
        if rank == 0:
            store.set(answer_key_of(options.side, turn), json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

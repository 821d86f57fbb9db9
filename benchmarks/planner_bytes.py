"""How near the memory that plans predict is to what their stages hold.

    python benchmarks/planner_bytes.py
    python benchmarks/planner_bytes.py --models gpt --schedules 1f1b zbv --json
    python benchmarks/planner_bytes.py --models gpt --schedules 1f1b zb1p --cuts 1 2 3 4

Plans are for devices whose forwards and backwards are programs of their own, and whose
sums of gradients are values of their own, and so the stages have them; with --joined
the last one has programs in one where it can, and sums are one as far as they may, as
stages on one CPU device usually do.

"mmt" has two branches and a join. With --cuts, two stages of the GPT are given, cut
inside of its second block, after so many of its works, which are as small as can be:
attention is within the first five.

Two ranks train a planned model with AdamW; nothing is timed, and the model is small, as
all that counts are sizes. Outputs are not returned, so they go when their gradients
come.
Columns, as the JSON names them:

model, schedule, remat, sharding, cut: The cell; with a sharding, ranks have two
    devices; without a cut the planner cuts.
rank: The rank; all its stages count together, at one time.
part: `state`: parameters, gradients and the optimizer's state. `kept`: the most at a
    time of what programs keep for others: saved values, what goes from I to W, outputs.
    While an I runs, what it makes is there with what it reads.
predicted_bytes: What the plan says of one device.
measured_bytes: What the stages hold on it, as `rank_memory()` counts it, without free
    memory.
free_bytes: Memory that waits for the next values at the peak, on ranks of one CPU
    device; no plan predicts it.
error: By which part of the measured bytes the prediction is too large.
"""

import argparse
import contextlib
import copy
import json
from itertools import groupby
from typing import Any
from unittest import mock

import gpt
import torch
import torch.distributed as dist
from torch import Tensor, nn

# zb1p runs from a table.
SCHEDULES = ("1f1b", "gpipe", "zb1p", "zbv")
MODELS = ("gpt", "tied", "mmt")
SHARDINGS = ("none", "dp", "fsdp", "tp")
SIZE = {"width": 128, "heads": 4, "layers": 4, "length": 64, "vocab": 256}
ROWS, MICROBATCHES = 4, 8
# For so many stages that no works are joined.
FINEST = 1000


class Model(nn.Module):
    """The GPT of the benchmarks in one piece."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.part = gpt.make_part(0, 1, SIZE)
        if is_tied:
            self.part.head.weight = self.part.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, `(B, L, vocab)`."""
        return self.part(tokens)


def model_of(name: str) -> nn.Module:
    """Return a model."""
    torch.manual_seed(0)
    return gpt.Branches(SIZE) if name == "mmt" else Model(name == "tied")


def batch_of(name: str) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the inputs of a step, and targets."""
    tokens, targets = gpt.make_batch(MICROBATCHES * ROWS // gpt.ROWS, SIZE)
    return (tokens, targets) if name == "mmt" else (tokens,), targets


def sharding_of(name: str) -> Any:
    """Return what the axes of parameters are, if the plan splits these."""
    from torch_xla_pp import AxisRules

    if name not in ("fsdp", "tp"):
        return None
    return AxisRules(
        parameters={
            "*.qkv.weight": ("heads", "embed"),
            "*.qkv.bias": ("heads",),
            "*.out.weight": ("embed", "heads"),
            "*.up.weight": ("mlp", "embed"),
            "*.up.bias": ("mlp",),
            "*.down.weight": ("embed", "mlp"),
            "*head.weight": ("vocab", "embed"),
            "*head.bias": ("vocab",),
            "*embed*.weight": ("vocab", "embed"),
        }
    )


def watch(stages: list[Any]) -> list[int]:
    """Let stages note the most they hold together without what is free."""
    most = [0]

    def watch_one(saved: Any) -> None:
        put, take = saved.put, saved.take
        read: dict[int, Any] = {}

        def put_noted(kind: str, microbatch: int, values: Any, sizes: Any) -> None:
            put(kind, microbatch, values, sizes)
            gone = read.pop(microbatch).keys() - values if kind == "residual" else ()
            held = saved.of_rank.num_bytes - saved.free_bytes
            most[0] = max(most[0], held + sum(sizes[name] for name in gone))

        def take_noted(kind: str, microbatch: int) -> Any:
            values = take(kind, microbatch)
            if kind == "saved":
                read[microbatch] = values
            return values

        saved.put, saved.take = put_noted, take_noted

    for stage in stages:
        watch_one(stage.saved)
    return most


def stages_of(work: Any, cut: int) -> list[list[str]]:
    """Return the operations of stages that are cut inside of the second block."""
    places = [i for i, one in enumerate(work.works) if "blocks.1" in one.module]
    border = places[0] + cut
    parts = work.works[:border], work.works[border:]
    return [[op for one in part for op in one.ops] for part in parts]


def measure_all(
    cells: list[dict[str, Any]], is_joined: bool
) -> list[list[dict[str, Any]]]:
    """Return the predicted and the measured bytes of this rank in each cell."""
    from torch_xla_pp import cpu
    from torch_xla_pp.compile import stage_programs

    dist.init_process_group("xla_pp")
    with contextlib.ExitStack() as apart:
        if not is_joined:
            apart.enter_context(mock.patch.object(cpu, "most_joined_bytes", lambda: 0))
            apart.enter_context(
                mock.patch.object(stage_programs, "_MOST_FLAT_BYTES", 0)
            )
        return [measure(cell) for cell in cells]


def measure(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the predicted and the measured bytes of this rank."""
    import torch_xla_pp as xpp

    model = model_of(cell["model"])
    args, targets = batch_of(cell["model"])
    example = tuple(x[:ROWS] for x in args)
    cut = cell["cut"]
    fine = {} if cut is None else {"max_stages": FINEST}
    work = xpp.trace_work(copy.deepcopy(model), example, **fine)
    plan = xpp.make_plan(
        work,
        rows=ROWS * MICROBATCHES,
        ranks=dist.get_world_size(),
        devices_per_rank=1 if cell["sharding"] == "none" else 2,
        microbatches=(MICROBATCHES,),
        replicas=(1,),
        schedules=(cell["schedule"],),
        remat=(cell["remat"],),
        sharding=(cell["sharding"],) if cell["sharding"] != "none" else ("dp",),
        rules=sharding_of(cell["sharding"]),
        stages=None if cut is None else stages_of(work, cut),
    )
    mesh = xpp.init_device_mesh("xla", plan=plan)
    pipe = xpp.pipeline(model, example, plan=plan)
    stages = pipe.build_stages(mesh)
    most = watch(stages)
    schedule = pipe.make_schedule(stages, loss_fn=gpt.loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    for _ in range(2):
        kwargs = {"target": targets, "losses": []} if is_last else {}
        given = args if is_first else ()
        schedule.step(*given, return_outputs=False, **kwargs)
        optimizer.step()
        optimizer.zero_grad()
    held = stages[0].rank_memory()
    predicted = plan.predicted.ranks[dist.get_rank()].bytes
    measured = {
        "state": held.state_bytes + held.optimizer_bytes,
        "kept": most[0],
    }
    expected = {
        "state": predicted.state,
        "kept": predicted.saved + predicted.passed + predicted.outputs,
    }
    return [
        {
            "part": part,
            "predicted_bytes": expected[part],
            "measured_bytes": measured[part],
            "free_bytes": max(held.held_bytes - most[0], 0) if part == "kept" else 0,
            "error": expected[part] / measured[part] - 1,
        }
        for part in measured
    ]


def rows_of(cells: list[dict[str, Any]], is_joined: bool) -> Any:
    """Yield a row for each cell, rank and part."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import planner_bytes

    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        for (_, sharding), group in groupby(cells, _job_of):
            own = list(group)
            found = worlds.run(
                planner_bytes.measure_all,
                ranks=2,
                devices=1 if sharding == "none" else 2,
                args=(own, is_joined),
                timeout_s=300.0 * len(own),
            )
            for cell, *by_rank in zip(own, *found, strict=True):
                for rank, parts in enumerate(by_rank):
                    for part in parts:
                        yield cell | {"rank": rank} | part


def _job_of(cell: dict[str, Any]) -> tuple[str, str]:
    return cell["model"], cell["sharding"]


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    cut = "" if row["cut"] is None else f" cut {row['cut']}"
    return (
        f"{row['model']:5} {row['schedule']:6} {row['remat']:5} {row['sharding']:4}"
        f"{cut} rank {row['rank']}  {row['part']:8}"
        f" predicted {row['predicted_bytes']:9.0f}"
        f"  measured {row['measured_bytes']:9}  error {100 * row['error']:+5.1f} %"
        + (f"  free {row['free_bytes']}" if row["free_bytes"] else "")
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--remat", nargs="+", default=["none", "full"])
    parser.add_argument("--shardings", nargs="+", choices=SHARDINGS, default=SHARDINGS)
    parser.add_argument("--cuts", nargs="+", type=int, default=[None])
    parser.add_argument("--joined", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = [
        {
            "model": model,
            "schedule": schedule,
            "remat": remat,
            "sharding": sharding,
            "cut": cut,
        }
        for model in options.models
        for sharding in options.shardings
        for schedule in options.schedules
        for remat in options.remat
        for cut in options.cuts
    ]
    for row in rows_of(cells, options.joined):
        print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()

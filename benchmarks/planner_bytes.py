"""How near the memory that plans predict is to what their stages hold.

    python benchmarks/planner_bytes.py
    python benchmarks/planner_bytes.py --models gpt --schedules 1f1b zbv --json

Two ranks train a planned model with AdamW; nothing is timed, and the model is small, as
all that counts are sizes. Nobody takes what `step` returns, so outputs go when their
gradients come.
Columns, as the JSON names them:

model, schedule, remat, sharding: The cell; `sharding` with the devices of a rank.
rank: The rank; all its stages count together.
part: `state`: parameters, gradients and the optimizer's state. `between`: the most that
    lies between programs: saved values, what goes from I to W, outputs.
predicted_bytes: What the plan says of one device.
measured_bytes: What `peak_memory()` says of it.
error: By which part of the measured bytes the prediction is too large.
"""

import argparse
import copy
import json
from typing import Any

import gpt
import torch
import torch.distributed as dist
from torch import Tensor, nn

SCHEDULES = ("1f1b", "gpipe", "zb1p", "zbv")
MODELS = ("gpt", "tied")
SIZE = {"width": 64, "heads": 4, "layers": 4, "length": 32, "vocab": 256}
ROWS, MICROBATCHES = 4, 8


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


def measure(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the predicted and the measured bytes of this rank."""
    import torch_xla_pp as xpp

    dist.init_process_group("xla_pp")
    model = Model(cell["model"] == "tied")
    tokens, targets = gpt.make_batch(MICROBATCHES * ROWS // gpt.ROWS, SIZE)
    work = xpp.trace_work(copy.deepcopy(model), (tokens[:ROWS],))
    plan = xpp.make_plan(
        work,
        rows=ROWS * MICROBATCHES,
        ranks=dist.get_world_size(),
        devices_per_rank=cell["devices"],
        microbatches=(MICROBATCHES,),
        replicas=(1,),
        schedules=(cell["schedule"],),
        remat=(cell["remat"],),
        sharding=("dp",),
    )
    mesh = xpp.init_device_mesh("xla", plan=plan)
    pipe = xpp.pipeline(model, (tokens[:ROWS],), plan=plan)
    stages = pipe.build_stages(mesh)
    schedule = pipe.make_schedule(stages, loss_fn=gpt.loss_fn)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    for _ in range(2):
        kwargs = {"target": targets, "losses": []} if is_last else {}
        schedule.step(*((tokens,) if is_first else ()), **kwargs)
        optimizer.step()
        optimizer.zero_grad()
    held = [stage.peak_memory() for stage in stages]
    predicted = plan.predicted.ranks[dist.get_rank()].bytes
    measured = {
        "state": sum(memory.state_bytes + memory.optimizer_bytes for memory in held),
        "between": sum(memory.held_bytes for memory in held),
    }
    expected = {
        "state": predicted.state,
        "between": predicted.saved + predicted.passed + predicted.outputs,
    }
    return [
        {
            "part": part,
            "predicted_bytes": expected[part],
            "measured_bytes": measured[part],
            "error": expected[part] / measured[part] - 1,
        }
        for part in measured
    ]


def rows_of(cells: list[dict[str, Any]]) -> Any:
    """Yield a row for each cell, rank and part."""
    # The workers import this file, so its functions must not be those of `__main__`.
    import planner_bytes

    from torch_xla_pp.testing import Worlds

    with Worlds() as worlds:
        for cell in cells:
            found = worlds.run(
                planner_bytes.measure, ranks=2, devices=cell["devices"], args=(cell,)
            )
            shown = {k: v for k, v in cell.items() if k != "devices"}
            shown["sharding"] = f"dp {cell['devices']}"
            for rank, parts in enumerate(found):
                for part in parts:
                    yield shown | {"rank": rank} | part


def line_of(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return (
        f"{row['model']:5} {row['schedule']:6} {row['remat']:5} {row['sharding']:5}"
        f" rank {row['rank']}  {row['part']:8} predicted {row['predicted_bytes']:9.0f}"
        f"  measured {row['measured_bytes']:9}  error {100 * row['error']:+5.1f} %"
    )


def main() -> None:
    """Run the cells that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--remat", nargs="+", default=["none", "full"])
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = [
        {"model": model, "schedule": schedule, "remat": remat, "devices": devices}
        for model in options.models
        for devices in options.devices
        for schedule in options.schedules
        for remat in options.remat
    ]
    for row in rows_of(cells):
        print(json.dumps(row) if options.json else line_of(row), flush=True)


if __name__ == "__main__":
    main()

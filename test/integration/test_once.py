"""What a step does once: gather weights, and add gradients up over devices."""

import copy
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from integration.sharded import (
    LENGTH,
    PATTERNS,
    ROWS,
    WIDTH,
    Model,
    difference,
    loss_fn,
)
from integration.training import COUNTERS
from joining import join

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

# Backwards of weights come last, so that sums are taken over in both ways.
TABLE = "0F0,0F1,0B0,0I1,0W1\n"


def build(model: Model) -> Any:
    mesh = xpp.init_device_mesh("xla", (1, 2), mesh_dim_names=("pp", "data"))
    return xpp.PipelineStage(
        model,
        0,
        1,
        xpp.device(),
        group=mesh.get_group("pp"),
        mesh=mesh["data",],
        sharding=presets.fsdp("data", gather_once=True) | PATTERNS,
    )


def gradients_that_are_kept() -> dict[str, Any]:
    """Train without zeroing gradients; return errors and what was compiled late."""
    join()
    torch.manual_seed(0)
    reference = Model(num_blocks=1)
    stage = build(copy.deepcopy(reference))
    schedule = xpp.ScheduleFromTable([stage], TABLE, loss_fn)
    own, expected = dict(stage.submod.named_parameters()), reference.named_parameters()
    named, late = dict(expected), 0.0
    optimizers = [
        torch.optim.SGD(m.parameters(), 0.1) for m in (reference, stage.submod)
    ]
    errors: dict[str, float] = {}
    for step in range(4):
        before = [metrics.counter_value(name) or 0 for name in COUNTERS]
        x, y = torch.randn(2, 2 * ROWS, LENGTH, WIDTH)
        losses: list[torch.Tensor] = []
        schedule.step(x, target=y, losses=losses)
        after = [metrics.counter_value(name) or 0 for name in COUNTERS]
        # The first step starts from no gradients, the second from some.
        late += sum(after) - sum(before) if step > 1 else 0
        chunks = zip(x.split(ROWS), y.split(ROWS), strict=True)
        found = [loss_fn(reference(mb_x), mb_y) for mb_x, mb_y in chunks]
        torch.stack(found).mean().backward()
        for i, loss in enumerate(losses):
            errors[f"loss {i} of step {step}"] = difference(loss, found[i].detach())
        for name, parameter in own.items():
            key = f"{name} in step {step}"
            errors[key] = difference(parameter.grad, named[name].grad)
        for optimizer in optimizers:
            optimizer.step()
        torch_xla.sync()
    return {
        "errors": errors,
        "late": late,
        "kept": len(stage.model.state.gathered._values),
        "memory": stage.peak_memory().state_bytes,
        "explanation": stage.explain(),
    }


def test_a_step_gathers_and_reduces_once_and_drops_what_it_gathered(
    worlds: Worlds,
) -> None:
    (found,) = worlds.run(gradients_that_are_kept, ranks=1, devices=2)
    assert {k: v for k, v in found["errors"].items() if not v < 1e-5} == {}
    assert found["late"] == 0
    programs = [program.name for program in found["explanation"].programs]
    assert programs[0] == "gathering of weights"
    assert programs[-1] == "gradient reduction"
    assert found["explanation"].reduced_per_microbatch == {}
    assert found["kept"] == 0
    names = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    sizes = {n: 4 * p.numel() for n, p in Model(num_blocks=1).named_parameters()}
    gathered = sum(sizes[f"blocks.0.{name}"] for name in names)
    whole = sum(sizes.values())
    shards = whole - gathered // 2
    # Parameters, gradients so far, copies of what is gathered, whole sums of gradients.
    assert found["memory"] == 2 * shards + gathered + whole

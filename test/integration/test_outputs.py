"""The last stage keeps the outputs of a step only for those who take them."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

WIDTH, CLASSES, ROWS, MICROBATCHES = 4, 1237, 12, 6


def eager_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cannot be traced: what it computes depends on a value."""
    scale = 2.0 if bool((target.detach().cpu() > -1).all()) else 1.0
    return F.cross_entropy(output, target) * scale


def start(
    schedule: str = "1F1B", loss_fn: Callable[..., Tensor] = F.cross_entropy
) -> tuple[Any, Any, nn.Module]:
    """Join; return this rank's stage, the schedule and the model on the host."""
    rank = join().rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    part = copy.deepcopy(model[rank])
    stage = xpp.PipelineStage(part, rank, 2, xpp.device())
    kind = get_schedule_class(schedule)
    return stage, kind(stage, MICROBATCHES, loss_fn=loss_fn), model


def arguments(stage: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (ROWS,), generator=generator)
    if stage.is_first:
        return (x,), {}
    return (), {"target": y.to(xpp.device()), "losses": []}


def num_logits() -> int:
    """Return how many values that look like a microbatch's logits are alive."""
    alive = [x for x in gc.get_objects() if type(x) is Tensor and is_logits(x)]
    return len({handle for x in alive for handle in handles(x)})


def is_logits(value: Tensor) -> bool:
    """Return whether a value looks like a microbatch's logits.

    gc also lists values that only autograd holds; its thread may drop one meanwhile,
    which leaves an object without a tensor.
    """
    try:
        shape = (ROWS // MICROBATCHES, CLASSES)
        return value.device.type == "xla" and value.shape == shape
    except RuntimeError:
        return False


def handles(value: Tensor) -> list[int]:
    """Return the handle of a value; none if it is pending or on the host."""
    try:
        return xla_compat.data_handles([value])
    except RuntimeError:
        return []


def watch_logits(
    schedule: str, loss_fn: Callable[..., Tensor], takes_outputs: bool
) -> list[int]:
    """Return how many logits, and gradients of them, lay before each forward."""
    stage, runner, _ = start(schedule, loss_fn)
    args, kwargs = arguments(stage)
    runner.step(*args, **kwargs)
    gc.collect()  # what compiling has left, once
    forward, found = stage.forward_one_chunk, []

    def watching(*inputs: Any) -> Any:
        xla_compat.wait_device()
        found.append(num_logits())
        return forward(*inputs)

    stage.forward_one_chunk = watching
    if takes_outputs:
        output = runner.step(*args, **kwargs)
        assert (output is None) != stage.is_last
    else:
        runner.step(*args, **kwargs)
    del stage.forward_one_chunk
    return found


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, eager_loss])
def test_under_1f1b_no_logits_wait_for_the_next_forward(
    loss_fn: Callable[..., Tensor],
) -> None:
    args = ("1F1B", loss_fn, False)
    # Autograd must not have run on the CPU alone in a process that runs a loss eagerly.
    with Worlds() as own:
        _, found = own.run(watch_logits, ranks=2, args=args)
    # The schedule gets none, as the forward waits for the loss.
    assert found == [0] * MICROBATCHES


def test_under_gpipe_only_gradients_wait() -> None:
    with Worlds() as own:  # as above
        _, found = own.run(watch_logits, ranks=2, args=("GPipe", eager_loss, False))
    assert found == [*range(MICROBATCHES)]


def test_under_gpipe_nothing_waits_for_a_loss_that_is_a_program(
    worlds: Worlds,
) -> None:
    _, found = worlds.run(watch_logits, ranks=2, args=("GPipe", F.cross_entropy, False))
    assert found == [0] * MICROBATCHES


def test_outputs_that_the_caller_takes_are_kept(worlds: Worlds) -> None:
    _, found = worlds.run(watch_logits, ranks=2, args=("1F1B", F.cross_entropy, True))
    assert found == [*range(MICROBATCHES)]


def step_in_all_ways() -> dict[str, Any]:
    """Return how many outputs were kept by each call, and errors of what it gave."""
    stage, schedule, model = start()
    args, kwargs = arguments(stage)
    (x,), _ = arguments(type("First", (), {"is_first": True}))
    with torch.no_grad():
        expected = model(x)
    kept: dict[str, int] = {}
    outputs: dict[str, Any] = {}

    def count(way: str) -> None:
        kept[way] = len(stage.output_chunks)

    schedule.step(*args, **kwargs)
    count("a statement")
    outputs["assigned"] = schedule.step(*args, **kwargs)
    count("assigned")
    schedule.step(*args, **kwargs) if stage.is_first else schedule.step(**kwargs)
    count("a choice")
    schedule.step(*args, return_outputs=True, **kwargs)
    count("asked for")
    outputs["not asked for"] = schedule.step(*args, return_outputs=False, **kwargs)
    count("not asked for")
    outputs["passed on"] = (lambda: schedule.step(*args, **kwargs))()
    count("passed on")
    schedule.eval(*args, **kwargs)
    count("an eval")
    outputs["eval"] = schedule.eval(*args, **kwargs)
    count("eval")
    errors = {
        way: None if output is None else float((output.cpu() - expected).abs().max())
        for way, output in outputs.items()
    }
    return {"kept": kept, "errors": errors}


def test_outputs_are_kept_if_asked_for_or_used(worlds: Worlds) -> None:
    _, found = worlds.run(step_in_all_ways, ranks=2)
    assert found["kept"] == {
        "a statement": 0,
        "assigned": MICROBATCHES,
        "a choice": 0,
        "asked for": MICROBATCHES,
        "not asked for": 0,
        "passed on": MICROBATCHES,
        "an eval": 0,
        "eval": MICROBATCHES,
    }
    assert found["errors"].pop("not asked for") is None
    assert {k: e for k, e in found["errors"].items() if e is None or e > 1e-6} == {}


def merge_by_hand() -> list[int]:
    stage, _, _ = start()
    schedule = Schedule1F1B(
        stage,
        MICROBATCHES,
        loss_fn=F.cross_entropy,
        output_merge_spec=TensorChunkSpec(1),  # type: ignore[no-untyped-call]
    )
    args, kwargs = arguments(stage)
    schedule.step(*args, **kwargs)
    output = schedule.step(*args, **kwargs)
    return [] if output is None else list(output.shape)


def test_a_users_way_to_merge_outlives_steps_without_outputs(worlds: Worlds) -> None:
    _, shape = worlds.run(merge_by_hand, ranks=2)
    assert shape == [ROWS // MICROBATCHES, MICROBATCHES * CLASSES]


def grow(counts: tuple[int, int]) -> float:
    """Return by how many MiB more microbatches let the process grow."""
    rank = join().rank()
    classes, rows = 1 << 15, 16
    part = nn.Linear(WIDTH, WIDTH if rank == 0 else classes)
    stage = xpp.PipelineStage(part, rank, 2, xpp.device())
    largest = []
    for count in counts:
        schedule = Schedule1F1B(stage, count, loss_fn=F.cross_entropy)
        x = torch.zeros(rows * count, WIDTH)
        y = torch.zeros(rows * count, dtype=torch.long)
        for _ in range(3):
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y.to(xpp.device()))
            xla_compat.wait_device()
        status = dict(
            line.split(":", 1) for line in open("/proc/self/status").readlines()
        )
        largest.append(int(status["VmHWM"].split()[0]) / 1024)
    return largest[1] - largest[0]


def test_a_process_does_not_grow_with_microbatches(worlds: Worlds) -> None:
    # Logits of a microbatch have 2 MiB: kept, they would be 120 MiB, and 120 merged.
    for grown in worlds.run(grow, ranks=2, args=((4, 64),)):
        assert grown < 40

"""A state has what a run has, and taking it costs no program."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.debug.metrics as metrics
from torch import Tensor, nn

import torch_xla_pp as xpp
from checkpoint.runs import Layout, Run
from checkpoint.test_any_to_any import assert_same
from checkpoint.test_faults import error_text
from torch_xla_pp.checkpoint import State, saving
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

COUNTERS = ("UncachedCompile", "CreateCompileHandles")


def counted() -> list[int]:
    return [metrics.counter_value(name) or 0 for name in COUNTERS]


def compiles_nothing(folder: str) -> None:
    dist.init_process_group("xla_pp")
    run = Run(Layout(axes=("data", "model"), sizes=(2, 2)))
    for _ in range(3):
        run.step()
    xpp.checkpoint.save(run.state, f"{folder}/step-3")
    run.step()
    xpp.checkpoint.async_save(run.state, f"{folder}/step-4").result()
    before = counted()
    xpp.checkpoint.save(run.state, f"{folder}/step-4")
    xpp.checkpoint.async_save(run.state, f"{folder}/step-5").result()
    assert counted() == before

    # The values are those of the call, although a step comes before they are read.
    write = saving.Writer.write_data

    def late(*args: Any) -> Any:
        stepped.wait(60)
        return write(*args)

    stepped = threading.Event()
    saving.Writer.write_data = late
    expected = run.values()
    before = counted()
    future = xpp.checkpoint.async_save(run.state, f"{folder}/late")
    loss = run.step()
    assert counted() == before
    stepped.set()
    future.result()
    saving.Writer.write_data = write
    assert not torch.equal(run.values()["embed.weight"], expected["embed.weight"])
    xpp.checkpoint.load(run.state, f"{folder}/late")
    assert_same(run.values(), expected)
    assert run.step() == loss

    # One that is made of the schedule alone, with a scheduler of the rate.
    values, rate = run.values(), run.optimizer.param_groups[0]["lr"]
    other = State(schedule=run.schedule, optimizer=[run.optimizer])
    xpp.checkpoint.save(other, f"{folder}/step-6")
    run.step()
    run.optimizer.param_groups[0]["lr"] = 7.0
    xpp.checkpoint.load(other, f"{folder}/step-6")
    assert_same(run.values(), values)
    assert run.optimizer.param_groups[0]["lr"] == rate
    rates = State(stages=run.stages, schedule=run.rates)
    xpp.checkpoint.save({"app": rates, "best": 4}, f"{folder}/step-7")
    run.rates.last_epoch = 0
    both: dict[str, Any] = {"app": rates, "best": 0}
    xpp.checkpoint.load(both, f"{folder}/step-7")
    assert (run.rates.last_epoch, both["best"]) == (6, 4)
    # There is nothing of an optimizer.
    assert "no state of an optimizer" in error_text(
        lambda: xpp.checkpoint.load({"app": other}, f"{folder}/step-7")
    )
    with pytest.raises(ValueError, match="State: expected the stages of this rank"):
        State(stages=[])
    with pytest.raises(TypeError, match="expected a State or a dict with one"):
        xpp.checkpoint.save({"best": 4}, folder)
    refuses_other_kinds(run, folder)
    with pytest.raises(TypeError, match="expected what LoadPlanner has filled"):
        other.load_state_dict(other.state_dict())
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="got one that was destroyed"):
        xpp.checkpoint.save(run.state, f"{folder}/step-8")


def refuses_other_kinds(run: Run, folder: str) -> None:
    """Whatever is of another kind is named; nothing of it is left in the folder."""
    stages, module = run.stages, run.stages[0].submod
    with pytest.raises(TypeError, match="expected stages, got Graph"):
        State(stages=module)
    with pytest.raises(TypeError, match="expected optimizers, got Parameter, "):
        State(stages=stages, optimizer=module.parameters())
    with pytest.raises(TypeError, match=r"expected a dict by texts .*, got \['1'\]"):
        State(stages=stages, extra={1: 2})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"differ before a dot, got a\.b and a\."):
        State(stages=stages, extra={"a": {"b": 3}, "a.b": 2})
    with pytest.raises(TypeError, match="dict with one, got PipelineStage"):
        xpp.checkpoint.save(stages[0], folder)
    with pytest.raises(ValueError, match="expected the path of a folder, got '.'"):
        xpp.checkpoint.save(run.state, "")
    assert "got a folder of other things" in error_text(
        lambda: xpp.checkpoint.save(run.state, folder)
    )
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    assert "betas" in (
        text := error_text(
            lambda: xpp.checkpoint.load(
                State(stages=stages, optimizer=other), f"{folder}/step-6"
            )
        )
    )
    assert "in place of SGD with dampening, " in text
    assert "betas" not in other.param_groups[0]
    # Whoever calls, what is loaded can be trained.
    with torch.inference_mode():
        xpp.checkpoint.load(run.state, f"{folder}/step-5")
    run.step()
    hidden = {path.name for path in Path(folder).iterdir() if path.name[0] == "."}
    assert not hidden


def test_saving_compiles_nothing(worlds: Worlds, tmp_path: Path) -> None:
    args = (str(tmp_path),)
    worlds.run(compiles_nothing, ranks=1, devices=4, args=args, timeout_s=400)


class Counting(nn.Module):
    """A module with state that is no tensor, and a split with a remainder."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({str(index): nn.Linear(3, 5)})
        self.register_buffer(f"sum{index}", torch.zeros(7))
        self.calls: dict[int, int] = {}
        self._index = index

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Part(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.own = nn.ModuleDict({str(index): Counting(index)})


def keeps_all(folder: str) -> list[Tensor]:
    dist.init_process_group("xla_pp")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = xpp.PipelineStage(Part(rank), rank, 2, xpp.device())
    part = stage.submod.own[str(rank)]
    state = State(stages=stage, extra={"mine": [rank], f"of-{rank}": {3: rank}})
    torch.manual_seed(10 + rank)
    drawn = torch.rand(1)
    part.calls = {rank: 4}
    with torch.no_grad():
        getattr(part, f"sum{rank}").add_(2)
    xpp.checkpoint.save(state, f"{folder}/step-1")
    following = torch.rand(1)
    part.calls = {}
    with torch.no_grad():
        for value in stage.submod.state_dict().values():
            if isinstance(value, Tensor):
                value.zero_()
    state.extra["mine"] = []
    hooked: list[int] = []
    weight = part.parts[str(rank)].weight
    weight.grad = torch.ones_like(weight)
    weight.register_post_accumulate_grad_hook(lambda _: hooked.append(rank))
    xpp.checkpoint.load(state, f"{folder}/step-1")
    # As torch's own load, which copies in place.
    assert torch.equal(weight.grad.cpu(), torch.ones(5, 3))
    weight.sum().backward()
    assert hooked and torch.equal(weight.grad.cpu(), torch.full((5, 3), 2.0))
    # A view that is made after it writes into what was loaded.
    loaded = weight.detach().cpu()
    with torch.no_grad():
        weight[0].mul_(2)
        assert torch.equal(weight.cpu()[1:], loaded[1:])
        weight[0].div_(2)
    assert part.calls == {rank: 4}
    assert state.extra == {"mine": [0], f"of-{rank}": {3: rank}}
    assert torch.equal(torch.rand(1), following) and not torch.equal(drawn, following)
    assert torch.equal(getattr(part, f"sum{rank}").cpu(), torch.full((7,), 2.0))

    path = f"{folder}/step-{1 + rank}"
    text = error_text(lambda: xpp.checkpoint.load(state, path))
    assert "expected one folder on all ranks, got rank 0: " in text
    dist.destroy_process_group()
    return [value.detach().cpu() for value in part.parts.parameters()]


def test_a_state_has_what_is_no_tensor(worlds: Worlds, tmp_path: Path) -> None:
    args = (str(tmp_path),)
    found = worlds.run(keeps_all, ranks=2, devices=2, args=args, timeout_s=300)
    for rank, (weight, _) in enumerate(found):
        torch.manual_seed(rank)
        assert torch.equal(weight, nn.Linear(3, 5).weight)

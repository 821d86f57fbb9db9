"""A run goes on from a checkpoint as if there had been no break, at any layout."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import torch_xla_pp as xpp
from checkpoint.runs import Layout, Net, Run, Trained, train
from torch_xla_pp.checkpoint import LoadPlanner, SavePlanner
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

CHAIN = (
    Layout(),
    Layout(ranks=2, axes=("data",), sizes=(2,)),
    Layout(schedule="ZBVZeroBubble", ranks=2, axes=("model",), sizes=(2,)),
    Layout(schedule="Interleaved1F1B", axes=("data", "model"), sizes=(2, 2)),
    Layout(ranks=2, replicas=2),
    Layout(ranks=4),
    Layout(schedule="Interleaved1F1B", ranks=2, axes=("data",), sizes=(2,)),
    Layout(replicas=2, axes=("model",), sizes=(2,)),
)
STEPS = 2


def run(worlds: Worlds, layout: Layout, *args: object) -> list[Trained]:
    return worlds.run(
        train,
        ranks=layout.ranks * layout.replicas,
        devices=layout.devices,
        args=(layout, *args),
        timeout_s=500,
    )


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join what ranks have; of replicas that differ the first counts."""
    return {name: value for part in reversed(parts) for name, value in part.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare bits; a tied parameter may have its other name."""
    assert found
    for name, value in found.items():
        other = name.replace("head.weight", "embed.weight")
        wanted = expected[name] if name in expected else expected[other]
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(ranks=2, axes=("data",), sizes=(2,)),
        Layout(schedule="ZBVZeroBubble", replicas=2),
    ],
    ids=["chain", "replicas"],
)
def test_a_run_goes_on_bit_by_bit_at_the_same_layout(
    worlds: Worlds, tmp_path: Path, layout: Layout, is_async: bool
) -> None:
    folder = str(tmp_path / "step-3")
    saved = run(worlds, layout, 3, "", folder, is_async)
    straight = run(worlds, layout, 6)
    resumed = run(worlds, layout, 3, folder)
    for before, after, whole in zip(saved, resumed, straight, strict=True):
        assert_same(after.loaded, before.values)
        assert_same(after.values, whole.values)
        assert after.losses == whole.losses[3:]
        assert (after.rate, after.note) == (whole.rate, 5)


@pytest.mark.timeout(1800)
def test_a_run_goes_on_at_any_other_layout(worlds: Worlds, tmp_path: Path) -> None:
    """It goes through all of them, and its losses are those of one at the first."""
    straight = run(worlds, CHAIN[0], STEPS * len(CHAIN))[0].losses
    source, expected = "", {}
    for number, layout in enumerate(CHAIN):
        target = str(tmp_path / f"step-{number}")
        trained = run(worlds, layout, STEPS, source, target)
        if source:
            for rank in trained:
                assert_same(rank.loaded, expected)
        wanted = straight[number * STEPS :][:STEPS]
        assert trained[0].losses == pytest.approx(wanted, rel=1e-5)
        source = target
        expected = joined([rank.values for rank in trained])


def metadata_of(folder: str) -> Any:
    return pickle.loads((Path(folder) / ".metadata").read_bytes())


def reads_its_part(folder: str) -> tuple[int, int]:
    """Return how many bytes this rank reads, and how many its part has."""
    dist.init_process_group("xla_pp")
    state = Run(Layout(ranks=2)).state
    read = []

    class Counting(xpp.checkpoint.saving.Reader):
        def read_data(self, *args: Any) -> Any:
            done = super().read_data(*args)
            read.append(self.num_bytes)
            return done

    xpp.checkpoint.saving.Reader = Counting
    xpp.checkpoint.load(state, folder)
    own = {0: ("embed", "blocks.0", "blocks.1"), 1: ("blocks.2", "blocks.3")}
    names = own[dist.get_rank()]
    whole = ("optim.param_groups", "progress", "extra", "schedule", "rng.0")
    # The copy of the tied weight, with what the optimizer keeps for it.
    tied = ("model.embed", "optim.state.embed")
    starts = [f"{kind}.{name}." for kind in ("model", "optim.state") for name in names]
    starts += [*whole, *tied, f"rng.{dist.get_rank()}"]
    metadata = metadata_of(folder)
    needed = {
        (place.relative_path, place.offset, place.length)
        for index, place in metadata.storage_data.items()
        if index.fqn.startswith(tuple(starts))
    }
    dist.destroy_process_group()
    return read[0], sum(length for _, _, length in needed)


def test_each_byte_is_written_once_and_read_where_it_is_needed(
    worlds: Worlds, tmp_path: Path
) -> None:
    folder = str(tmp_path / "step-1")
    layout = Layout(ranks=1, replicas=2, axes=("data", "model"), sizes=(2, 2))
    run(worlds, layout, 1, "", folder)
    places = metadata_of(folder).storage_data
    files = {place.relative_path for place in places.values()}
    parts = {(p.relative_path, p.offset, p.length) for p in places.values()}
    size = sum((tmp_path / "step-1" / name).stat().st_size for name in files)
    assert sum(length for _, _, length in parts) == size
    # Both replicas write, and each name of a tied parameter has the same bytes.
    assert {name[: len("__0_")] for name in files} == {"__0_", "__1_"}
    names = {index.fqn: place for index, place in places.items()}
    assert names["model.head.weight"] == names["model.embed.weight"]
    chunks = metadata_of(folder).state_dict_metadata["model.blocks.0.up.weight"].chunks
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 0), (8, 0)]

    for read, needed in worlds.run(
        reads_its_part, ranks=2, args=(folder,), timeout_s=300
    ):
        assert read == needed < size


def test_plain_pytorch_loads_what_was_saved(worlds: Worlds, tmp_path: Path) -> None:
    folder, file = tmp_path / "step-2", tmp_path / "whole.pt"
    layout = Layout(ranks=2, axes=("model",), sizes=(2,))
    expected = joined([rank.values for rank in run(worlds, layout, 2, "", str(folder))])
    dcp_to_torch_save(folder, file)
    saved = torch.load(file, weights_only=False)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(saved["model"])
    set_optimizer_state_dict(model, optimizer, saved["optim"])
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            assert torch.equal(value, expected[f"{name}:{slot}"])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def plain_checkpoint(folder: Path, style: str) -> dict[str, Tensor]:
    """Save a trained model without us; return its values."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=style == "titan")
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    state = model.state_dict()
    whole = {"model": state, "optim": kept}
    if style == "titan":
        whole = {**state, "optimizer": kept, "loader": {"position": 40}, "note": 3}
    writer = dcp.FileSystemWriter(folder)
    dcp.save(whole, storage_writer=writer, no_dist=True)
    found = {name: value.clone() for name, value in state.items()}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state[parameter].items():
            found[f"{name}:{slot}"] = value
    return found


def loads_plain(folder: str, strict: bool) -> tuple[dict[str, Tensor], float, int]:
    dist.init_process_group("xla_pp")
    layout = Layout(schedule="ZBVZeroBubble", axes=("model",), sizes=(2,))
    run = Run(layout)
    xpp.checkpoint.load(run.state, folder, strict=strict)
    run.step()
    rate = run.optimizer.param_groups[0]["lr"]
    xpp.checkpoint.load(run.state, folder, strict=strict)
    found = run.values(), rate, run.loader.position
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("style", ["plain", "titan"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_plain_pytorch_has_saved_is_loaded(
    worlds: Worlds, tmp_path: Path, style: str
) -> None:
    expected = plain_checkpoint(tmp_path / "plain", style)
    args = (str(tmp_path / "plain"), False)
    ((values, rate, position),) = worlds.run(
        loads_plain, ranks=1, devices=2, args=args, timeout_s=300
    )
    assert_same(values, expected)
    assert rate == 0.5
    assert position == (40 if style == "titan" else 1)


def by_torch(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save and load with torch's functions; return values before and after."""
    dist.init_process_group("xla_pp")
    layout = Layout(ranks=2, axes=("model",), sizes=(2,))
    run = Run(layout)
    run.step()
    dcp.save({"app": run.state}, checkpoint_id=folder, planner=SavePlanner())
    before = run.values()
    after = run.step()
    dcp.load({"app": run.state}, checkpoint_id=folder, planner=LoadPlanner())
    found = before, run.values()
    assert run.step() == after

    staged = f"{folder}-async"
    future = dcp.async_save(
        {"app": run.state}, checkpoint_id=staged, planner=SavePlanner()
    )
    expected = run.values()
    run.step()
    future.result()
    dcp.load({"app": run.state}, checkpoint_id=staged, planner=LoadPlanner())
    assert_same(run.values(), expected)
    dist.destroy_process_group()
    return found


def test_torchs_own_functions_take_a_state(worlds: Worlds, tmp_path: Path) -> None:
    args = (str(tmp_path / "saved"),)
    for before, after in worlds.run(by_torch, ranks=2, devices=2, args=args):
        assert_same(after, before)

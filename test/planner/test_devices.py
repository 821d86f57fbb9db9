"""Figures of devices, their files, and what they predict."""

import dataclasses
import json
from pathlib import Path

import pytest
from planner_models import gpt

from torch_xla_pp.planner.devices import (
    DEVICES,
    Cluster,
    DeviceSpec,
    link_between_ranks,
)
from torch_xla_pp.planner.evaluation import Evaluator
from torch_xla_pp.planner.strategies import Strategy, ring_s, strategies_for
from torch_xla_pp.planner.work_costs import WorkTable

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    device = DEVICES[name]
    assert device.source
    path = tmp_path / "device.json"
    device.to_json(path)
    assert DeviceSpec.named(str(path)) == device == DeviceSpec.named(name)
    assert device.is_verified == (name == "cpu")


def test_faulty_figures_are_named_at_once() -> None:
    data = json.loads(DEVICES["cpu"].to_json())
    data["efficiency"] = float("nan")
    data["memory_bytes"] = -1
    del data["action_s"]
    with pytest.raises(ValueError, match="torch_xla_pp device 1") as caught:
        DeviceSpec.from_json(json.dumps(data) + "\n")
    text = str(caught.value)
    assert "efficiency: expected a finite number, got nan" in text
    assert "action_s: expected this field, got none" in text
    with pytest.raises(ValueError, match="expected memory_bytes above 0, got -1"):
        dataclasses.replace(DEVICES["cpu"], memory_bytes=-1)
    with pytest.raises(ValueError, match="efficiency above 0 and up to 1, got 2"):
        dataclasses.replace(DEVICES["cpu"], efficiency=2)


def test_strategies_use_all_devices_of_a_rank() -> None:
    found = [*strategies_for(4)]
    assert all(s.num_devices == 4 for s in found)
    assert {(s.data, s.model, s.has_fsdp) for s in found} == {
        (4, 1, False),
        (4, 1, True),
        (2, 2, False),
        (2, 2, True),
        (1, 4, False),
    }
    assert [s.presets for s in strategies_for(2, ["tp"])] == [("tp",)]


def test_a_ring_moves_all_but_one_share() -> None:
    assert ring_s(100, 4, 25, 1) == 1 + 3
    assert ring_s(100, 1, 25, 1) == 0


def works_of(strategy: Strategy) -> tuple[Evaluator, Strategy]:
    device = dataclasses.replace(DEVICES["v5p"], action_s=0.0)
    network = link_between_ranks(device)
    cluster = Cluster(device=device, num_devices=4, network=network)
    return Evaluator(table=WorkTable(gpt(2, 256, 128)), cluster=cluster), strategy


def test_shares_of_state_and_saved_values_follow_the_strategy() -> None:
    evaluator, _ = works_of(Strategy())
    one = evaluator.works(Strategy(), 8)
    data = evaluator.works(Strategy(data=4), 8)
    fsdp = evaluator.works(Strategy(data=4, has_fsdp=True), 8)
    model = evaluator.works(Strategy(model=4), 8)
    state = one.parameter_bytes.sum()
    assert data.parameter_bytes.sum() == state
    assert fsdp.parameter_bytes.sum() == pytest.approx(state / 4)
    assert model.parameter_bytes.sum() == pytest.approx(state / 4)
    saved = one.saved["none"].sum()
    for split in (data, fsdp, model):
        assert split.saved["none"].sum() == pytest.approx(saved / 4)
    assert fsdp.gathered_bytes.sum() == pytest.approx(state)


def test_collectives_of_tensor_splits_are_two_sums_a_block_and_direction() -> None:
    """As the preset says: after attention and after the MLP, and before them."""
    evaluator, _ = works_of(Strategy())
    split = evaluator.works(Strategy(model=4), 8)
    slow = dataclasses.replace(evaluator.cluster.device, link_latency_s=1.0)
    late = Evaluator(
        table=evaluator.table,
        cluster=dataclasses.replace(evaluator.cluster, device=slow),
    ).works(Strategy(model=4), 8)
    names = [work.module for work in evaluator.table.graph.works]
    block = names.index("layers.0.attention")
    for before, after in zip(split.seconds[:2], late.seconds[:2], strict=True):
        seconds = after - before
        assert seconds[block : block + 4] == pytest.approx([2.0] * 4, abs=1e-3)
    assert split.seconds[2] == pytest.approx(late.seconds[2])


def test_gradients_are_summed_once_a_step() -> None:
    evaluator, _ = works_of(Strategy())
    state = evaluator.works(Strategy(), 8).parameter_bytes.sum()
    link = evaluator.cluster.network.default.bytes_per_s
    whole = evaluator.works(Strategy(), 8)
    assert whole.gradient_sum_s(1).sum() == 0
    assert whole.gradient_sum_s(4).sum() == pytest.approx(2 * 3 / 4 * state / link)
    within = evaluator.works(Strategy(data=4), 8).gradient_sum_s(1).sum()
    assert within == pytest.approx(2 * 3 / 4 * state / link)
    fsdp = evaluator.works(Strategy(data=4, has_fsdp=True), 8)
    assert fsdp.gradient_sum_s(1).sum() == 0
    # A link between ranks takes the shards of all devices.
    for split in (fsdp, evaluator.works(Strategy(model=4), 8)):
        between = split.gradient_sum_s(4).sum()
        assert between == pytest.approx(2 * 3 / 4 * state / link)

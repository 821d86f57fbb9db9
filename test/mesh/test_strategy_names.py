"""Axes are named by what is split over them."""

import pytest

from torch_xla_pp.mesh import AxisRules, presets, strategy_names

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    "name",
    ("dp", "fsdp", "tp", "tensor_sequence", "cp", "sp", "ep"),
)
def test_each_preset_is_known_by_its_rules(name: str) -> None:
    assert strategy_names(getattr(presets, name)("x")) == {"x": name}


def test_variants_are_named_as_what_they_are_variants_of() -> None:
    assert strategy_names(presets.fsdp_transpose("x")) == {"x": "fsdp"}
    assert strategy_names(presets.tp_transpose("x")) == {"x": "tp"}
    assert strategy_names(presets.fsdp("x", gather_once=True)) == {"x": "fsdp_once"}


def test_presets_keep_their_names_in_a_mix() -> None:
    mixed = presets.mix(presets.fsdp("data"), presets.tp("model"), presets.cp("seq"))
    assert strategy_names(mixed) == {"data": "fsdp", "model": "tp", "seq": "cp"}


def test_other_rules_have_no_names() -> None:
    assert strategy_names(AxisRules(axes={"state": "x", "head_dim": None})) == {}
    assert strategy_names(None) == {}

import pytest

from torch_xla_pp.mesh import LocalMesh, match_rules

pytestmark = pytest.mark.pure

MESH = LocalMesh(names=("data", "model"), shape=(2, 2))
SHAPES = {"layers.0.up.weight": (8, 4), "layers.0.up.bias": (8,), "head.weight": (3, 4)}


def test_the_first_matching_rule_counts() -> None:
    rules = {"*.up.weight": ("model", None), "*weight": (None, "data")}
    assert match_rules(rules, SHAPES, MESH) == {
        "layers.0.up.weight": ("model", None),
        "head.weight": (None, "data"),
    }


def test_a_rule_for_another_stage_matches_nothing_here() -> None:
    assert match_rules({"embed.*": ("model", None)}, SHAPES, MESH) == {}


def test_all_faults_are_listed_with_names_and_shapes() -> None:
    rules = {"head.*": ("model", None), "*.bias": ("rows",)}
    with pytest.raises(ValueError, match="rules that do not fit") as caught:
        match_rules(rules, SHAPES, MESH)
    text = str(caught.value)
    assert "head.weight [3, 4]: rule 'head.*' gives ('model', None): dim" in text
    assert "layers.0.up.bias [8]: rule '*.bias' gives ('rows',): unknown axis" in text

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import axis_rules, local_meshes

from torch_xla_pp.mesh import AxisRules, LocalMesh, assign_partitions, presets

pytestmark = pytest.mark.pure

MESH = LocalMesh(names=("data", "model"), shape=(2, 2))
SHAPES = {
    "blocks.0.up.weight": (16, 8),
    "blocks.0.up.bias": (16,),
    "blocks.0.down.weight": (8, 16),
    "head.weight": (13, 8),
}
AXES = {"batch": "data", "embed": None, "mlp": "model", "vocab": "model"}


def faults_of(rules: AxisRules) -> list[str]:
    with pytest.raises(ValueError, match="axis rules that do not fit") as caught:
        assign_partitions(rules, SHAPES, MESH, whole_model=SHAPES)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_logical_axes_become_mesh_axes() -> None:
    rules = AxisRules(
        axes=AXES,
        parameter_axes={"embed": ("data",)},
        parameters={
            "*.up.weight": ("mlp", "embed"),
            "*.up.*": ("mlp",),
            "*weight": (None, "mlp"),
        },
    )
    shapes = {**SHAPES, "head.weight": (13, 8)}
    assert rules.resolve(shapes, MESH, whole_model=SHAPES) == {
        "blocks.0.up.weight": ("model", ("data",)),
        "blocks.0.up.bias": ("model",),
        "blocks.0.down.weight": (None, "model"),
        "head.weight": (None, "model"),
    }


def test_all_faults_are_told_at_once() -> None:
    rules = AxisRules(
        axes={**AXES, "heads": "rows"},
        parameters={
            "*.up.weight": ("mlp", "vocab"),
            "*.up.bias": ("width",),
            "*.down.weight": ("embed",),
            "head.*": ("vocab", None),
            "tail.*": ("vocab", None),
        },
    )
    assert faults_of(rules) == [
        "axes: 'heads' -> 'rows': unknown mesh axis 'rows', the mesh has "
        "('data', 'model')",
        "pattern 'tail.*' matches no parameter of the model",
        "blocks.0.up.weight [16, 8]: rule '*.up.weight' gives ('mlp', 'vocab'): axis "
        "'model' is used twice",
        "blocks.0.up.bias [16]: rule '*.up.bias' gives ('width',): unknown logical "
        "axis 'width', known are batch, embed, heads, mlp, vocab",
        "blocks.0.down.weight [8, 16]: rule '*.down.weight' gives ('embed',): expected "
        "2 entries, one per dimension",
        "head.weight [13, 8]: rule 'head.*' gives ('vocab', None): dimension 0 of size "
        "13 does not divide over 'model' of size 2",
    ]


def test_a_part_of_a_model_need_not_have_every_pattern() -> None:
    rules = AxisRules(axes=AXES, parameters={"tail.*": ("vocab", None)})
    assert rules.resolve(SHAPES, MESH) == {}


def test_faults_in_other_stages_are_told_too() -> None:
    rules = AxisRules(axes=AXES, parameters={"head.*": ("vocab", None)})
    with pytest.raises(ValueError, match="head.weight .* does not divide"):
        assign_partitions(rules, {}, MESH, whole_model=SHAPES)


def test_later_rules_replace_earlier_ones() -> None:
    first = AxisRules(axes=AXES, activations={"*.norm": ("batch", None)})
    both = first | AxisRules(axes={"mlp": "data", "heads": "model"})
    assert both.axes == {**AXES, "mlp": "data", "heads": "model"}
    assert both.activations == {"*.norm": ("batch", None)}


def test_axes_must_be_names() -> None:
    with pytest.raises(TypeError, match="expected a tuple of names of axes, got 3"):
        AxisRules(axes={"batch": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="got 'mlp'"):
        AxisRules(parameters={"*": "mlp"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="True or False for gather_once, got 'data'"):
        AxisRules(gather_once="data")  # type: ignore[arg-type]


@given(axis_rules())
def test_rules_survive_a_journey_as_text(rules: AxisRules) -> None:
    for other in (
        AxisRules.from_json(rules.to_json()),
        pickle.loads(pickle.dumps(rules)),
    ):
        assert other == rules
        assert other.to_json() == rules.to_json()


@given(st.data(), local_meshes(), axis_rules())
def test_a_partition_without_faults_divides_every_dimension(
    data: st.DataObject, mesh: LocalMesh, rules: AxisRules
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), max_size=3)))
    names = st.sampled_from([None, *rules.axes])
    logical = tuple(data.draw(names) for _ in shape)
    partition, faults = rules.partition(logical, shape, mesh)
    if faults:
        return
    parts = mesh.shard_shape(shape, partition)
    sizes = [mesh.axis_size(axis) for axis in partition]
    assert [n * size for n, size in zip(parts, sizes, strict=True)] == list(shape)


PRESETS = {
    "dp": (("data", None, None), (None, None)),
    "fsdp": (("data", None, None), (None, "data")),
    "fsdp_transpose": (("data", None, None), ("data", None)),
    "tp": ((None, None, None), ("data", None)),
    "tp_transpose": ((None, None, "data"), (None, "data")),
    "tensor_sequence": ((None, "data", None), ("data", None)),
    "cp": ((None, "data", None), (None, None)),
    "sp": ((None, "data", None), (None, None)),
    "ep": (("data", None, None), (None, None)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_split_what_their_names_say(name: str) -> None:
    rules = getattr(presets, name)("data")
    between = rules.partition(("batch", "norm_sequence", "embed"), (8, 8, 8), MESH)
    up = rules.partition(("mlp", "embed"), (8, 8), MESH, is_parameter=True)
    assert (between, up) == tuple((partition, []) for partition in PRESETS[name])
    assert set(rules.axes) == set(presets.LOGICAL_AXES)


def test_presets_mix_over_several_axes() -> None:
    rules = presets.mix(presets.fsdp("data"), presets.tp("model"))
    weight = rules.partition(("mlp", "embed"), (8, 8), MESH, is_parameter=True)
    assert weight == (("model", "data"), [])
    hidden = rules.partition(("batch", "sequence", "mlp"), (8, 8, 8), MESH)
    assert hidden == (("data", None, "model"), [])
    rules = presets.mix(presets.dp("data"), presets.ep("model"))
    assert rules.axes["batch"] == ("data", "model")
    rules = presets.mix(presets.fsdp_transpose("data"), presets.tp("model"))
    assert rules.mesh_axis("mlp", is_parameter=True) == ("data", "model")
    assert rules.mesh_axis("mlp") == "model"


def test_weights_are_gathered_once_if_one_of_the_rules_says_so() -> None:
    once = presets.fsdp("data", gather_once=True)
    assert presets.mix(presets.tp("model"), once).gather_once
    assert (AxisRules() | once).gather_once
    assert str(once).endswith("gather_once")
    assert not presets.mix(presets.tp("model"), presets.fsdp("data")).gather_once


def test_presets_over_one_axis_do_not_mix() -> None:
    with pytest.raises(ValueError, match="got 'data' twice for 'batch'"):
        presets.mix(presets.dp("data"), presets.fsdp("data"))

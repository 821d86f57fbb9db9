import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import local_meshes, partitioned_shapes

from torch_xla_pp.mesh import ROWS, LocalMesh, RankLayout, TensorSpec, on_mesh

pytestmark = pytest.mark.pure

MESH = LocalMesh(names=("data", "model"), shape=(2, 4))


@given(st.data())
def test_shards_cover_the_tensor(data: st.DataObject) -> None:
    mesh = data.draw(local_meshes())
    shape, partition = data.draw(partitioned_shapes(mesh))
    shard = mesh.shard_shape(shape, partition)
    for size, part, axis in zip(shape, shard, partition, strict=True):
        count = mesh.axis_size(axis)
        assert part * count >= size
        assert (part - 1) * count < size or size == 0


@given(st.data())
def test_fitting_partitions_have_no_padding(data: st.DataObject) -> None:
    mesh = data.draw(local_meshes())
    shape, partition = data.draw(partitioned_shapes(mesh))
    shard = mesh.shard_shape(shape, partition)
    pieces = math.prod(mesh.axis_size(axis) for axis in partition)
    if not mesh.faults(shape, partition):
        assert math.prod(shard) * pieces == math.prod(shape)


def test_an_axis_of_one_device_splits_nothing() -> None:
    mesh = LocalMesh(names=("data",), shape=(1,))
    assert not mesh.is_split(("data", None))
    assert MESH.is_split((None, ("data", "model")))


@pytest.mark.parametrize(
    ("shape", "partition", "text"),
    [
        ((4, 4), ("data",), "expected 2 entries"),
        ((4, 4), ("rows", None), "unknown axis 'rows'"),
        ((4, 4), ("data", "data"), "axis 'data' is used twice"),
        ((3, 4), ("data", None), "dimension 0 of size 3 does not divide"),
        ((4, 4), (("data", "model"), None), "does not divide over .* of size 8"),
    ],
)
def test_faults_say_what_does_not_fit(
    shape: tuple[int, ...], partition: tuple[str | None, ...], text: str
) -> None:
    import re

    assert any(re.search(text, fault) for fault in MESH.faults(shape, partition))


def test_a_spec_prints_dtype_and_shape() -> None:
    spec = TensorSpec(shape=(2, 3), dtype=torch.bfloat16, partition=(None, None))
    assert str(spec) == "bfloat16[2, 3]"


def test_axes_of_shard_may_be_axes_of_the_mesh() -> None:
    layout = RankLayout.of(MESH, "data")
    axes = (on_mesh(("data", "model")), None, on_mesh("model"), ROWS)
    assert layout.constraint(axes) == (("data", "model"), None, "model", "data")

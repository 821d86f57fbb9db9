"""The mesh of a job: over ranks and over each rank's devices."""

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


PROCESS = ("pp", "dp")


def look_around() -> dict[str, Any]:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh(
        "xla", (2, 2, 1), mesh_dim_names=("pp", "data", "model")
    )
    group = mesh.get_group("pp")
    local, turned = mesh["data", "model"], mesh["model", "data"]
    faults = []
    both = xpp.init_device_mesh("xla", (1, 2, 2), mesh_dim_names=("pp", "dp", "data"))
    wrong_ones = (
        lambda: mesh["date"],
        lambda: mesh.get_group("data"),
        lambda: mesh["data"].get_group(),
        lambda: both.get_group(),
    )
    for wrong in wrong_ones:
        try:
            wrong()
        except ValueError as error:
            faults.append(str(error))
    return {
        "shape": mesh.shape,
        "ndim": mesh.ndim,
        "sizes": (mesh.size(), mesh.size(1)),
        "names": mesh.mesh_dim_names,
        "text": repr(mesh),
        "rank": mesh.get_local_rank("pp"),
        "group": (group.size(), dist.get_rank(group)),
        "pp": mesh["pp"].get_group() is group,
        "local": (local.mesh_shape, local.axis_names),
        "turned": (turned.mesh_shape, turned.axis_names),
        "is_kept": mesh["data", "model"] is local,
        "both": {
            n: (both.get_group(n).size(), both.get_local_rank(n)) for n in PROCESS
        },
        "processes": both[PROCESS].shape,
        "rest": both["data"].axis_names,
        "device": str(xpp.device()),
        "faults": faults,
    }


def test_axes_are_over_ranks_and_over_devices(worlds: Worlds) -> None:
    found = worlds.run(look_around, ranks=2, devices=2)
    for rank, seen in enumerate(found):
        assert seen["shape"] == (2, 2, 1)
        assert (seen["ndim"], seen["sizes"]) == (3, (4, 2))
        assert seen["names"] == ("pp", "data", "model")
        assert seen["text"] == "PipelineMesh(pp=2 x data=2 x model=1)"
        assert seen["rank"] == rank
        assert seen["group"] == (2, rank)
        assert seen["pp"]
        assert seen["local"] == ((2, 1), ("data", "model"))
        assert seen["turned"] == ((1, 2), ("model", "data"))
        assert seen["is_kept"]
        assert seen["device"] == "xla:0"
        assert seen["both"] == {"pp": (1, 0), "dp": (2, rank)}
        assert (seen["processes"], seen["rest"]) == ((1, 2), ("data",))
        local, group, of_slice, none = seen["faults"]
        assert "expected different ones of ('pp', 'data', 'model')" in local
        assert "presets.fsdp for fully_shard" in of_slice
        assert "expected one of the process axes ('pp',), got 'data'" in group
        assert "expected one of the process axes ('pp', 'dp'), got None" in none


def slice_all() -> dict[str, Any]:
    """Return what slices of a mesh say of themselves."""
    dist.init_process_group("xla_pp")
    names = ("pp", "data", "model")
    mesh = xpp.init_device_mesh("xla", (2, 2, 2), mesh_dim_names=names)
    one, both, mixed = mesh["model"], mesh["model", "data"], mesh["pp", "model"]
    flat = both._flatten("all")
    weight = torch.zeros(8, 6).to(xpp.device())
    xs.mark_sharding(weight, one, ("model", None))
    return {
        "one": (repr(one), one.size(), one.ndim, one.shape, one.mesh.tolist()),
        "torch_xla": (one.mesh_shape, one.axis_names, dict(both.shape())),
        "device_type": {m.device_type for m in (mesh, one, both, mixed, flat)},
        "both": (both.size(), both.size(0), both["data"].mesh.tolist()),
        "flat": (repr(flat), flat.mesh.tolist(), mesh["data"]._flatten().shape),
        "mixed": (repr(mixed), mixed.size(), mixed.get_group("pp").size()),
        "deeper": (mixed["model"].shape, mixed.get_local_rank(0)),
        "marked": xla_compat.sharding_texts([weight])[0],
    }


def test_any_axes_may_be_sliced(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds.run(slice_all, ranks=2, devices=4)):
        assert found["one"] == ("RankMesh(model=2)", 2, 1, (2,), [0, 1])
        shape = {"model": 2, "data": 2}
        assert found["torch_xla"] == ((2, 2), ("model", "data"), shape)
        assert found["device_type"] == {"xla"}
        assert found["both"] == (4, 2, [0, 2])
        assert found["flat"] == ("RankMesh(all=4)", [0, 2, 1, 3], (2,))
        assert found["mixed"] == ("PipelineMesh(pp=2 x model=2)", 4, 2)
        assert found["deeper"] == ((2,), rank)
        text = "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
        assert found["marked"] == text


def make_of_shapes(shapes: list[dict[str, int]]) -> tuple[str, Any, int]:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", shapes=shapes)
    local = mesh[tuple(shapes[mesh.get_local_rank("pp")])]
    return repr(mesh), local.shape(), mesh.get_group("pp").size()


def test_ranks_may_have_axes_of_their_own(worlds: Worlds) -> None:
    shapes = [{"data": 4}, {"data": 2, "model": 2}]
    first, second = worlds.run(make_of_shapes, ranks=2, devices=4, args=(shapes,))
    assert first == ("PipelineMesh(pp=2 x data=4)", {"data": 4}, 2)
    text = "PipelineMesh(pp=2 x data=2 x model=2)"
    assert second == (text, {"data": 2, "model": 2}, 2)
    wrong = [{"data": 4}, {"data": 2}]
    outcomes = worlds.run_outcomes(
        make_of_shapes, ranks=2, devices=4, args=(wrong,), keep_workers=True
    )
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert "rank 1: expected 2 devices, got 4" in outcome.message


def make(shape: tuple[int, ...]) -> None:
    dist.init_process_group("xla_pp")
    xpp.init_device_mesh("xla", shape, mesh_dim_names=("pp", "data"))


@pytest.mark.parametrize(
    ("shape", "fault", "hint"),
    [
        (
            (4, 2),
            "expected 4 (pp=4) or 8 (pp=4 x data=2) ranks, got 2",
            "CPU_NUM_DEVICES=2 torchrun --nproc-",
        ),
        ((2, 4), "rank 0 has 2, rank 1 has 2", "CPU_NUM_DEVICES=4 torchrun --nproc-"),
    ],
)
def test_a_mesh_that_does_not_fit_the_job(
    worlds: Worlds, shape: tuple[int, ...], fault: str, hint: str
) -> None:
    outcomes = worlds.run_outcomes(
        make, ranks=2, devices=2, args=(shape,), keep_workers=True
    )
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert fault in outcome.message
        assert hint in outcome.message


def make_too_early() -> None:
    xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "data"))


def test_a_mesh_before_the_process_group(worlds: Worlds) -> None:
    for outcome in worlds.run_outcomes(
        make_too_early, ranks=2, devices=2, keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert 'Call dist.init_process_group("xla_pp")' in outcome.message


def make_over_gloo() -> None:
    dist.init_process_group("gloo")
    xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "data"))


def test_a_mesh_over_another_backend(worlds: Worlds) -> None:
    for outcome in worlds.run_outcomes(
        make_over_gloo, ranks=2, devices=2, keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert "gloo" in outcome.message
        assert "xla_pp" in outcome.message


def use_backend_xla() -> None:
    xpp.device()
    dist.init_process_group("xla")


def test_backend_xla_under_spmd_says_what_to_use(worlds: Worlds) -> None:
    for outcome in worlds.run_outcomes(
        use_backend_xla, ranks=2, devices=2, keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert 'dist.init_process_group("xla_pp")' in outcome.message


def mesh_of_all_ranks() -> str:
    """Number the devices of the whole job, as scripts of one world do."""
    dist.init_process_group("xla_pp")
    xpp.device()
    with pytest.raises(ValueError) as raised:
        xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
    return str(raised.value)


def test_a_mesh_over_the_devices_of_all_ranks_says_what_to_do(worlds: Worlds) -> None:
    for text in worlds.run(mesh_of_all_ranks, ranks=2, devices=2):
        assert "expected the devices of this rank, 0..1. Take a slice of" in text


def make_over_hosts(slow: tuple[str, ...], names: tuple[str, ...]) -> str:
    dist.init_process_group("xla_pp")
    os.environ["GROUP_RANK"] = str(dist.get_rank())
    try:
        mesh = xpp.init_device_mesh("xla", (2, 1), mesh_dim_names=names, slow=slow)
    finally:
        del os.environ["GROUP_RANK"]
    return repr(mesh)


def test_only_slow_axes_may_go_from_host_to_host(worlds: Worlds) -> None:
    found = worlds.run(make_over_hosts, ranks=2, args=(("dp",), ("dp", "pp")))
    assert found == ["PipelineMesh(dp=2 x pp=1)"] * 2
    for outcome in worlds.run_outcomes(
        make_over_hosts, ranks=2, args=((), ("dp", "pp")), keep_workers=True
    ):
        assert outcome.error == "ValueError"
        assert "expected ranks 0 and 1 on one host, got 0 and 1" in outcome.message

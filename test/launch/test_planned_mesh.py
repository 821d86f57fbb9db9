"""The mesh of a job that is launched by a plan, and what does not fit one."""

import dataclasses

import pytest
import torch.distributed as dist
from joining import join
from planned_models import plan_of

import torch_xla_pp as xpp
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.testing import Worlds
from torch_xla_pp.work import Amount, Cost, Work, WorkGraph

pytestmark = pytest.mark.worlds


def work(name: str) -> Work:
    return Work(
        name=name,
        ops=(name,),
        module="",
        digest="",
        forward=Cost(),
        backward_input=Cost(),
        backward_weight=Cost(),
        saved={"none": Amount(), "full": Amount()},
    )


def plan(num_ranks: int, mesh: dict[str, int]) -> PipelinePlan:
    works = tuple(work(f"op_{i}") for i in range(num_ranks))
    graph = WorkGraph(works=works, values=(), rows=1, outputs=())
    return plan_of(graph, [[one] for one in works], mesh=mesh)


def make_meshes() -> tuple[str, list[str]]:
    """Return the mesh of a plan that fits, and what is said of others."""
    join()
    fitting = plan(1, {"data": 2})
    replicated = dataclasses.replace(
        fitting, batch=dataclasses.replace(fitting.batch, replicas=2)
    )
    mesh = xpp.init_device_mesh("xla", plan=replicated)
    assert mesh.get_group("dp").size() == 2
    assert mesh["data"].mesh_shape == (2,)
    wrong = [plan(3, {"data": 2}), plan(2, {}), plan(1 + dist.get_rank(), {"data": 2})]
    faults = []
    for other in wrong:
        try:
            xpp.init_device_mesh("xla", plan=other)
        except ValueError as error:
            faults.append(str(error))
    return repr(mesh), faults


def test_a_job_that_is_not_as_planned_is_refused_on_every_rank(worlds: Worlds) -> None:
    for mesh, faults in worlds.run(make_meshes, ranks=2, devices=2):
        assert mesh == "PipelineMesh(dp=2 x pp=1 x data=2)"
        ranks, devices, plans = faults
        assert "expected 3 ranks, got 2" in ranks
        assert "TORCH_XLA_PP_PLAN=plan.json torchrun --nproc-per-node 3" in ranks
        assert "rank 0: expected 1 devices, got 2" in devices
        assert "rank 1: expected 1 devices, got 2" in devices
        assert "expected the same plan on every rank, got [" in plans

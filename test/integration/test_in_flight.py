"""What is under way is bounded: programs, threads that wait, and steps of eval."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_xla.distributed.spmd as xs
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

MIB = 1 << 20

CLIENT_MADE_FIRST = """
import os
import torch_xla, torch_xla.runtime as xr
xr.use_spmd()
xr.global_runtime_device_count()
import torch_xla_pp as xpp
xpp.device()
"""

CLIENT_MADE_BETWEEN = """
import torch_xla_pp as xpp
import torch_xla, torch_xla.runtime as xr
xr.use_spmd()
xr.global_runtime_device_count()
xpp.device()
"""


def script(
    text: str, devices: int, **variables: str
) -> subprocess.CompletedProcess[str]:
    names = ("PJRT_NPROC", "NPROC")
    own = {name: value for name, value in os.environ.items() if name not in names}
    own |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    return subprocess.run(
        [sys.executable, "-c", text],
        env=own | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_client_with_too_few_threads_is_refused() -> None:
    found = script(CLIENT_MADE_FIRST, 8)
    assert found.returncode != 0
    assert "for 8 devices: expected at least 17" in found.stderr
    assert "Import torch_xla_pp before anything uses XLA" in found.stderr
    assert script(CLIENT_MADE_FIRST, 8, PJRT_NPROC="17").returncode == 0
    assert script(CLIENT_MADE_BETWEEN, 8).returncode == 0


def programs_in_flight() -> tuple[int, int]:
    """Enqueue many programs; return how many were in flight at most, and in the end."""
    xla_compat.enable_spmd()
    value = xla_compat.replicate(torch.zeros(8))
    most = 0
    for _ in range(3 * xla_compat.MAX_IN_FLIGHT):
        value = value + 1
        xla_compat.materialize([value])
        most = max(most, xla_compat._in_flight().count)
    xla_compat.wait_device()
    assert value.cpu().tolist() == [3.0 * xla_compat.MAX_IN_FLIGHT] * 8
    return most, xla_compat._in_flight().count


def test_programs_in_flight_are_bounded(worlds: Worlds) -> None:
    assert worlds.run(programs_in_flight, ranks=1, devices=2) == [
        (xla_compat.MAX_IN_FLIGHT, 0)
    ]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def cut_batches(folder: str) -> dict[str, Any]:
    """Train on a batch that is whole, and on one that is split; count collectives."""
    join()
    mesh = xpp.init_device_mesh("xla", (1, 2), mesh_dim_names=("pp", "data"))
    stage = xpp.PipelineStage(Scale(), 0, 1, xpp.device(), mesh=mesh["data"])
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    batch = torch.arange(16.0).reshape(16, 1)
    found: dict[str, Any] = {}
    for name in ("whole", "split"):
        before = set(Path(folder).glob("*after_optimizations.txt"))
        x = batch.to(xpp.device())
        if name == "split":
            xs.mark_sharding(x, mesh["data"], ("data", None))
        outputs = schedule.eval(x, target=torch.zeros(16, 1).to(xpp.device()))
        found[name] = outputs.cpu().tolist() == batch.tolist()
        texts = set(Path(folder).glob("*after_optimizations.txt")) - before
        # What puts the outputs together and reads them is the user's.
        found[f"{name} permutes"] = sum(
            "collective-permute(" in text.read_text() and "s64" not in text.name
            for text in texts
        )
    return found


def test_a_whole_batch_is_cut_without_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    with Worlds() as worlds:
        (found,) = worlds.run(cut_batches, ranks=1, devices=2, args=(str(tmp_path),))
    assert found["whole"] and found["split"]
    assert found["whole permutes"] == 0
    assert found["split permutes"] > 0


def gives_batches_under_way() -> bool:
    """Evaluate on batches that are still being computed.

    XLA takes programs without arithmetic for cheap, and ends their launch when they
    have run: long after they were enqueued, if they move much.
    """
    join()
    devices = xla_compat.num_local_devices()
    mesh = xpp.init_device_mesh("xla", (1, devices), mesh_dim_names=("pp", "data"))
    stage = xpp.PipelineStage(Scale(), 0, 1, xpp.device(), mesh=mesh["data"])
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    batch, target = torch.arange(16.0).reshape(16, 1), torch.zeros(16, 1)
    x, target = batch.to(xpp.device()), target.to(xpp.device())
    much = xla_compat.replicate(torch.zeros(4 * MIB, 4))
    for _ in range(3):
        x = x.flip(0)
        xla_compat.materialize([x, much.t().contiguous()])
        outputs = schedule.eval(x, target=target)
    return bool(outputs.cpu().equal(batch.flip(0)))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_batch_may_be_under_way(worlds: Worlds, devices: int) -> None:
    assert worlds.run(gives_batches_under_way, ranks=1, devices=devices) == [True]


class Slow(Scale):
    """A layer that is slow on the device, by products that nothing uses."""

    def forward(self, x: Tensor) -> Tensor:
        square = torch.eye(768, device=x.device)
        for _ in range(4):
            square = torch.cos(square @ square)
        return super().forward(x) + 0 * square[0, 0]


def evaluate(count: int, rows: int) -> tuple[int, list[float]]:
    """Evaluate with a slow last rank; return growth in bytes, and begins of calls."""
    group = join()
    rank = group.rank()
    module = Slow() if rank else Scale()
    stage = xpp.PipelineStage(module, rank, 2, xpp.device())
    schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss)
    x = torch.ones(2 * rows, MIB // 4)
    begins, sizes = [], []
    for _ in range(count):
        begins.append(time.monotonic())
        schedule.eval(*(() if rank else (x,)), **({"target": x} if rank else {}))
        with open("/proc/self/statm") as file:
            sizes.append(int(file.read().split()[1]) * resource.getpagesize())
    dist.barrier()
    return max(sizes) - sizes[count // 3], begins


@pytest.mark.parametrize("transport", ["in_graph", "host"])
def test_eval_waits_for_the_last_rank_and_memory_stays_flat(
    worlds: Worlds, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbounded, the first rank would be 20 calls of 8 MiB ahead of the last."""
    monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", transport)
    count = 30
    with Worlds() as own:
        (grown, first), (last_grown, last) = own.run(
            evaluate, ranks=2, args=(count, 4), timeout_s=200
        )
    # Three calls, of which the host transport has a few copies each, were 22 to 44.
    assert grown < 64 * MIB and last_grown < 64 * MIB
    # The first rank begins call i + 3 only after the last one has ended call i.
    for i in range(count - 4):
        assert first[i + 3] > last[i]

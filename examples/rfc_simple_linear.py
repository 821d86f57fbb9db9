"""Train the example of PyTorch/XLA's request for comments on MPMD and SPMD.

One learns what of a script as it was proposed there runs here: torch_xla's own SPMD
calls, on a mesh over this rank's devices, beside torch's own pipelining. The model,
the options and the libraries are those of https://github.com/pytorch/xla/issues/9019,
the data are smaller. Lines marked `# changed` could not mean anything as they were:
docs/how-to/rfc-example.md says why, for each.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/rfc_simple_linear.py

The last line is `loss A -> B`: the mean over the first and the last epoch.
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend  # noqa: F401
import torch_xla.runtime as xr
from torch import Tensor, nn, optim
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint  # changed
from torch.utils.data import DataLoader, TensorDataset

import torch_xla_pp as xpp  # changed

NUM_CLASSES = 3
xr.use_spmd()


class SimpleLinear(nn.Module):
    def __init__(self, input_dim: int) -> None:
        super().__init__()
        self.layer0 = nn.Linear(input_dim, input_dim // 2)
        self.relu = nn.ReLU()
        self.layer1 = nn.Linear(input_dim // 2, NUM_CLASSES)
        self.layer2 = nn.Linear(NUM_CLASSES, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(self.relu(self.layer0(x))))


def train(flags: argparse.Namespace) -> None:
    dist.init_process_group("xla_pp")  # changed
    rank, device = dist.get_rank(), xm.xla_device()
    num_devices = xr.addressable_runtime_device_count()  # changed
    mesh = xs.Mesh(np.arange(num_devices), (num_devices, 1), ("data", "model"))

    torch.manual_seed(42)
    model = SimpleLinear(flags.input_dim)  # changed
    chunk = torch.zeros(flags.batch_size // flags.pipeline_chunks, flags.input_dim)
    split_spec = {"layer1": SplitPoint.BEGINNING}
    pipe = xpp.pipeline(model, mb_args=(chunk,), split_spec=split_spec)  # changed
    stage = pipe.build_stage(rank, device, mesh=mesh)  # changed
    if stage.is_first:
        xs.mark_sharding(stage.submod.layer0.weight, mesh, ("data", None))
    optimizer = optim.SGD(stage.submod.parameters(), lr=flags.lr)
    loss_fn = nn.CrossEntropyLoss()
    schedule = ScheduleGPipe(stage, flags.pipeline_chunks, loss_fn=loss_fn)

    x = torch.randn(flags.train_dataset_len, flags.input_dim)
    data = TensorDataset(x, x[:, :NUM_CLASSES].argmax(1))
    loader = pl.MpDeviceLoader(DataLoader(data, flags.batch_size), device)  # changed
    means = []
    for _ in range(flags.num_epochs):
        total = torch.zeros(())
        for x, y in loader:
            x, y = xpp.pad_batch(schedule, x, y, rows=flags.batch_size)  # changed
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=y)
            optimizer.step()
            optimizer.zero_grad()
            xm.mark_step()
            total += xpp.losses(schedule).mean()  # changed
        means.append(float(total) / len(loader))
    if rank == dist.get_world_size() - 1:
        print(f"loss {means[0]:.3f} -> {means[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--input_dim", type=int, default=64)
    parser.add_argument("--train_dataset_len", type=int, default=250)
    parser.add_argument("--pipeline_chunks", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--num_epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.5)
    train(parser.parse_args())

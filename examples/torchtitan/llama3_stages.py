"""torchtitan's Llama 3 through torchtitan's own pipelining, on `xla_pp`.

One learns which lines of a script for GPUs change: those with a number. Needs
torchtitan 0.2.0, the release for torch 2.9.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/torchtitan/llama3_stages.py

The last line is `loss A -> B`.
"""

import argparse
import functools
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.distributed.pipeline_parallel as titan
from torch import Tensor, nn
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, llama3_args

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

LENGTH, ROWS = 16, 8

# (1) What torchtitan's parallelize_llama does by styles of DTensor.
RULES = presets.tp("tp") | xpp.AxisRules(
    parameters={
        "*.w[qkv].weight": ("heads", "embed"),
        "*.wo.weight": ("embed", "heads"),
        "*.w[13].weight": ("mlp", "embed"),
        "*.w2.weight": ("embed", "mlp"),
        "tok_embeddings.weight": ("vocab", "embed"),
        "output.weight": ("vocab", "embed"),
    }
)


def as_it_is(part: nn.Module, dims: ParallelDims, config: JobConfig) -> nn.Module:
    """Stand for torchtitan's parallelize_llama: XLA reads the rules."""
    return part


def job_config(schedule: str) -> JobConfig:
    """Return torchtitan's own configuration, as its files would have it."""
    config = JobConfig()
    config.parallelism.pipeline_parallel_degree = dist.get_world_size()
    config.parallelism.pipeline_parallel_schedule = schedule
    config.training.local_batch_size = ROWS
    return config


def pipelined(
    model: Transformer, schedule: str
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Return what torchtitan's pipeline_llm returns: a schedule, and this rank's parts.

    Then, whether these have the first stage, and the last.
    """
    ranks = dist.get_world_size()
    # (2) torchtitan counts processes; the devices of each are in our mesh alone.
    mesh = xpp.init_device_mesh("xla", (ranks, 2), mesh_dim_names=("pp", "tp"))
    sizes = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1, "etp": 1}
    dims = ParallelDims(**sizes, pp=ranks, world_size=ranks, _world_mesh=mesh)
    # (3) Its pipeline_module_split makes stages of this class.
    titan.PipelineStage = functools.partial(
        xpp.PipelineStage, mesh=mesh["tp"], sharding=RULES
    )
    return titan.pipeline_llm(
        model,
        dims,
        job_config(schedule),
        xpp.device(),  # (4)
        model.model_args,
        as_it_is,
        cross_entropy_loss,
    )


def debug_model() -> Transformer:
    """Return torchtitan's debug model with its own first weights."""
    torch.manual_seed(0)
    model = Transformer(llama3_args["debugmodel"])
    model.init_weights()
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Return texts that count, and what follows each token."""
    starts = torch.randint(64, (ROWS, 1))
    text = (starts + torch.arange(LENGTH + 1)) % 64
    return text[:, :-1], text[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("xla_pp")  # (5)
    schedule, parts, is_first, is_last = pipelined(debug_model(), options.schedule)
    optimizer = torch.optim.AdamW(
        [p for part in parts for p in part.parameters()], lr=1e-3
    )
    found = []
    for _ in range(options.steps):
        tokens, labels = batch()
        # As in torchtitan's trainer.
        targets, losses = (labels, []) if is_last else (None, None)
        if is_first:
            schedule.step(tokens, target=targets, losses=losses)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        found.append(xpp.losses(schedule).sum().item())
    if is_last:
        print(f"loss {found[0]:.2f} -> {found[-1]:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

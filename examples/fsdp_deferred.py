"""Train a model that no process could hold: FSDP inside a rank, stages across ranks.

One learns to build a model without memory, and to split weights and their gradients
over the devices of a rank: each device holds a half of a half of the model.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/fsdp_deferred.py

The last line is `loss A -> B, a device holds C of D KiB of weights`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

WIDTH, LAYERS, ROWS, MICROBATCHES, STEPS = 64, 4, 32, 4, 20

# `embed` is the dimension that fsdp splits; biases and norms stay whole.
RULES = presets.fsdp("data") | xpp.AxisRules(
    parameters={
        "*.up.weight": ("mlp", "embed"),
        "*.down.weight": ("embed", "mlp"),
    }
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def main() -> None:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "data"))
    torch.manual_seed(0)
    # No parameter has memory here. Every rank and every split would give each
    # parameter the same values, which depend on the seed and its name.
    with xpp.deferred_init():
        model = Model()
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // MICROBATCHES, WIDTH),),
        split_spec={f"layers.{LAYERS // 2}": SplitPoint.BEGINNING},
    )
    # Here this rank's half gets its values, one parameter after the other.
    stage = pipe.build_stage(
        mesh.get_local_rank("pp"),
        xpp.device(),
        mesh.get_group("pp"),
        mesh=mesh["data"],
        sharding=RULES,
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

    x = torch.randn(ROWS, WIDTH)  # the same on both ranks: both were seeded alike
    y = x.flip(1)
    means = []
    for _ in range(STEPS):
        losses: list[Tensor] = []
        if stage.is_first:
            schedule.step(x.to(xpp.device()))
        else:
            schedule.step(target=y.to(xpp.device()), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        means.append(sum(loss.item() for loss in losses) / MICROBATCHES)

    if stage.is_last:
        held = stage.explain().parameter_bytes / 1024
        whole = sum(p.numel() * p.element_size() for p in model.parameters()) / 1024
        print(
            f"loss {means[0]:.2f} -> {means[-1]:.2f}, "
            f"a device holds {held:.0f} of {whole:.0f} KiB of weights",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

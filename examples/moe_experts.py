"""Train a mixture of experts: experts over a rank's devices, layers over the ranks.

One learns how to write experts as one tensor with an expert dimension, and to name
that dimension, so that XLA moves tokens between devices and nothing else changes.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/moe_experts.py

The last line is `loss A -> B, a device holds C of D experts of a layer`.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

WIDTH, EXPERTS, LAYERS, ROWS, MICROBATCHES, STEPS = 32, 4, 2, 64, 4, 20

RULES = presets.ep("expert") | xpp.AxisRules(
    parameters={
        "*.up": ("expert", "embed", "mlp"),
        "*.down": ("expert", "mlp", "embed"),
    }
)


class Experts(nn.Module):
    """Experts, to each of which go the tokens that its gate likes best.

    An expert has room for twice its fair share of a microbatch; tokens that find no
    room pass by. All shapes are fixed, as XLA needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        room = 2 * x.shape[0] // EXPERTS
        odds = self.gate(tokens).softmax(-1)
        weight, chosen = odds.max(-1)
        wanted = F.one_hot(chosen, EXPERTS)
        # The place of each token in the queue of its expert; one past the end is none.
        place = (wanted.cumsum(0) * wanted).sum(-1) - 1
        slot = F.one_hot(place.clamp(max=room), room + 1)[:, :room]
        sent = (wanted[:, :, None] * slot[:, None, :]).to(x.dtype)
        # Here tokens leave for the devices of their experts, and there they return.
        inside = torch.einsum("tes,tw->esw", sent, tokens)
        inside = xpp.shard(inside, "expert", None, "embed")
        hidden = xpp.shard(F.gelu(inside @ self.up), "expert", None, "mlp")
        outside = xpp.shard(hidden @ self.down, "expert", None, "embed")
        back = torch.einsum("tes,esw->tw", sent * weight[:, None, None], outside)
        return xpp.shard(x + back, "batch", "embed")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "expert"))
    torch.manual_seed(0)
    with xpp.deferred_init():
        model = Model()
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // MICROBATCHES, WIDTH),),
        split_spec={"layers.1": SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(
        mesh.get_local_rank("pp"),
        xpp.device(),
        mesh.get_group("pp"),
        mesh=mesh["expert"],
        sharding=RULES,
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=3e-3)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

    x = torch.randn(ROWS, WIDTH)  # the same on both ranks: both were seeded alike
    y = torch.where(x[:, :1] > 0, x.roll(1, 1), -x)  # two kinds of tokens
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
        split = mesh["expert"].mesh_shape[0]
        print(
            f"loss {means[0]:.2f} -> {means[-1]:.2f}, "
            f"a device holds {EXPERTS // split} of {EXPERTS} experts of a layer",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

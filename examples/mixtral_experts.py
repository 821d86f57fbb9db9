"""Train a Mixtral of transformers with its experts split over a rank's devices.

One learns to take a model of experts as it is, but for its blocks of experts, which
`routed_experts.py` replaces. Needs `pip install "transformers<5"`.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/mixtral_experts.py

The last line is `loss A -> B, a device holds C of D experts of a layer`.
"""

import torch
import torch.distributed as dist
from routed_experts import EXPERTS, with_routed_experts
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import torch_xla_pp as xpp

CONFIG = MixtralConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    max_position_embeddings=16,
    use_cache=False,
)
LENGTH, ROWS, MICROBATCHES, STEPS = 8, 16, 4, 20


def loss_fn(output: MoeCausalLMOutputWithPast, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "expert"))
    torch.manual_seed(0)
    model = with_routed_experts(MixtralForCausalLM(CONFIG))
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // MICROBATCHES, LENGTH, dtype=torch.long),),
        split_spec={"model.layers.1": SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(
        mesh.get_local_rank("pp"),
        xpp.device(),
        mesh.get_group("pp"),
        mesh=mesh["expert"],
        sharding=EXPERTS,
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)

    # Texts that count: the next token is the last one plus one.
    starts = torch.randint(CONFIG.vocab_size, (ROWS, 1))
    text = (starts + torch.arange(LENGTH + 1)) % CONFIG.vocab_size
    means = []
    for _ in range(STEPS):
        if stage.is_first:
            schedule.step(text[:, :-1].to(xpp.device()))
        else:
            schedule.step(target=text[:, 1:].to(xpp.device()))
        optimizer.step()
        optimizer.zero_grad()
        means.append(xpp.losses(schedule).mean().item())

    if stage.is_last:
        experts, devices = CONFIG.num_local_experts, mesh["expert"].mesh_shape[0]
        print(
            f"loss {means[0]:.2f} -> {means[-1]:.2f}, "
            f"a device holds {experts // devices} of {experts} experts of a layer",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a Llama of transformers from its config: tensor parallel, in two stages.

One learns to take a model as it is: it is built without memory, traced, and sharded by
patterns on the names that it has. Needs `pip install "transformers<5"`.

    CPU_NUM_DEVICES=2 torchrun --nproc-per-node 2 examples/llama_tp.py

The last line is `loss A -> B, a device holds C of D KiB of weights`.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import torch_xla_pp as xpp
from torch_xla_pp.mesh import presets

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16,
    use_cache=False,
)
LENGTH, ROWS, MICROBATCHES, STEPS = 8, 16, 4, 20

RULES = presets.tp("model") | xpp.AxisRules(
    parameters={
        "*.q_proj.weight": ("heads", "embed"),
        "*.[kv]_proj.weight": ("kv_heads", "embed"),
        "*.o_proj.weight": ("embed", "heads"),
        "*.gate_proj.weight": ("mlp", "embed"),
        "*.up_proj.weight": ("mlp", "embed"),
        "*.down_proj.weight": ("embed", "mlp"),
        "*.embed_tokens.weight": ("vocab", "embed"),
        "lm_head.weight": ("vocab", "embed"),
    },
    activations={
        "*.q_proj": ("batch", "sequence", "heads"),
        "*.[kv]_proj": ("batch", "key_sequence", "kv_heads"),
        "*.o_proj": ("batch", "norm_sequence", "embed"),
        "*.up_proj": ("batch", "sequence", "mlp"),
        "*.down_proj": ("batch", "norm_sequence", "embed"),
        "lm_head": ("batch", "sequence", "vocab"),
    },
)


def loss_fn(output: CausalLMOutputWithPast, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def main() -> None:
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "model"))
    torch.manual_seed(0)
    with xpp.deferred_init():
        model = LlamaForCausalLM(CONFIG)
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(ROWS // MICROBATCHES, LENGTH, dtype=torch.long),),
        split_spec={"model.layers.1": SplitPoint.BEGINNING},
        activations=RULES.activations,
    )
    stage = pipe.build_stage(
        mesh.get_local_rank("pp"),
        xpp.device(),
        mesh.get_group("pp"),
        mesh=mesh["model"],
        sharding=RULES,
    )
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)

    # Texts that count: the next token is the last one plus one. Seeded alike, both
    # ranks have the same.
    starts = torch.randint(CONFIG.vocab_size, (ROWS, 1))
    text = (starts + torch.arange(LENGTH + 1)) % CONFIG.vocab_size
    x, y = text[:, :-1], text[:, 1:]
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

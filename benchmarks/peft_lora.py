"""LoRA by Hugging Face's peft on a Llama of transformers, in two stages.

    python benchmarks/peft_lora.py

Needs peft, which is no dependency. Prints how loss and gradients of the adapters
compare with those of the unsplit model, and whether the adapters alone got gradients
and were changed by a step of AdamW.
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint

import torch_xla_pp as xpp
from torch_xla_pp.testing import Worlds


def adapted_llama() -> nn.Module:
    """Make a tiny Llama whose queries and values have adapters that are not 0."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model: nn.Module = get_peft_model(LlamaForCausalLM(config), lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def train() -> list[str]:
    """Verify a step, take one, and return what was found on this rank."""
    dist.init_process_group("xla_pp")
    warnings.simplefilter("ignore")
    model = adapted_llama()
    ids = torch.randint(0, 32, (8, 6))
    pipe = xpp.pipeline(
        model,
        mb_args=(),
        mb_kwargs={"input_ids": ids[:2].clone()},
        split_spec={"base_model.model.model.layers.1": SplitPoint.BEGINNING},
    )
    stage = pipe.build_stage(dist.get_rank(), xpp.device())
    schedule = Schedule1F1B(
        stage,
        n_microbatches=4,
        loss_fn=lambda output, target: nn.functional.cross_entropy(
            output.logits.flatten(0, 1), target.flatten()
        ),
    )
    found = str(xpp.verify(model, schedule, (), ids, kwargs={"input_ids": ids}))
    parameters = dict(stage.submod.named_parameters())
    before = {name: p.detach().cpu().clone() for name, p in parameters.items()}
    optimizer = torch.optim.AdamW([p for p in parameters.values() if p.requires_grad])
    if stage.is_first:
        schedule.step(input_ids=ids)
    else:
        schedule.step(target=ids)
    optimizer.step()
    graded = {name for name, p in parameters.items() if p.grad is not None}
    moved = {n for n, p in parameters.items() if not torch.equal(p.cpu(), before[n])}
    adapters = {name for name in parameters if "lora_" in name}
    return [
        found,
        f"rank {stage.stage_index}: {len(adapters)} adapters of {len(parameters)} "
        f"parameters; gradients for the adapters alone: {graded == adapters}; the "
        f"adapters alone were changed: {moved == adapters}",
    ]


def main() -> None:
    """Run both ranks and print what they found."""
    with Worlds() as worlds:
        (report, first), (_, second) = worlds.run(train, ranks=2, timeout_s=500)
    print(f"{report}\n{first}\n{second}")


if __name__ == "__main__":
    main()

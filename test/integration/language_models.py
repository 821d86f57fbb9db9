"""Tiny models of Hugging Face's transformers, trained as pipelines and unsplit."""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import torch_xla_pp as xpp

VOCAB, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 4, 6, 2
BASICS = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and how to train it; `manual` stages are for "llama" alone."""

    model: str
    ranks: int = 2
    devices: int = 1
    rules: xpp.AxisRules | None = None
    is_manual: bool = False


@dataclass
class Report:
    """Relative errors by what was compared."""

    errors: dict[str, float] = field(default_factory=dict)
    edges: str = ""
    shared: list[tuple[int, ...]] = field(default_factory=list)
    explanation: Any = None

    def compare(self, what: str, got: Tensor | None, expected: Tensor | None) -> None:
        """Keep the largest difference, relative to the largest value."""
        if got is None or expected is None:
            self.errors[what] = float("inf")
            return
        got, expected = got.detach().cpu(), expected.detach()
        size = float(expected.abs().max())
        self.errors[what] = float((got - expected).abs().max()) / max(size, 1e-3)


class DenseMoe(MixtralSparseMoeBlock):
    """Experts that all get every token: shapes do not depend on the routing."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(hidden_states)
        top, chosen = logits.float().softmax(-1).topk(self.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(logits).scatter(-1, chosen, top.to(logits.dtype))
        outputs = torch.stack([expert(hidden_states) for expert in self.experts], -1)
        mixed = (outputs * weights.unsqueeze(-2)).sum(-1)
        return mixed, logits.flatten(0, 1)


def gpt2(num_layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=num_layers,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(num_layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        **BASICS,
        num_hidden_layers=num_layers,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def bert(num_layers: int) -> nn.Module:
    config = transformers.BertConfig(
        **BASICS,
        num_hidden_layers=num_layers,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def t5(num_layers: int) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=4,
        d_ff=2 * WIDTH,
        num_layers=num_layers // 2,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def mixtral(num_layers: int) -> nn.Module:
    config = transformers.MixtralConfig(
        **BASICS,
        num_hidden_layers=num_layers,
        num_key_value_heads=2,
        num_local_experts=3,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def dense(model: nn.Module) -> nn.Module:
    """Let the experts of a Mixtral run densely; the parameters stay."""
    for module in model.modules():
        if isinstance(module, MixtralSparseMoeBlock):
            module.__class__ = DenseMoe
    return model


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "mixtral": mixtral}
LAYERS = {
    "gpt2": "transformer.h",
    "llama": "model.layers",
    "bert": "bert.encoder.layer",
    "mixtral": "model.layers",
}


def split_points(job: Job) -> list[str]:
    """Return where each stage but the first begins, with one layer in each stage."""
    if job.model != "t5":
        return [f"{LAYERS[job.model]}.{i}" for i in range(1, job.ranks)]
    half = job.ranks // 2
    names = ("encoder", "decoder")
    return [f"{name}.block.{i}" for name in names for i in range(half)][1:]


def batch_of(job: Job, num_microbatches: int) -> dict[str, Tensor]:
    """Return keyword arguments of the model."""
    rows = ROWS * num_microbatches
    tokens = torch.randint(1, VOCAB, (rows, LENGTH))
    labels = torch.randint(1, VOCAB, (rows, LENGTH))
    if job.model == "t5":
        return {"input_ids": tokens, "labels": labels}
    if job.model == "bert":
        mask = (torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None] % 3).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    return {"input_ids": tokens}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    """Return the model's own loss if it computed one."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class LlamaPart(nn.Module):
    """One stage of a Llama, cut out by hand, with the model's parameter names."""

    def __init__(self, llama: Any, layers: range) -> None:
        super().__init__()
        self.model = llama.model
        for index in range(len(self.model.layers)):
            if index not in layers:
                self.model.layers[index] = Passed()
        if 0 not in layers:
            self.model.embed_tokens = None
        is_last = len(self.model.layers) - 1 in layers
        if not is_last:
            self.model.norm = nn.Identity()
        self.lm_head = llama.lm_head if is_last else None

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None
    ) -> Any:
        output = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds)
        return self.lm_head(output.last_hidden_state) if self.lm_head else output


class Passed(nn.Module):
    """A placeholder for a layer of another stage; the others keep their names by it."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


def build(job: Job, model: nn.Module, example: Mapping[str, Tensor]) -> Any:
    """Make this rank's stage, and the pipe if the model is traced."""
    mesh = xpp.init_device_mesh(
        "xla", (job.ranks, job.devices), mesh_dim_names=("pp", "model")
    )
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    if job.is_manual:
        return None, xpp.PipelineStage(
            LlamaPart(model, range(rank, rank + 1)),
            rank,
            job.ranks,
            xpp.device(),
            group=group,
            mesh=mesh["model"],
            sharding=job.rules,
            inputs_from={"inputs_embeds": (rank - 1, "last_hidden_state")}
            if rank
            else None,
        )
    pipe = xpp.pipeline(
        model,
        mb_args=(),
        mb_kwargs=dict(example),
        split_spec=dict.fromkeys(split_points(job), SplitPoint.BEGINNING),
        activations=job.rules.activations if job.rules else None,
    )
    stage = pipe.build_stage(
        rank, xpp.device(), group, mesh=mesh["model"], sharding=job.rules
    )
    return pipe, stage


def train(job: Job) -> Report:
    """Take one step and compare it with the unsplit model's."""
    join()
    torch.manual_seed(0)
    reference: Any = MODELS[job.model](job.ranks)
    model = dense(copy.deepcopy(reference))
    num_microbatches = job.ranks
    batch = batch_of(job, num_microbatches)
    target = torch.randint(0, VOCAB, (ROWS * num_microbatches, LENGTH))
    cut = {name: value.split(ROWS) for name, value in batch.items()}
    parts = [{k: v[i] for k, v in cut.items()} for i in range(num_microbatches)]
    pipe, stage = build(job, model, {k: v.clone() for k, v in parts[0].items()})
    # The gradient of a key's bias is zero but for rounding, by which Adam's own
    # epsilon, 1e-8, would let it divide.
    adam = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-6)
    optimizer = adam(stage.submod.parameters())
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=loss_fn)
    losses: list[Tensor] = []
    kwargs: dict[str, Any] = dict(batch) if stage.is_first else {}
    kwargs |= {"target": target, "losses": losses} if stage.is_last else {}
    output = schedule.step(**kwargs)
    report = Report()
    if pipe is not None:
        report.edges = " ".join(f"{a}{b}" for a, b in sorted(pipe.stage_graph.pairs))
        report.shared = [parameter.stages for parameter in pipe.stage_graph.shared]
    report.explanation = stage.explain()
    compare_step(report, stage, reference, parts, target, losses, output)
    optimizer.step()
    adam(reference.parameters()).step()
    named = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in stage.submod.named_parameters():
        report.compare(f"new {name}", parameter, named[name])
    return report


def compare_step(
    report: Report,
    stage: Any,
    reference: nn.Module,
    parts: list[dict[str, Tensor]],
    target: Tensor,
    losses: list[Tensor],
    output: Any,
) -> None:
    """Compare outputs, losses and gradients."""
    outputs = [reference(**part) for part in parts]
    expected = [loss_fn(x, y) for x, y in zip(outputs, target.split(ROWS), strict=True)]
    torch.stack(expected).mean().backward()
    for index, loss in enumerate(losses):
        report.compare(f"loss {index}", loss, expected[index])
    if stage.is_last:
        logits = output if isinstance(output, Tensor) else output.logits
        report.compare("logits", logits, torch.cat([x.logits for x in outputs]))
    if getattr(output, "loss", None) is not None:
        report.compare("losses", output.loss, torch.stack(expected))
    named = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in stage.submod.named_parameters():
        report.compare(name, parameter.grad, named[name].grad)

"""Tiny configurations of architectures of transformers, and where to split them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# Blocks of experts with fixed shapes, of the examples.
sys.path.append(str(Path(__file__).parents[1] / "examples"))

from routed_experts import with_routed_experts  # noqa: E402

VOCAB, WIDTH, HEADS, LENGTH = 32, 16, 4, 6
BASICS = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS}


LAYERDROP = (
    "`layerdrop` asks random numbers which layers run, even at 0: "
    "`stack.training = False` for the modules that hold the list of layers, whose "
    "layers stay in training"
)
WAVES = (
    f"{LAYERDROP}; `feature_extractor._requires_grad = False`, as it asks for its "
    "input's gradient"
)
STATEFUL = "writes its state into attributes of modules; return it, or use a buffer"
ROUTED = (
    "loops over the experts that got tokens: `with_routed_experts` of "
    "`examples/routed_experts.py`"
)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture and how it is tried.

    Args:
        family: What kind of model it is.
        model_type: Its name in transformers.
        head: The automatic class that makes it.
        split: The submodule at which stage 1 begins.
        sizes: What its configuration gets.
        batch: Number of rows → keyword arguments.
        is_training: The mode in which it is traced and compared.
        rewritten: What is done to a model that is refused as it is.
        note: Why it is refused, and what to write.
    """

    family: str
    model_type: str
    head: str
    split: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[int], dict[str, Tensor]]
    is_training: bool = True
    rewritten: Callable[[nn.Module], object] | None = None
    note: str = ""


def tokens(rows: int) -> dict[str, Tensor]:
    """Return texts."""
    return {"input_ids": torch.randint(3, VOCAB, (rows, LENGTH))}


def masked_tokens(rows: int) -> dict[str, Tensor]:
    """Return texts of several lengths."""
    lengths = LENGTH - torch.arange(rows)[:, None] % 3
    return tokens(rows) | {"attention_mask": (torch.arange(LENGTH) < lengths).long()}


def two_texts(rows: int) -> dict[str, Tensor]:
    """Return a text for the encoder and one for the decoder."""
    return tokens(rows) | {"decoder_input_ids": tokens(rows)["input_ids"]}


def pixels(rows: int, size: int = 32) -> dict[str, Tensor]:
    """Return pictures."""
    return {"pixel_values": torch.randn(rows, 3, size, size)}


def wave(rows: int) -> dict[str, Tensor]:
    """Return sound."""
    return {"input_values": torch.randn(rows, 400)}


def spectrum(rows: int) -> dict[str, Tensor]:
    """Return spectra of sound."""
    return {"input_values": torch.randn(rows, 24, 16)}


def spectrum_and_text(rows: int) -> dict[str, Tensor]:
    """Return spectra of sound, and texts."""
    features = torch.randn(rows, 8, 2 * LENGTH)
    return {
        "input_features": features,
        "decoder_input_ids": tokens(rows)["input_ids"],
    }


def decoder(
    model_type: str,
    split: str = "model.layers.1",
    *,
    rewritten: Callable[[nn.Module], object] | None = None,
    **more: Any,
) -> Architecture:
    """Return a model that goes on with a text."""
    return Architecture(
        family="decoder",
        model_type=model_type,
        head="AutoModelForCausalLM",
        split=split,
        sizes=BASICS | GROUPED | more,
        batch=masked_tokens,
        rewritten=rewritten,
        note=LAYERDROP if rewritten else "",
    )


def encoder(model_type: str, split: str, **more: Any) -> Architecture:
    """Return a model that fills in words."""
    return Architecture(
        family="encoder",
        model_type=model_type,
        head="AutoModelForMaskedLM",
        split=split,
        sizes=BASICS | more,
        batch=masked_tokens,
    )


def without_layerdrop(model: nn.Module) -> None:
    """Let stacks of layers not ask in each step which of them to leave out."""
    for part in model.modules():
        if any(isinstance(child, nn.ModuleList) for child in part.children()):
            part.training = False


def of_waves(model: nn.Module) -> None:
    """Let the first part not ask for the gradient of its input, either."""
    for part in model.modules():
        if hasattr(part, "_requires_grad"):
            part._requires_grad = False
    without_layerdrop(model)


def both(
    model_type: str, split: str = "model.decoder.layers.0", **more: Any
) -> Architecture:
    """Return a model that makes a text of another one."""
    sizes = {
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH,
        "decoder_start_token_id": 2,
    }
    return Architecture(
        family="encoder and decoder",
        model_type=model_type,
        head="AutoModelForSeq2SeqLM",
        split=split,
        sizes={k: v for k, v in BASICS.items() if k != "hidden_size"} | sizes | more,
        batch=two_texts,
        rewritten=without_layerdrop,
        note=LAYERDROP,
    )


def vision(
    model_type: str, split: str, *, is_training: bool = True, **more: Any
) -> Architecture:
    """Return a model that says what is in a picture."""
    return Architecture(
        family="vision",
        model_type=model_type,
        head="AutoModelForImageClassification",
        split=split,
        sizes=more,
        batch=pixels,
        is_training=is_training,
    )


VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
}
AUDIO = {
    "conv_dim": (8, 8),
    "conv_kernel": (10, 4),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
}


def experts(
    model_type: str,
    split: str = "model.layers.1",
    *,
    rewritten: Callable[[nn.Module], object] | None = None,
    note: str = "",
    **more: Any,
) -> Architecture:
    """Return a model of experts that goes on with a text."""
    return Architecture(
        family="experts",
        model_type=model_type,
        head="AutoModelForCausalLM",
        split=split,
        sizes=BASICS | GROUPED | EXPERTS | more,
        batch=tokens,
        rewritten=rewritten,
        note=note,
    )


def state_space(
    model_type: str, split: str = "backbone.layers.1", *, note: str = "", **more: Any
) -> Architecture:
    """Return a model with a state in place of attention."""
    return Architecture(
        family="state space",
        model_type=model_type,
        head="AutoModelForCausalLM",
        split=split,
        sizes=BASICS | more,
        batch=tokens,
        note=note,
    )


def audio(model_type: str, split: str, **more: Any) -> Architecture:
    """Return a model that writes what is said."""
    return Architecture(
        family="audio",
        model_type=model_type,
        head="AutoModelForCTC",
        split=split,
        sizes={k: v for k, v in BASICS.items() if k != "use_cache"} | AUDIO | more,
        batch=wave,
        rewritten=of_waves,
        note=WAVES,
    )


ARCHITECTURES: tuple[Architecture, ...] = (
    decoder("gpt2", "transformer.h.1"),
    decoder(
        "gpt_neo",
        "transformer.h.1",
        attention_types=[[["global", "local"], 1]],
        num_layers=2,
        num_heads=HEADS,
    ),
    decoder("gpt_neox", "gpt_neox.layers.1"),
    decoder("gptj", "transformer.h.1", rotary_dim=4),
    decoder("gpt_bigcode", "transformer.h.1"),
    decoder("codegen", "transformer.h.1", rotary_dim=4),
    decoder(
        "opt",
        "model.decoder.layers.1",
        rewritten=without_layerdrop,
        ffn_dim=2 * WIDTH,
        word_embed_proj_dim=WIDTH,
    ),
    decoder("bloom", "transformer.h.1"),
    decoder("mpt", "transformer.blocks.1", d_model=WIDTH, n_layers=2, n_heads=HEADS),
    replace(
        decoder("falcon", "transformer.h.1"),
        sizes=BASICS,
    ),
    decoder("llama"),
    decoder("mistral"),
    decoder("qwen2"),
    decoder("qwen3"),
    decoder("gemma"),
    decoder("gemma2"),
    decoder("gemma3_text"),
    decoder("phi"),
    decoder("phi3"),
    decoder("starcoder2"),
    decoder("olmo2"),
    decoder("stablelm"),
    decoder("cohere"),
    decoder("smollm3"),
    decoder("glm4"),
    encoder("bert", "bert.encoder.layer.1"),
    encoder("roberta", "roberta.encoder.layer.1"),
    encoder(
        "distilbert",
        "distilbert.transformer.layer.1",
        dim=WIDTH,
        hidden_dim=2 * WIDTH,
        n_layers=2,
        n_heads=HEADS,
    ),
    encoder("electra", "electra.encoder.layer.1", embedding_size=WIDTH),
    encoder("mpnet", "mpnet.encoder.layer.1"),
    encoder(
        "deberta-v2",
        "deberta.encoder.layer.1",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
    ),
    encoder(
        "albert",
        "albert.encoder.albert_layer_groups.1",
        embedding_size=8,
        num_hidden_groups=2,
    ),
    encoder(
        "modernbert", "model.layers.1", global_attn_every_n_layers=2, local_attention=4
    ),
    both(
        "t5",
        "decoder.block.0",
        d_model=WIDTH,
        d_kv=4,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=HEADS,
        num_attention_heads=HEADS,
    ),
    both("bart"),
    both("mbart"),
    both("pegasus"),
    both("marian"),
    both("m2m_100"),
    Architecture(
        family="encoder and decoder",
        model_type="whisper",
        head="AutoModelForSpeechSeq2Seq",
        split="model.decoder.layers.0",
        sizes=both("whisper").sizes
        | {
            "num_mel_bins": 8,
            "max_source_positions": LENGTH,
            "max_target_positions": 16,
        },
        batch=spectrum_and_text,
        rewritten=without_layerdrop,
        note=LAYERDROP,
    ),
    vision("vit", "vit.encoder.layer.1", **VIT),
    vision("beit", "beit.encoder.layer.1", **VIT),
    vision("dinov2", "dinov2.encoder.layer.1", **VIT),
    vision(
        "siglip", "vision_model.encoder.layers.1", vision_config=VIT, text_config=VIT
    ),
    vision(
        "swin",
        "swin.encoder.layers.1",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    vision(
        "swinv2",
        "swinv2.encoder.layers.1",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    vision(
        "convnext",
        "convnext.encoder.stages.1",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
    ),
    vision(
        "convnextv2",
        "convnextv2.encoder.stages.1",
        hidden_sizes=[8, 16],
        depths=[1, 1],
        num_stages=2,
    ),
    vision(
        "resnet",
        "resnet.encoder.stages.1",
        is_training=False,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    vision(
        "regnet",
        "regnet.encoder.stages.1",
        is_training=False,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=8,
    ),
    vision(
        "mobilenet_v2",
        "mobilenet_v2.layer.8",
        is_training=False,
        depth_multiplier=0.25,
        image_size=32,
    ),
    vision(
        "segformer",
        "segformer.encoder.patch_embeddings.1",
        is_training=False,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
    ),
    audio("wav2vec2", "wav2vec2.encoder.layers.1"),
    audio("hubert", "hubert.encoder.layers.1"),
    Architecture(
        family="audio",
        model_type="audio-spectrogram-transformer",
        head="AutoModelForAudioClassification",
        split="audio_spectrogram_transformer.encoder.layer.1",
        sizes=VIT
        | {
            "max_length": 24,
            "num_mel_bins": 16,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        batch=spectrum,
    ),
    state_space("mamba", state_size=4),
    state_space(
        "mamba2", state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=4
    ),
    state_space("falcon_mamba", state_size=4),
    state_space(
        "recurrent_gemma",
        "model.layers.1",
        lru_width=WIDTH,
        attention_window_size=4,
        block_types=["recurrent", "attention"],
        head_dim=4,
        num_key_value_heads=2,
        note=STATEFUL,
    ),
    state_space(
        "rwkv", "rwkv.blocks.1", attention_hidden_size=WIDTH, context_length=16
    ),
    experts("mixtral", rewritten=with_routed_experts, note=ROUTED),
    experts(
        "qwen2_moe",
        rewritten=with_routed_experts,
        note=ROUTED,
        shared_expert_intermediate_size=WIDTH,
        decoder_sparse_step=1,
    ),
    experts(
        "qwen3_moe",
        rewritten=with_routed_experts,
        note=ROUTED,
        decoder_sparse_step=1,
    ),
    experts("olmoe", rewritten=with_routed_experts, note=ROUTED),
    experts("phimoe", note="loops over experts, as Mixtral; write a block as there"),
    experts(
        "granitemoe",
        note="cuts tokens by how many each expert got; write a block as for Mixtral",
    ),
    experts(
        "gpt_oss",
        note="loops over experts on the host and in training; write a block as for "
        "Mixtral",
        sliding_window=4,
    ),
    experts(
        "deepseek_v3",
        note="asks which experts got tokens; write a block as for Mixtral",
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=1,
        num_key_value_heads=HEADS,
    ),
    experts("llama4_text", intermediate_size_mlp=2 * WIDTH, attention_chunk_size=8),
    experts(
        "jamba",
        note="asks whether a mask is full, and loops over experts",
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=2,
    ),
)

"""Weights come from and go to the files that transformers reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import SplitPoint

import torch_xla_pp as xpp
from checkpoint.test_faults import assert_one_error, error_text
from torch_xla_pp.checkpoint import hugging_face
from torch_xla_pp.testing import Worlds

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.worlds

SHARDING = {
    "*.up_proj.weight": ("model", None),
    "*.embed_tokens.weight": (None, "model"),
}


def config(**changes: Any) -> Any:
    return transformers.LlamaConfig(
        **{
            "vocab_size": 24,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 16,
            "use_cache": False,
            "tie_word_embeddings": True,
            **changes,
        }
    )


def reference(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Tensor]:
    """Save a model in several files; return its values."""
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config(**changes))
    model.save_pretrained(folder, max_shard_size="6KB")
    return {name: value.clone() for name, value in model.state_dict().items()}


def stage_of(**changes: Any) -> Any:
    """Join, and return this rank's stage of a model that was built without memory."""
    dist.init_process_group("xla_pp")
    mesh = xpp.init_device_mesh("xla", (2, 2), mesh_dim_names=("pp", "model"))
    with xpp.deferred_init():
        model = transformers.LlamaForCausalLM(config(**changes))
    pipe = xpp.pipeline(
        model,
        mb_args=(torch.zeros(2, 4, dtype=torch.long),),
        split_spec={"model.layers.1": SplitPoint.BEGINNING},
    )
    rank = mesh.get_local_rank("pp")
    return pipe.build_stage(rank, xpp.device(), mesh=mesh["model"], sharding=SHARDING)


def goes_round(source: str, target: str) -> tuple[dict[str, Tensor], int]:
    """Load and save; return values, and the largest part that was read at once."""
    stage = stage_of()
    largest = 0
    read = hugging_face._Readers.parts

    def counting(self: Any, name: str) -> Any:
        parts = read(self, name)

        def measured(box: Any) -> Tensor:
            nonlocal largest
            found = parts(box)
            if "up_proj" in name:
                largest = max(largest, found.numel())
            return found

        return measured

    hugging_face._Readers.parts = counting
    try:
        xpp.checkpoint.load_safetensors(stage, source)
    finally:
        hugging_face._Readers.parts = read
    xpp.checkpoint.save_safetensors(stage, target, max_file_bytes=6000)
    values = {
        name: value.detach().cpu() for name, value in stage.submod.state_dict().items()
    }
    dist.destroy_process_group()
    return values, largest


def test_a_model_goes_round(worlds: Worlds, tmp_path: Path) -> None:
    expected = reference(tmp_path / "source")
    target = tmp_path / "target"
    config().save_pretrained(target)
    args = (str(tmp_path / "source"), str(target))
    found = worlds.run(goes_round, ranks=2, devices=2, args=args, timeout_s=400)
    for values, largest in found:
        for name, value in values.items():
            assert torch.equal(value, expected[name]), name
        # Of a split tensor each device's part is read by itself.
        assert largest == 32 * 16 // 2

    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert len(set(index["weight_map"].values())) > 2
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    model = transformers.LlamaForCausalLM.from_pretrained(target)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    ids = torch.arange(4)[None]
    whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "source")
    assert torch.equal(model(ids).logits, whole(ids).logits)


def refuses(folder: str, empty: str) -> list[str]:
    stage = stage_of(num_hidden_layers=3, intermediate_size=8)
    texts = [error_text(lambda: xpp.checkpoint.load_safetensors(stage, folder))]
    index = Path(folder) / "model.safetensors.index.json"
    name = min(json.loads(index.read_text())["weight_map"].values())
    if dist.get_rank() == 0:
        (Path(folder) / name).write_bytes(b"no such file")
    dist.barrier()
    texts.append(error_text(lambda: xpp.checkpoint.load_safetensors(stage, folder)))
    texts.append(error_text(lambda: xpp.checkpoint.load_safetensors(stage, empty)))
    dist.destroy_process_group()
    return texts


def test_other_weights_are_refused_with_all_that_differs(
    worlds: Worlds, tmp_path: Path
) -> None:
    reference(tmp_path / "weights", attention_bias=True)
    args = (str(tmp_path / "weights"), str(tmp_path))
    other, damaged, missing = zip(
        *worlds.run(refuses, ranks=2, devices=2, args=args, timeout_s=400), strict=True
    )
    assert_one_error(
        list(other),
        r"missing: model\.layers\.2.*unexpected: .*q_proj\.bias.*other shapes: .*"
        r"up_proj\.weight: expected shape \[8, 16\], got \[32, 16\]",
    )
    # Of stages of both ranks.
    assert "layers.0.mlp.up_proj.weight: exp" in other[0]
    assert "layers.1.mlp.up_proj.weight: exp" in other[0]
    assert_one_error(list(damaged), "expected a readable safetensors file, got ")
    assert_one_error(list(missing), "expected model.safetensors.index.json or ")

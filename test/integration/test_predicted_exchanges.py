"""What a plan with rules says of exchanges and memory is what its programs do."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from joining import join
from torch import Tensor, nn
from torch.nn import functional as F

import torch_xla_pp as xpp
from torch_xla_pp.planner import PipelinePlan
from torch_xla_pp.testing import Worlds
from torch_xla_pp.work import WorkGraph

# Weights are larger than what is summed: XLA would else gather a weight in place of a
# sum where what it is multiplied with is whole.
ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCAB, MICROBATCHES = 4, 4, 32, 4, 64, 48, 2
RULES = xpp.AxisRules(
    parameters={
        "*.[qkv].weight": ("heads", "embed"),
        "*.[qkv].bias": ("heads",),
        "*.out.weight": ("embed", "heads"),
        "*.up.weight": ("mlp", "embed"),
        "*.up.bias": ("mlp",),
        "*.down.weight": ("embed", "mlp"),
        "*.weight": ("vocab", "embed"),
        "head.bias": ("vocab",),
    }
)
# The cut is inside of the MLP, where a value is split: it is made whole to be sent.
STAGES = (("embed", "block.up"), ("block.down", "head"))
# In the programs of CPU devices a reduce-scatter is an all-reduce and a slice.
KIND = {"reduce-scatter": "all-reduce"}
# What XLA does besides, by rank and preset: a device needs the tokens of all rows for
# the columns of a table that it keeps. Where XLA multiplies itself, it makes the weight
# whole that the hidden value's gradient is a product of, in place of that.
BESIDES = {(0, "fsdp"): Counter({("B", "all-gather"): ROWS * LENGTH * 8})}
BESIDES_OF_PRODUCTS = {
    (1, "tp"): Counter({("B", "all-gather"): 4 * HIDDEN * (WIDTH - ROWS * LENGTH)})
}

Bytes = Counter[tuple[str, str]]


class Block(nn.Module):
    """Attention and an MLP, with a product for each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            f(x).reshape(heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def planned(work: WorkGraph, preset: str) -> PipelinePlan:
    return xpp.make_plan(
        work,
        rows=ROWS * MICROBATCHES,
        ranks=2,
        devices_per_rank=2,
        replicas=(1,),
        microbatches=(MICROBATCHES,),
        schedules=("gpipe",),
        remat=("none",),
        sharding=(preset,),
        stages=STAGES,
        rules=RULES,
    )


def run_all(presets: tuple[str, ...], folder: str) -> list[Any]:
    """Run a plan of each preset; return it and what this rank's stage did and held.

    XLA reads its flags when it is first used: here, with a folder for each rank.
    """
    rank = os.environ["RANK"]
    flags = f"--xla_dump_to={folder}/rank{rank} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    join()
    found = []
    for preset in presets:
        tokens = torch.arange(MICROBATCHES * ROWS * LENGTH).reshape(-1, LENGTH) % VOCAB
        model = Model()
        plan = planned(xpp.trace_work(model, (tokens[:ROWS],)), preset)
        mesh = xpp.init_device_mesh("xla", plan=plan)
        pipe = xpp.pipeline(model, (tokens[:ROWS],), plan=plan)
        (stage,) = pipe.build_stages(mesh)
        schedule = pipe.make_schedule([stage], loss_fn=loss_fn)
        given = (tokens,) if stage.is_first else ()
        schedule.step(*given, target=tokens if stage.is_last else None)
        memory = stage.peak_memory()
        held = memory.saved_bytes, memory.state_bytes
        found.append((plan, exchanged_by(stage), held))
    return found


def exchanged_by(stage: Any) -> Bytes:
    """Return the bytes of each kind of collective in the programs of each action."""
    when = {"forward": "F", "backward": "B", "gradient reduction": "step"}
    found: Bytes = Counter()
    for program in stage.explain().programs:
        for one in program.collectives:
            found[when[program.name], one.kind] += one.num_bytes
    return found


def exchanged_in(plan: PipelinePlan, stage: int) -> Bytes:
    """Return the same as it is planned."""
    found: Bytes = Counter()
    for one in plan.predicted.collectives:
        if one.stage == stage:
            when = {"I": "B", "W": "B"}.get(one.when, one.when)
            found[when, KIND.get(one.kind, one.kind)] += one.bytes
    return found


@pytest.mark.worlds
@pytest.mark.parametrize(
    ("products", "besides"),
    [("torch", BESIDES), ("xla", BESIDES | BESIDES_OF_PRODUCTS)],
)
def test_exchanges_and_bytes_are_those_of_the_programs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    products: str,
    besides: dict[tuple[int, str], Bytes],
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", products)
    presets = ("dp", "fsdp", "tp")
    with Worlds() as worlds:
        args = (presets, str(tmp_path))
        by_rank = worlds.run(run_all, ranks=2, devices=2, args=args, timeout_s=300)
    for rank, found in enumerate(by_rank):
        for preset, (plan, exchanged, (saved, state)) in zip(
            presets, found, strict=True
        ):
            expected = exchanged_in(plan, rank)
            expected.update(besides.get((rank, preset), {}))
            assert exchanged == expected, (rank, preset)
            held = plan.predicted.ranks[rank].bytes
            assert saved == held.saved + held.outputs, (rank, preset)
            assert state == held.parameters + held.gradients, (rank, preset)

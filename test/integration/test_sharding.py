"""Axis rules shard a stage, and change no number.

Tolerance 1e-5 of the largest value of a tensor, float32: sums are taken in another
order.
"""

import copy
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from integration import training
from integration.sharded import (
    EXPERTS,
    LENGTH,
    PATTERNS,
    PRESETS,
    ROWS,
    WIDTH,
    Block,
    Experts,
    Job,
    Model,
    Report,
    build,
    distributed,
    take_step,
    train,
)
from joining import join
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.functional import gelu, mse_loss

import torch_xla_pp as xpp
from torch_xla_pp.compile import Explanation
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

Axes: TypeAlias = str | tuple[str, ...] | None


def check(reports: list[Report]) -> None:
    for report in reports:
        wrong = {k: v for k, v in report.errors.items() if not v < 1e-5}
        assert wrong == {}


@pytest.mark.parametrize(
    ("preset", "frontend", "is_v"),
    [
        ("tp", "traced", False),
        ("fsdp", "manual", False),
        ("fsdp_once+tp", "traced", False),
        ("dp+tensor_sequence", "manual", False),
        ("dp+cp", "manual", False),
        ("dp+sp", "manual", False),
        ("dp+tp", "manual", True),
        ("fsdp_once+tp", "manual", True),
        ("dp+cp", "manual", True),
        ("dp+sp", "manual", True),
        ("dp+tensor_sequence", "manual", True),
    ],
)
def test_presets_train_as_one_process(
    worlds: Worlds, preset: str, frontend: str, is_v: bool
) -> None:
    job = Job(rules=PRESETS[preset] | PATTERNS, frontend=frontend, is_v=is_v)
    check(worlds.run(train, ranks=2, devices=4, args=(job,)))


def test_rules_say_nothing_to_one_device(worlds: Worlds) -> None:
    """Which multiplies with another library than several do."""
    job = Job(rules=PRESETS["fsdp_once+tp"] | PATTERNS, axis_size=1)
    check(worlds.run(train, ranks=2, devices=1, args=(job,)))


@pytest.mark.parametrize("is_v", [False, True])
def test_experts_train_as_one_process(worlds: Worlds, is_v: bool) -> None:
    rules = PRESETS["ep"] | EXPERTS
    job = Job(rules=rules, frontend="manual", is_v=is_v, block=Experts)
    check(worlds.run(train, ranks=2, devices=4, args=(job,)))


@pytest.mark.parametrize("what", ["part", "stage"])
def test_modules_may_be_distributed_by_torch(worlds: Worlds, what: str) -> None:
    job = Job(rules=None, frontend="manual", distributed=what)
    reports = worlds.run(train, ranks=2, devices=4, args=(job,))
    check(reports)
    weights = 4 * (3 + 1 + 4 + 4) * WIDTH**2
    others = 4 * (2 + 4 + 1) * WIDTH
    assert reports[0].explanation.parameter_bytes == weights // 2 + others


def wrap_late() -> None:
    join()
    (stage,) = build(Job(rules=None, frontend="manual"), Model())
    distributed(stage.submod, wrap_too=True)
    schedule = ScheduleGPipe(stage, 2)
    batch = torch.zeros(2 * ROWS, LENGTH, WIDTH)
    with pytest.raises(xpp.PipelineError, match="expected plain tensors, got XLASha"):
        schedule.step(*[batch] if stage.is_first else [])


def test_a_parameter_that_is_wrapped_too_late_is_told(worlds: Worlds) -> None:
    worlds.run(wrap_late, ranks=2, devices=4, keep_workers=True)


def test_an_activation_crosses_as_it_was_laid_out(worlds: Worlds) -> None:
    """Between stages the sequence is split over the axis that splits heads inside."""
    job = Job(rules=PRESETS["dp+tensor_sequence"] | PATTERNS)
    first, last = worlds.run(train, ranks=2, devices=4, args=(job,))
    check([first, last])
    value = 4 * ROWS * LENGTH * WIDTH
    assert first.explanation.sent_bytes == value // 4
    assert last.explanation.received_bytes == value // 4


@pytest.mark.parametrize("frontend", ["traced", "manual"])
def test_outputs_of_submodules_may_be_laid_out_by_name(
    worlds: Worlds, frontend: str
) -> None:
    whole = xpp.AxisRules(activations={"blocks.[0-9]": ("batch", "sequence", "mlp")})
    job = Job(rules=PRESETS["dp+tp"] | PATTERNS | whole, frontend=frontend)
    first, last = worlds.run(train, ranks=2, devices=4, args=(job,))
    check([first, last])
    assert first.explanation.sent_bytes == 4 * ROWS * LENGTH * WIDTH // 4


def wrong(rules: xpp.AxisRules, frontend: str) -> str:
    join()
    job = Job(rules=rules, frontend=frontend)
    try:
        (stage,) = build(job, Model())
        schedule = ScheduleGPipe(stage, 2)
        batch = torch.zeros(2 * ROWS, LENGTH, WIDTH)
        schedule.step(*[batch] if stage.is_first else [])
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("frontend", "fault"),
    [
        ("traced", "pattern 'tail.*' matches no parameter of the model"),
        ("manual", "pattern 'tail.*' of parameters matches nothing in any stage"),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_on_every_rank(
    worlds: Worlds, frontend: str, fault: str
) -> None:
    tail = xpp.AxisRules(parameters={"tail.*": ("mlp",)})
    args = (PRESETS["tp"] | PATTERNS | tail, frontend)
    for text in worlds.run(wrong, ranks=2, devices=4, args=args, keep_workers=True):
        assert fault in text


def test_a_name_that_rules_do_not_have_is_told_with_the_stage(worlds: Worlds) -> None:
    rules = xpp.AxisRules(axes={"batch": "data", "embed": None, "mlp": None})
    for text in worlds.run(
        wrong, ranks=2, devices=4, args=(rules, "manual"), keep_workers=True
    ):
        assert "ValueError: stage 0: expected calls of shard that fit" in text
        assert "shard of a value of shape [4, 4, 8] as ('batch', 'norm_sequence', " in (
            text
        )
        assert "unknown logical axis 'norm_sequence', known are batch, embed" in text


Found = list[tuple[int, str, tuple[str, ...] | None]]


def collectives(presets: list[str]) -> dict[str, Found]:
    """Return those of each program of a stage, by preset and program."""
    join()
    found: dict[str, Found] = {}

    def note(name: str, explanation: Explanation) -> None:
        for program in explanation.programs:
            if program.collectives is None:
                continue  # XLA had the program of another preset.
            found[f"{name} {program.name}"] = [
                (each.count, each.kind, each.axes) for each in program.collectives
            ]

    for name in presets:
        rules = PRESETS[name] | (EXPERTS if name == "ep" else PATTERNS)
        block = Experts if name == "ep" else Block
        report = take_step(Job(rules=rules, ranks=1, frontend="manual", block=block))
        check([report])
        note(name, report.explanation)
    job = training.Job(
        schedule="GPipe", frontend="manual", ranks=1, devices=4, num_microbatches=2
    )
    stages = training.build(job, training.Model(1), training.mesh_of(job))
    schedule = training.make_schedule(job, stages)
    training.run_step(job, schedule, stages, *training.batch(job, 0))
    note("tokens", stages[0].explain())
    return found


DATA, MODEL = ("data",), ("model",)

# One block of 8 parameters; `embed` is a dimension of 4 of them, heads or `mlp` of 5.
# CPU devices have no reduce-scatter: an all-reduce, of which each keeps a part.
EXPECTED: dict[str, Found] = {
    "dp forward": [],
    # Gradients are added up over devices once, at the end of a step.
    "dp backward": [],
    "dp gradient reduction": [(8, "all-reduce", DATA)],
    # Each weight is gathered where it is used, and its gradient reduced there.
    "fsdp forward": [(4, "all-gather", DATA)],
    "fsdp backward": [(4, "all-gather", DATA), (4, "all-reduce", DATA)],
    "fsdp gradient reduction": [(4, "all-reduce", DATA)],
    "fsdp_transpose forward": [(5, "all-gather", DATA)],
    "fsdp_transpose backward": [(4, "all-gather", DATA), (5, "all-reduce", DATA)],
    "fsdp_transpose gradient reduction": [(3, "all-reduce", DATA)],
    # One after attention and one after the MLP, and back.
    "tp forward": [(2, "all-reduce", MODEL)],
    "tp backward": [(2, "all-reduce", MODEL)],
    # In two norms, and after the two products that read the residual stream.
    "tp_transpose forward": [(4, "all-reduce", MODEL)],
    "tp_transpose backward": [(3, "all-gather", MODEL), (2, "all-reduce", MODEL)],
    "fsdp+tp forward": [(4, "all-gather", DATA), (2, "all-reduce", MODEL)],
    "fsdp+tp backward": [
        (4, "all-gather", DATA),
        (4, "all-reduce", DATA),
        (2, "all-reduce", MODEL),
    ],
    "fsdp+tp gradient reduction": [(4, "all-reduce", DATA)],
    # Nothing over the data axis but before and after the microbatches.
    "fsdp_once+tp gathering of weights": [(4, "all-gather", DATA)],
    "fsdp_once+tp forward": [(2, "all-reduce", MODEL)],
    "fsdp_once+tp backward": [(2, "all-reduce", MODEL)],
    "fsdp_once+tp gradient reduction": [(8, "all-reduce", DATA)],
    "dp+tensor_sequence forward": [
        (2, "all-gather", MODEL),
        (2, "all-reduce", MODEL),
    ],
    # Of activations, of which gradients of weights need the whole sequence, too, and of
    # the gradients of the 3 parameters that are not split.
    "dp+tensor_sequence backward": [
        (6, "all-gather", MODEL),
        (5, "all-reduce", MODEL),
        (2, "all-to-all", MODEL),
    ],
    "dp+tensor_sequence gradient reduction": [(8, "all-reduce", DATA)],
    # Keys and values; in the backward also each weight.
    "dp+cp forward": [(2, "all-gather", MODEL)],
    "dp+cp backward": [(10, "all-reduce", MODEL)],
    # The program of dp+tensor_sequence, whose text is known though it is compiled once.
    "dp+cp gradient reduction": [(8, "all-reduce", DATA)],
    # XLA gathers for queries, keys and values, and adds up what heads give.
    "dp+sp forward": [(2, "all-gather", MODEL), (1, "all-reduce", MODEL)],
    "dp+sp gradient reduction": [(8, "all-reduce", DATA)],
    "dp+sp backward": [
        (6, "all-gather", MODEL),
        (7, "all-reduce", MODEL),
        (2, "all-to-all", MODEL),
    ],
    # To the experts and back; the sum over experts is taken where the tokens are.
    "ep forward": [(1, "all-gather", DATA), (2, "all-to-all", DATA)],
    "ep backward": [(1, "all-gather", DATA), (2, "all-to-all", DATA)],
    "ep gradient reduction": [(4, "all-reduce", DATA)],
    # An embedding, a block and a head without axis rules.
    "tokens forward": [],
    "tokens backward": [],
    "tokens gradient reduction": [(9, "all-reduce", DATA)],
}


def test_programs_have_the_collectives_of_their_preset_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    monkeypatch.setenv("XLA_FLAGS", flags)
    # A library multiplies each device's parts; XLA's products would also be permuted
    # on a mesh with an axis that splits nothing.
    monkeypatch.setenv("TORCH_XLA_PP_PRODUCTS", "openblas")
    presets = dict.fromkeys(program.split()[0] for program in EXPECTED)
    del presets["tokens"]
    with Worlds() as worlds:
        (found,) = worlds.run(
            collectives, ranks=1, devices=4, args=(list(presets),), timeout_s=240
        )
    assert found == EXPECTED


class Inner(nn.Module):
    """Its rows are split over other axes inside than outside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = xpp.shard(x, "batch", None, None)
        y = xpp.shard(gelu(self.up(x)), "tokens", None, None)
        y = xpp.shard(self.norm(y), "tokens", None, None)
        return xpp.shard(x + y, "batch", None, None)


def split_inside(batch: Axes, tokens: Axes) -> dict[str, float]:
    """Return the relative errors of gradients."""
    group = join()
    torch.manual_seed(0)
    eager, x, y = Inner(), torch.randn(8, 40, 64), torch.randn(8, 40, 64)
    mesh = xpp.init_device_mesh(
        "xla", (1, 2, 2), mesh_dim_names=("pp", "data", "model")
    )
    rules = xpp.AxisRules(axes={"batch": batch, "tokens": tokens})
    stage = xpp.PipelineStage(
        copy.deepcopy(eager),
        0,
        1,
        xpp.device(),
        group=group,
        mesh=mesh["data", "model"],
        sharding=rules,
    )
    ScheduleGPipe(stage, 1, loss_fn=mse_loss).step(x, target=y)
    mse_loss(eager(x), y).backward()
    errors = {}
    named = dict(stage.submod.named_parameters())
    for name, parameter in eager.named_parameters():
        expected, got = parameter.grad, named[name].grad
        assert expected is not None
        assert got is not None
        errors[name] = float((got.cpu() - expected).abs().max() / expected.abs().max())
    return errors


@pytest.mark.parametrize("batch", ["data", ("data", "model")])
@pytest.mark.parametrize("tokens", ["model", ("data", "model"), None])
def test_values_inside_a_stage_may_be_split_over_other_axes(
    worlds: Worlds, batch: Axes, tokens: Axes
) -> None:
    (errors,) = worlds.run(split_inside, ranks=1, devices=4, args=(batch, tokens))
    assert {name: x for name, x in errors.items() if not x < 1e-5} == {}

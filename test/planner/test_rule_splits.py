"""Rules say what is split, what devices exchange for it, and what each holds."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from torch_xla_pp.mesh import AxisRules, axis_names, presets
from torch_xla_pp.planner import (
    DEVICES,
    ParameterRules,
    PipelinePlan,
    RankBytes,
    make_plan,
)
from torch_xla_pp.planner.checks import faults_in
from torch_xla_pp.planner.devices import Cluster
from torch_xla_pp.planner.evaluation import Cut, Evaluator, Setting
from torch_xla_pp.planner.joined_works import joined_graph
from torch_xla_pp.planner.predicted_collectives import predicted_collectives
from torch_xla_pp.planner.strategies import Strategy, strategies_for
from torch_xla_pp.planner.work_costs import WorkTable
from torch_xla_pp.work import (
    Amount,
    Cost,
    ParameterDim,
    Work,
    WorkGraph,
    WorkParameter,
    WorkPart,
    WorkSum,
    WorkValue,
)

pytestmark = pytest.mark.pure

WIDTH, HIDDEN, LAYERS = 8, 16, 2
RULES = AxisRules(
    parameters={
        "*.up": ("mlp", "embed"),
        "*.down": ("embed", "mlp"),
        "*.bias": ("mlp",),
    }
)
NONE = Amount()


def mlp(layers: int = LAYERS) -> WorkGraph:
    """An MLP in works of one product each; the first one keeps a part of its own."""
    works, values = [], [value_of("x", WIDTH, None, "up_0", ())]
    for n in range(layers):
        up, down = (ParameterDim(parameter=f"{n}.{x}", dim=0) for x in ("up", "down"))
        inner = replace(down, dim=1)
        kept = {"none": Amount(bytes_per_row=4 * HIDDEN), "full": NONE}
        works += [
            work_of(
                f"up_{n}",
                (f"{n}.up", (HIDDEN, WIDTH)),
                WorkSum(when="I", dims=(up,), size=Amount(bytes_per_row=4 * WIDTH)),
                WorkPart(dims=(up,), saved=kept, passed={"none": NONE, "full": NONE}),
            ),
            work_of(
                f"down_{n}",
                (f"{n}.down", (WIDTH, HIDDEN)),
                WorkSum(
                    when="F", dims=(up, inner), size=Amount(bytes_per_row=4 * WIDTH)
                ),
            ),
        ]
        after = f"up_{n + 1}" if n + 1 < layers else ""
        values += [
            value_of(f"hidden_{n}", HIDDEN, f"up_{n}", f"down_{n}", (up,)),
            value_of(f"out_{n}", WIDTH, f"down_{n}", after, (down,)),
        ]
    return WorkGraph(
        works=tuple(works),
        values=tuple(values),
        rows=4,
        outputs=(f"out_{layers - 1}",),
        has_loss=True,
    )


def work_of(
    name: str,
    weight: tuple[str, tuple[int, int]],
    summed: WorkSum,
    *parts: WorkPart,
) -> Work:
    own = [weight, *([(f"{name[3:]}.bias", (HIDDEN,))] if parts else [])]
    cost = Cost(flops_per_row=1e9, bytes_per_row=1.0)
    saved = parts[0].saved if parts else {"none": NONE, "full": NONE}
    return Work(
        name=name,
        ops=(f"{name}_op",),
        module=name,
        digest=name[:2],
        forward=cost,
        backward_input=cost,
        backward_weight=cost,
        saved=saved,
        parameters=tuple(
            WorkParameter(
                name=each,
                shape=shape,
                dtype="float32",
                bytes=4 * shape[0] * (shape[1] if len(shape) > 1 else 1),
                read_by=("F", "I") if len(shape) > 1 else ("F",),
            )
            for each, shape in own
        ),
        sums=(summed,),
        parts=parts,
    )


def value_of(
    name: str,
    width: int,
    producer: str | None,
    user: str,
    dims: tuple[ParameterDim, ...],
) -> WorkValue:
    users = (user,) if user else ()
    return WorkValue(
        name=name,
        bytes_per_row=4.0 * width,
        bytes=0,
        has_gradient=producer is not None,
        producer=producer,
        users=users,
        kept_by=users,
        dims=dims,
    )


def plan_for(rules: AxisRules | None, sharding: str, **options: object) -> PipelinePlan:
    asked = {
        "rows": 32,
        "ranks": 2,
        "devices_per_rank": 2,
        "replicas": (1,),
        "microbatches": (4,),
        "schedules": ("gpipe",),
        "remat": ("none",),
        "device": "v5p",
        **options,
    }
    return make_plan(mlp(), sharding=(sharding,), rules=rules, **asked)  # type: ignore[arg-type]


def test_strategies_split_what_their_presets_do() -> None:
    rules = ParameterRules()
    for strategy in strategies_for(4):
        # An axis of one device splits nothing, and has no preset.
        made = [getattr(presets, name)() for name in strategy.presets]
        theirs = presets.mix(*made)
        used, kept = rules.used_axes(strategy), rules.kept_axes(strategy)
        for name in presets.LOGICAL_AXES:
            if name != "batch":
                expected = axis_names(theirs.mesh_axis(name))
                assert used.get(name, ()) == expected, (strategy, name)
                expected = axis_names(theirs.mesh_axis(name, is_parameter=True))
                assert (used | kept).get(name, ()) == expected, (strategy, name)


def test_rules_come_before_the_presets() -> None:
    rules = ParameterRules.of(AxisRules(axes={"mlp": None, "wide": "model"}))
    used = rules.used_axes(Strategy(model=2))
    assert (used["mlp"], used["wide"], used["vocab"]) == ((), ("model",), ("model",))


def test_patterns_say_which_bytes_each_device_has() -> None:
    weights, biases = 4 * WIDTH * HIDDEN, 4 * HIDDEN
    split = {
        sharding: sum(
            rank.bytes.parameters for rank in plan_for(RULES, sharding).predicted.ranks
        )
        for sharding in ("dp", "fsdp", "tp")
    }
    assert split["dp"] == LAYERS * (2 * weights + biases)
    assert split["fsdp"] == LAYERS * (weights + biases)
    assert split["tp"] == LAYERS * (weights + biases // 2)


def test_collectives_are_those_of_split_dimensions() -> None:
    def told(
        sharding: str, **options: object
    ) -> dict[tuple[str, str], tuple[int, int]]:
        plan = plan_for(RULES, sharding, **options)
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in plan.predicted.collectives:
            count, size = found.get((one.when, one.kind), (0, 0))
            found[one.when, one.kind] = count + one.count, size + one.bytes
        return found

    row, weight, bias = 4 * WIDTH, 4 * WIDTH * HIDDEN, 4 * HIDDEN
    layers = [["up_0", "down_0"], ["up_1", "down_1"]]
    assert told("tp", stages=layers) == {
        ("F", "all-reduce"): (LAYERS, LAYERS * 8 * row),
        ("I", "all-reduce"): (LAYERS, LAYERS * 8 * row),
    }
    # What is split and goes to the other rank is made whole, and so is its gradient.
    inside = [["up_0"], ["down_0", "up_1", "down_1"]]
    assert told("tp", stages=inside) == {
        ("F", "all-gather"): (1, 8 * 4 * HIDDEN),
        ("F", "all-reduce"): (LAYERS, LAYERS * 8 * row),
        ("I", "all-gather"): (1, 8 * 4 * HIDDEN),
        ("I", "all-reduce"): (LAYERS, LAYERS * 8 * row),
    }
    assert told("fsdp", stages=layers) == {
        ("F", "all-gather"): (2 * LAYERS, 2 * LAYERS * weight),
        ("I", "all-gather"): (2 * LAYERS, 2 * LAYERS * weight),
        ("W", "reduce-scatter"): (2 * LAYERS, 2 * LAYERS * weight),
        ("step", "all-reduce"): (LAYERS, LAYERS * bias),
    }
    assert told("dp", stages=layers) == {
        ("step", "all-reduce"): (3 * LAYERS, LAYERS * (2 * weight + bias)),
    }


def test_values_are_whole_only_where_stages_send_them() -> None:
    def saved(*stages: list[str], rules: AxisRules | None = RULES) -> list[int]:
        plan = plan_for(rules, "tp", stages=stages)
        assert faults_in(plan, mlp()) == []
        return [stage.saved_bytes for stage in plan.predicted.stages]

    row, hidden = 8 * 4 * WIDTH, 8 * 4 * HIDDEN
    # The input of each layer, what its first work keeps, and the hidden value.
    assert saved(["up_0", "down_0"], ["up_1", "down_1"]) == [row + hidden] * 2
    inside = saved(["up_0"], ["down_0", "up_1", "down_1"])
    assert inside == [row + hidden // 2, hidden + row + hidden]


@pytest.mark.parametrize("remat", [("none", "none"), ("full", "none")])
@pytest.mark.parametrize(
    "strategy",
    [Strategy(model=2), Strategy(data=2, model=2, has_fsdp=True), Strategy(data=2)],
    ids=str,
)
def test_times_count_just_the_collectives_that_are_told(
    strategy: Strategy, remat: tuple[str, ...]
) -> None:
    setting = Setting(num_ranks=2, strategy=strategy, rows=8, num_microbatches=4)
    cut = Cut(setting=setting, stages=(0, 1, 1, 1), remat=remat)
    slow, fast = (
        Evaluator(
            table=WorkTable(mlp(), rules=ParameterRules.of(RULES)),
            cluster=Cluster(
                device=replace(
                    DEVICES["v5p"], link_latency_s=latency_s, link_bytes_per_s=1e30
                ),
                num_devices=8,
            ),
        )
        for latency_s in (1.0, 0.0)
    )
    seconds = [evaluator.costs(cut).seconds for evaluator in (slow, fast)]
    found = predicted_collectives(slow.works(strategy, 8), cut)
    for stage, when in product(range(2), "FIW"):
        own = [one for one in found if (one.stage, one.when) == (stage, when)]
        told = sum(one.count * (1 + (one.kind == "all-reduce")) for one in own)
        late = seconds[0][stage, when] - seconds[1][stage, when]
        assert late == pytest.approx(told), (stage, when)


def test_joined_works_hold_and_exchange_what_their_works_do() -> None:
    joined = joined_graph(mlp(), (0, 0, 1, 1))
    options = {"stages": [["down_0"], ["down_1"]], "sharding": ("tp",), "rules": RULES}
    asked = {"rows": 32, "ranks": 2, "devices_per_rank": 2, "replicas": (1,)}
    asked |= {"microbatches": (4,), "schedules": ("gpipe",), "remat": ("none",)}
    plan = make_plan(joined, **asked, **options)  # type: ignore[arg-type]
    alone = plan_for(RULES, "tp", stages=[["up_0", "down_0"], ["up_1", "down_1"]])

    def held(one: PipelinePlan) -> list[RankBytes]:
        # A larger work needs more while it runs.
        return [replace(r.bytes, temporary=0) for r in one.predicted.ranks]

    assert held(plan) == held(alone)
    assert plan.predicted.collectives == alone.predicted.collectives


def test_a_plan_keeps_its_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    path.write_text(RULES.to_json())
    plan = plan_for(RULES, "tp")
    assert plan.rules == ParameterRules.of(path)
    assert PipelinePlan.from_json(plan.to_json()) == plan
    assert plan_for(None, "tp").rules is None


def test_what_no_parameter_matches_is_warned_of() -> None:
    rules = RULES | AxisRules(parameters={"*.other": ("mlp",)})
    assert (
        "rules match no parameter of the work: *.other"
        in plan_for(rules, "tp").costs.warnings
    )
    assert plan_for(RULES, "tp").costs.warnings == plan_for(None, "tp").costs.warnings


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"axes": {"mlp": "rows"}}, "expected the mesh axes data and model, .* rows"),
        ({"gather_once": True}, "gather_once: expected false"),
        ({"parameters": {"*.up": ("mlp",)}}, "0.up: expected 2 logical axes"),
        ({"parameters": {"*.up": ("wide", None)}}, "0.up: expected .*, got wide"),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    rules: dict[str, object], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        plan_for(AxisRules(**rules), "tp")  # type: ignore[arg-type]


def test_a_file_that_has_no_rules_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rules.json"
    for text, expected in (("{", "expected JSON"), ("[]", "expected tables")):
        path.write_text(text)
        with pytest.raises(ValueError, match=expected):
            ParameterRules.of(path)


def test_devices_that_divide_no_dimension_are_not_planned() -> None:
    with pytest.raises(ValueError, match="in which mesh axes divide the dimensions"):
        plan_for(RULES, "tp", devices_per_rank=3)

"""A plan as a value: which stages, on which ranks, how shared, in which order.

It has no times of the search, so that equal input gives equal texts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch_xla_pp import record
from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.planner.orders import planned_order
from torch_xla_pp.schedule import Schedule
from torch_xla_pp.simulate import Costs, Flow, Link, Network, stage_seconds

_FORMAT = "torch_xla_pp plan 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The model that a plan is for.

    Args:
        digest: `WorkGraph.digest`.
        num_ops: Number of its operations.
        parameter_bytes: Size of its parameters, tied ones once.
        tied: Names of tied groups.
        source: Where it comes from.
    """

    digest: str
    num_ops: int
    parameter_bytes: int
    tied: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """How the rows of a step are divided.

    Args:
        rows: Rows of a step, those of all replicas.
        replicas: Number of pipelines.
        microbatches: Microbatches of each.
        rows_per_microbatch: Rows of one, those of all devices of a rank.
    """

    rows: int
    replicas: int
    microbatches: int
    rows_per_microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStage:
    """One stage.

    Args:
        rank: Its rank in each pipeline.
        ops: FX node names of its operations.
        modules: Paths of the modules that they are in, those within another left out.
        remat: "none" or "full".
        inputs: Names of the values that it takes from other stages, or of the model.
    """

    rank: int
    ops: tuple[str, ...]
    modules: tuple[str, ...]
    remat: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRank:
    """The devices of one rank.

    Args:
        devices: Their number.
        device: Their name.
        mesh: Mesh axis → its size.
        rules: Names of the presets that share the work.
        batch_axis: Mesh axis that splits rows, None for none.
        capacity_bytes: What stages may take of a device's memory.
    """

    devices: int
    device: str
    mesh: Mapping[str, int]
    rules: tuple[str, ...]
    batch_axis: str | None
    capacity_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSchedule:
    """The order of actions.

    Args:
        name: One of `SCHEDULES`; "dag" is `dag_1f1b` of the edges.
        stages_per_rank: Number of stages on each rank.
    """

    name: str
    stages_per_rank: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRank:
    """What is predicted for one rank.

    Args:
        busy_s: Seconds that it computes in a step.
        live: The most microbatches that its stages hold together.
        bytes: What a device holds, part by part.
    """

    busy_s: float
    live: int
    bytes: RankBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStage:
    """What is predicted for one stage and microbatch, and for the end of a step.

    Args:
        forward_s: Seconds of F.
        input_s: Seconds of I.
        weight_s: Seconds of W; B takes as long as I and W.
        final_s: Seconds after the last action.
        saved_bytes: What a device keeps from F to B or W.
        passed_bytes: What it keeps besides from I to W.
    """

    forward_s: float
    input_s: float
    weight_s: float
    final_s: float
    saved_bytes: int
    passed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLink:
    """A link between ranks that the prediction counts with.

    Args:
        sender: Rank that sends, None for all that no other link names.
        receiver: Rank that receives, None likewise.
        latency_s: Time that even an empty message takes.
        bytes_per_s: Bandwidth, None if it is not bounded.
    """

    sender: int | None
    receiver: int | None
    latency_s: float
    bytes_per_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step of the plan costs.

    Args:
        step_s: Seconds of a step.
        rows_per_s: Rows in a second.
        bubble: Share of the step in which ranks wait, on average.
        depth: Stages on the longest path.
        ranks: What each rank does and holds.
        stages: What each stage takes and keeps.
        flows: What stages send each other for each microbatch.
    """

    step_s: float
    rows_per_s: float
    bubble: float
    depth: int
    ranks: tuple[PredictedRank, ...]
    stages: tuple[PredictedStage, ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSource:
    """What the prediction is made from.

    Args:
        source: "roofline".
        device: Name of the device whose figures were taken.
        is_verified: Whether these were measured.
        optimizer_bytes: Bytes of the optimizer's state for a byte of parameters.
        links: Links between ranks.
        warnings: What makes the prediction less sure.
    """

    source: str
    device: str
    is_verified: bool
    optimizer_bytes: float
    links: tuple[PlannedLink, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan in which one choice differs.

    Args:
        label: What it takes instead.
        change: The choice that differs.
        options: Options of the command that give this plan.
        step_s: Seconds of its step.
        peak_bytes: The most that a device holds.
        fits: Whether that is not too much.
    """

    label: str
    change: str
    options: str
    step_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCounts:
    """How much was searched.

    Args:
        settings: Number of settings that are allowed.
        pruned: How many of them a bound ruled out.
        evaluated: Number of cuts that were evaluated.
        version: Version of the search.
    """

    settings: int
    pruned: int
    evaluated: int
    version: str = "1"


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """How to run a model on a cluster: stages, ranks, shardings, order, and why.

    Args:
        model: The model.
        batch: How rows are divided.
        stages: The stages; values go to higher ones only.
        ranks: The ranks of one pipeline.
        schedule: The order of actions.
        predicted: What a step costs.
        costs: What that is made from.
        reasons: Why these choices; each is a comparison.
        alternatives: Plans in which one choice differs.
        baselines: Planner → seconds of a step of its plan, if compared.
        search: How much was searched.
    """

    model: PlannedModel
    batch: PlannedBatch
    stages: tuple[PlannedStage, ...]
    ranks: tuple[PlannedRank, ...]
    schedule: PlannedSchedule
    predicted: Prediction
    costs: CostSource
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    baselines: Mapping[str, float]
    search: SearchCounts

    def __str__(self) -> str:
        from torch_xla_pp.planner.report import report_of

        return report_of(self)

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """FX node name of each operation → its stage."""
        return {op: n for n, stage in enumerate(self.stages) for op in stage.ops}

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages between which values go, in order."""
        return self.stage_costs().edges

    def stage_costs(self) -> Costs:
        """Return what stages cost, as `simulate` takes it."""
        stages = self.predicted.stages
        return Costs(
            seconds=stage_seconds((s.forward_s, s.input_s, s.weight_s) for s in stages),
            flows=self.predicted.flows,
            saved_bytes={n: stage.saved_bytes for n, stage in enumerate(stages)},
            passed_bytes={n: stage.passed_bytes for n, stage in enumerate(stages)},
            final_s={n: stage.final_s for n, stage in enumerate(stages)},
        )

    def network(self) -> Network:
        """Return the links between ranks, as `simulate` takes them."""
        links = {
            (link.sender, link.receiver): Link(
                latency_s=link.latency_s, bytes_per_s=link.bytes_per_s or math.inf
            )
            for link in self.costs.links
        }
        default = links.pop((None, None), Link())
        named = {
            (sender, receiver): link
            for (sender, receiver), link in links.items()
            if sender is not None and receiver is not None
        }
        return Network(default=default, links=named)

    def table(self) -> Schedule:
        """Return the actions of each rank."""
        edges = self.edges if self.schedule.name == "dag" else ()
        return planned_order(
            self.schedule.name,
            len(self.ranks),
            self.batch.microbatches,
            self.schedule.stages_per_rank,
            edges,
        ).schedule

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON; equal plans give equal texts.

        Args:
            path: A file to write as well.
        """
        text = record.to_json(self, _FORMAT)
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> "PipelinePlan":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: It is no plan, of another format, or has missing, unknown or
                faulty fields; all are named.
        """
        is_text = isinstance(source, str) and "\n" in source
        text = str(source) if is_text else Path(source).read_text()
        return record.from_json(cls, text, _FORMAT)

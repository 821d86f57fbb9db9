"""The parts of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_xla_pp.planner.evaluation import RankBytes
from torch_xla_pp.simulate import Flow


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedModel:
    """The model that a plan is for.

    Args:
        digest: `WorkGraph.digest`.
        num_ops: Number of its operations.
        parameter_bytes: Size of its parameters, tied ones once.
        tied: Names of tied groups.
        op_digests: `WorkGraph.op_digests`.
        source: Where it comes from.
    """

    digest: str
    num_ops: int
    parameter_bytes: int
    tied: tuple[str, ...] = ()
    op_digests: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """The division of a step's rows.

    Args:
        rows: Rows of a step, those of all replicas.
        replicas: Number of pipelines.
        microbatches: Microbatches of each.
        rows_per_microbatch: Rows of one microbatch, on all devices of a rank.
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
        modules: Paths of their modules, without modules within another.
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
        capacity_bytes: The memory of a device that stages may use.
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
        stages_per_rank: The most stages on a rank.
        csv: The actions, as `Schedule.to_csv` writes them, if the name is "list".
    """

    name: str
    stages_per_rank: int = 1
    csv: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedRank:
    """The prediction for one rank.

    Args:
        busy_s: Seconds that it computes in a step.
        live: The most microbatches that its stages hold together.
        bytes: The memory of a device, part by part.
    """

    busy_s: float
    live: int
    bytes: RankBytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStage:
    """The prediction for one stage and microbatch, and for the end of a step.

    Args:
        forward_s: Seconds of F.
        input_s: Seconds of I.
        weight_s: Seconds of W; B takes as long as I and W.
        final_s: Seconds after the last action.
        saved_bytes: What a device keeps from F to B or I.
        passed_bytes: What it keeps from I to W, including saved values.
    """

    forward_s: float
    input_s: float
    weight_s: float
    final_s: float
    saved_bytes: int
    passed_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedCollective:
    """Equal collectives between the devices of a rank, in one action of one stage.

    Args:
        stage: The stage.
        when: "F", "I" or "W" of each microbatch, or "step" for once a step.
        kind: "all-reduce", "all-gather" or "reduce-scatter".
        axis: The mesh axis that they go over.
        count: How many there are.
        bytes: Total size of what they sum or gather, on one device.
    """

    stage: int
    when: str
    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLink:
    """A link between ranks, as assumed by the prediction.

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
    """The predicted costs of a step of the plan.

    Args:
        step_s: Seconds of a step.
        rows_per_s: Rows in a second.
        bubble: Share of the step in which ranks wait, on average.
        depth: Stages on the longest path.
        ranks: The time and memory of each rank.
        stages: The time and saved values of each stage.
        flows: The values between stages for each microbatch.
        collectives: The collectives between the devices of a rank.
    """

    step_s: float
    rows_per_s: float
    bubble: float
    depth: int
    ranks: tuple[PredictedRank, ...]
    stages: tuple[PredictedStage, ...]
    flows: tuple[Flow, ...]
    collectives: tuple[PredictedCollective, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSource:
    """The source of the costs in the prediction.

    Args:
        source: "roofline", or the rows with which works were measured or compiled.
        device: Name of the device whose figures were taken.
        is_verified: Whether the figures were measured.
        optimizer_bytes: Bytes of the optimizer's state for a byte of parameters.
        links: Links between ranks.
        warnings: Reasons why the prediction may be wrong.
        replica_link: The link between replicas, None if it is as those of a pipeline.
    """

    source: str
    device: str
    is_verified: bool
    optimizer_bytes: float
    links: tuple[PlannedLink, ...]
    warnings: tuple[str, ...] = ()
    replica_link: PlannedLink | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best plan in which one choice differs.

    Args:
        label: The other choice.
        change: The kind of choice that differs.
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
class Candidate:
    """The best plan that was found with given choices of all but the stages.

    Args:
        label: These choices.
        options: Options of the command that give this plan, or a faster one: not all
            candidates are improved as far as the plan is.
        step_s: Seconds of its step.
        peak_bytes: The most that a device holds.
        fits: Whether that is not too much.
    """

    label: str
    options: str
    step_s: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCounts:
    """The counts of a search.

    Args:
        settings: Number of allowed settings.
        pruned: How many of them a bound ruled out.
        evaluated: Number of cuts that were evaluated.
        version: Version of the search.
    """

    settings: int
    pruned: int
    evaluated: int
    version: str = "1"

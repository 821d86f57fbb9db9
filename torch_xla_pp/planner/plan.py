"""A plan as a value: its stages, their ranks and shardings, and the order of actions.

It has no times of the search, so that equal input gives equal texts.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch_xla_pp import record
from torch_xla_pp.advice import PipelineLoad
from torch_xla_pp.planner.example_rows import with_rows
from torch_xla_pp.planner.orders import planned_order
from torch_xla_pp.planner.parameter_rules import ParameterRules
from torch_xla_pp.planner.plan_faults import plan_faults
from torch_xla_pp.planner.plan_values import (
    Alternative,
    Candidate,
    CostSource,
    PlannedBatch,
    PlannedModel,
    PlannedRank,
    PlannedSchedule,
    PlannedStage,
    Prediction,
    SearchCounts,
)
from torch_xla_pp.planner.rank_links import network_of
from torch_xla_pp.planner.report import report_of
from torch_xla_pp.schedule import Schedule
from torch_xla_pp.simulate import Costs, Network, stage_seconds

_FORMAT = "torch_xla_pp plan 1"


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A plan to run a model on a cluster: stages, ranks, shardings, order, and reasons.

    Args:
        model: The model.
        batch: The division of rows.
        stages: The stages; values go to higher ones only.
        ranks: The ranks of one pipeline.
        schedule: The order of actions.
        predicted: The predicted costs of a step.
        costs: The source of the prediction.
        reasons: The reasons for the choices; each is a comparison.
        alternatives: Plans in which one choice differs.
        baselines: Planner → seconds of a step of its plan, if compared.
        search: How much was searched.
        candidates: The best plans with other choices, those that fit first, then by
            step time.
        device_load: The work and the exchanges of a device, for advice.
        rules: How the model's parameters may be split, None if that was not given.
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
    candidates: tuple[Candidate, ...] = ()
    device_load: PipelineLoad | None = None
    rules: ParameterRules | None = None

    def __str__(self) -> str:
        return report_of(self)

    @cached_property
    def stage_of(self) -> Mapping[str, int]:
        """FX node name of each operation → its stage."""
        return {op: n for n, stage in enumerate(self.stages) for op in stage.ops}

    @property
    def digest(self) -> str:
        """A text that is equal for equal plans."""
        text = self.to_json().encode()
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of stages between which values go, in order."""
        return self.stage_costs().edges

    def stage_costs(self) -> Costs:
        """Return the costs of stages, as `simulate` takes them."""
        stages = self.predicted.stages
        return Costs(
            seconds=stage_seconds((s.forward_s, s.input_s, s.weight_s) for s in stages),
            flows=self.predicted.flows,
            saved_bytes={n: stage.saved_bytes for n, stage in enumerate(stages)},
            passed_bytes={n: stage.passed_bytes for n, stage in enumerate(stages)},
            final_s={n: stage.final_s for n, stage in enumerate(stages)},
        )

    def load(self) -> PipelineLoad:
        """Return the work and the exchanges of a device, for `advise`.

        Raises:
            ValueError: Ranks differ, or the plan is of an earlier version, which did
                not store them.
        """
        if self.device_load is None:
            raise ValueError(
                "plan: expected what devices compute and exchange, got a plan of an "
                "earlier version, or of ranks that differ. Plan again, for equal ranks."
            )
        return self.device_load

    def network(self) -> Network:
        """Return the links between ranks, as `simulate` takes them."""
        return network_of(self.costs.links)

    def table(self) -> Schedule:
        """Return the actions of each rank."""
        return self._table

    @cached_property
    def _table(self) -> Schedule:
        if self.schedule.csv is not None:
            return Schedule.from_csv(self.schedule.csv)
        edges = self.edges if self.schedule.name == "dag" else ()
        return planned_order(
            self.schedule.name,
            len(self.ranks),
            self.batch.microbatches,
            self.schedule.stages_per_rank,
            edges,
        ).schedule

    def example(self, values: Any) -> Any:
        """Return an example of a microbatch with as many rows as planned.

        Args:
            values: An example with any number of rows: tensors, or tuples, lists and
                mappings of them. Tensors with as many rows as the first one get the
                planned rows, by leaving rows out or repeating them; other values are
                kept.

        Example:
            pipe = xpp.pipeline(model, plan.example((x,)), plan=plan)
        """
        return with_rows(values, self.batch.rows_per_microbatch)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return it as JSON; equal plans give equal texts.

        Args:
            path: A file to write as well.
        """
        return record.to_json(self, _FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> "PipelinePlan":
        """Read what `to_json` wrote.

        Args:
            source: A file, or the text itself, which is known by its line ends.

        Raises:
            ValueError: It is no plan, of another format, has missing, unknown or
                faulty fields, or could run for no model; all faults are named.
        """
        plan = record.from_json(cls, source, _FORMAT)
        if faults := [*plan_faults(plan)]:
            raise ValueError("\n".join(f"{_FORMAT}: {fault}" for fault in faults))
        return plan

"""Scale stated or estimated costs to those of a recorded step."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch_xla_pp.schedule import KINDS, Kind
from torch_xla_pp.simulate.costs import Costs
from torch_xla_pp.simulate.measured import measured_costs
from torch_xla_pp.timeline import Timeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The ratios of recorded times of actions to their costs.

    Args:
        factors: Kind of action → recorded time over its cost.

    Raises:
        ValueError: A factor is not above 0.
    """

    factors: Mapping[str, float]

    def __post_init__(self) -> None:
        faulty = [f"{kind}: {x}" for kind, x in self.factors.items() if not x > 0]
        if faulty:
            raise ValueError(
                f"calibration: expected factors above 0, got {', '.join(faulty)}. "
                "Record a step in which actions take time."
            )

    @classmethod
    def of(cls, costs: Costs, recorded: Timeline) -> "Calibration":
        """Compare costs with a step; kinds are compared over all stages together.

        A kind that the step does not have gets the factor of all kinds that it has.

        Args:
            costs: The expected times of actions.
            recorded: The step, of the same stages on the devices in question.

        Raises:
            ValueError: The step has other stages, or the costs have none of its kinds.
        """
        measured = measured_costs([recorded]).seconds
        stages = {stage for stage, _ in costs.seconds}
        unknown = sorted({stage for stage, _ in measured} ^ stages)
        known = [key for key in measured if costs.seconds.get(key)]
        if unknown or not known:
            raise ValueError(
                f"calibration: expected a recorded step of the {len(stages)} stages "
                f"with times, got one of {len({s for s, _ in measured})} stages. "
                "Record a step of the same pipeline by profile_step."
            )
        stated: defaultdict[Kind, float] = defaultdict(float)
        took: defaultdict[Kind, float] = defaultdict(float)
        for stage, kind in known:
            stated[kind] += costs.seconds[stage, kind]
            took[kind] += measured[stage, kind]
        overall = sum(took.values()) / sum(stated.values())
        return cls(
            factors={
                kind: took[kind] / stated[kind] if kind in stated else overall
                for kind in KINDS
            }
        )

    def scaled(self, costs: Costs) -> Costs:
        """Return costs with the times of actions multiplied by the factors."""
        seconds = {
            (stage, kind): time * self.factors[kind]
            for (stage, kind), time in costs.seconds.items()
        }
        return replace(costs, seconds=seconds)

"""What the devices of a planned rank split, counted for `checks` one thing at a time.

With rules that is what they say of each parameter; without, a work is split over the
axis `model` if one of its matrices could be.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch_xla_pp.planner.parameter_rules import MeshAxes
from torch_xla_pp.planner.plan import PipelinePlan
from torch_xla_pp.planner.strategies import DATA, MODEL, Strategy
from torch_xla_pp.work import ParameterDim, Work, WorkParameter


class PlanSplits:
    """The devices of one rank of a plan, and what each of them has of works.

    Args:
        plan: The plan.
        rank: The rank.
    """

    def __init__(self, plan: PipelinePlan, rank: int) -> None:
        own = plan.ranks[rank]
        strategy = Strategy(
            data=own.mesh.get(DATA, 1),
            model=own.mesh.get(MODEL, 1),
            has_fsdp="fsdp" in own.rules,
        )
        self.strategy = strategy
        self._rules = plan.rules
        self._used: Mapping[str, MeshAxes] = {}
        self._kept: Mapping[str, MeshAxes] = {}
        if plan.rules is not None:
            self._used = plan.rules.used_axes(strategy)
            self._kept = {**self._used, **plan.rules.kept_axes(strategy)}

    def kept_bytes(self, parameter: WorkParameter) -> float:
        """Return the bytes of a parameter between actions."""
        if self._rules is not None:
            return parameter.bytes / self._count(parameter.name, self._kept)
        data = self.strategy.data if self.strategy.has_fsdp else 1
        return self.used_bytes(parameter) / data

    def used_bytes(self, parameter: WorkParameter) -> float:
        """Return the bytes of a parameter where values are computed with it."""
        if self._rules is not None:
            return parameter.bytes / self._count(parameter.name, self._used)
        return parameter.bytes / (
            self.strategy.model if self._divides(parameter) else 1
        )

    def saved(self, work: Work, remat: str, rows: float) -> float:
        """Return what a work keeps from F to B or I."""
        parts = [(part.dims, part.saved[remat].of(rows)) for part in work.parts]
        return self._own(work, work.saved[remat].of(rows), parts)

    def passed(self, work: Work, remat: str, rows: float) -> float:
        """Return what a work keeps from I to W."""
        parts = [(part.dims, part.passed[remat].of(rows)) for part in work.parts]
        return self._own(work, work.passed[remat].of(rows), parts)

    def made(self, work: Work, remat: str, rows: float) -> float:
        """Return what of that the work's I makes, which is split as the rest is."""
        whole = work.passed[remat].of(rows)
        own = self.passed(work, remat, rows)
        return own * work.made[remat].of(rows) / whole if whole else 0.0

    def share(self, dims: Sequence[ParameterDim]) -> float:
        """Return the share that a device has of a value that is in one stage."""
        is_split = any(
            MODEL in axes
            for dim in dims
            for axes in self._axes(dim.parameter, self._used)[dim.dim : dim.dim + 1]
        )
        return 1 / self.strategy.model if is_split else 1.0

    def _own(
        self,
        work: Work,
        whole: float,
        parts: Sequence[tuple[tuple[ParameterDim, ...], float]],
    ) -> float:
        if self._rules is not None:
            return whole - sum(size * (1 - self.share(dims)) for dims, size in parts)
        is_split = any(self._divides(parameter) for parameter in work.parameters)
        return whole / (self.strategy.model if is_split else 1)

    def _divides(self, parameter: WorkParameter) -> bool:
        sizes, model = parameter.shape, self.strategy.model
        return model > 1 and len(sizes) > 1 and any(s and s % model == 0 for s in sizes)

    def _count(self, name: str, table: Mapping[str, MeshAxes]) -> int:
        axes = [axis for own in self._axes(name, table) for axis in own]
        return prod(self.strategy.sizes[axis] for axis in axes)

    def _axes(self, name: str, table: Mapping[str, MeshAxes]) -> tuple[MeshAxes, ...]:
        dims = None if self._rules is None else self._rules.logical(name)
        return tuple(() if dim is None else table.get(dim, ()) for dim in dims or ())

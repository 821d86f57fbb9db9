"""What axis rules split of a model's works, and what devices exchange for it.

Terms: a parameter is *kept* split in one way between actions, and *used* in another
where it is computed with; what is in between is gathered. A dimension of a value is
split as the dimension of a parameter is that it stands for (`ParameterDim`).

Laws: what enters or leaves a stage is whole over the axis `model`, for every device of
the other rank; so are outputs of the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.parameter_rules import LogicalDims, MeshAxes, ParameterRules
from torch_xla_pp.planner.strategies import DATA, MODEL, Strategy
from torch_xla_pp.work import (
    Amount,
    ParameterDim,
    Work,
    WorkGraph,
    WorkParameter,
)

_Array = NDArray[np.float64]

# How often a ring moves the bytes of each kind.
RING_PASSES: Mapping[str, int] = {
    "all-gather": 1,
    "all-reduce": 2,
    "all-to-all": 1,
    "reduce-scatter": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkCollective:
    """What the devices of a rank exchange for a work.

    Args:
        place: Place of the work.
        when: "F", "I" or "W" of each microbatch, or "step".
        kind: What they do.
        axis: The mesh axis over which they do.
        size: Bytes on one device: of the result, of what is summed, or moved.
    """

    place: int
    when: str
    kind: str
    axis: str
    size: Amount


class RuleSplits:
    """What a strategy splits by the rules of a model.

    Args:
        graph: The works.
        rules: The rules.
        logical: Name of each parameter → its logical axes, None for none.
        strategy: How a rank's devices share the works.
    """

    def __init__(
        self,
        graph: WorkGraph,
        rules: ParameterRules,
        logical: Mapping[str, LogicalDims | None],
        strategy: Strategy,
    ) -> None:
        self._graph, self._logical = graph, logical
        self._strategy = strategy
        self._sizes = strategy.sizes
        self._used = rules.used_axes(strategy)
        self._kept = self._used | rules.kept_axes(strategy)
        self._parts: dict[tuple[str, str], _Array] = {}

    def fit(self) -> bool:
        """Tell if all that is split divides, and no axis splits twice."""
        for parameter in (p for w in self._graph.works for p in w.parameters):
            for table in (self._kept, self._used):
                dims = self._axes(parameter.name, table)
                if any(
                    size % prod(self._sizes[axis] for axis in axes)
                    for size, axes in zip(parameter.shape, dims, strict=False)
                ):
                    return False
                named = [axis for axes in dims for axis in axes]
                if len({*named}) < len(named):
                    return False
        return True

    @cached_property
    def is_split(self) -> NDArray[np.bool_]:
        """Whether each work is split over the axis `model`."""
        works = self._graph.works
        return np.array([any(map(self._is_used_split, w.parameters)) for w in works])

    @cached_property
    def kept_bytes(self) -> _Array:
        """Bytes of parameters of each work on a device while none is computed."""
        return self._summed(lambda p: p.bytes / self.kept_share(p))

    @cached_property
    def used_bytes(self) -> _Array:
        """Bytes of parameters of each work on a device while it is computed."""
        return self._summed(lambda p: p.bytes / self._factor(p, self._used))

    @cached_property
    def summed_once_bytes(self) -> _Array:
        """Bytes of gradients of each work that are summed over `data` once a step."""
        return self._summed(
            lambda p: 0.0 if self._is_scattered(p) else p.bytes / self.kept_share(p)
        )

    def saved(self, remat: str, rows: float) -> _Array:
        """Return what each work keeps less because it is split."""
        return self._less("saved", remat, rows)

    def passed(self, remat: str, rows: float) -> _Array:
        """Return what each work keeps less from I to W because it is split."""
        return self._less("passed", remat, rows)

    @cached_property
    def value_shares(self) -> _Array:
        """Share of each value that a device has while it is in its stage."""
        count = self._strategy.model
        values = self._graph.values
        return np.array([1 / count if self._splits(v.dims) else 1.0 for v in values])

    def kept_share(self, parameter: WorkParameter) -> int:
        """Return how many devices keep a parameter together."""
        return self._factor(parameter, self._kept)

    @cached_property
    def collectives(self) -> tuple[WorkCollective, ...]:
        """What is exchanged for works, but for what stages need at their borders."""
        works = enumerate(self._graph.works)
        found = [one for place, work in works for one in self._of(place, work)]
        return (*found, *self._of_outputs())

    def _of(self, place: int, work: Work) -> Iterator[WorkCollective]:
        """Yield the collectives of a work."""
        for one in work.sums:
            if self._splits(one.dims):
                yield WorkCollective(
                    place=place,
                    when=one.when,
                    kind="all-reduce",
                    axis=MODEL,
                    size=one.size,
                )
        for parameter in work.parameters:
            for when, kind, size in self._of_parameter(parameter):
                yield WorkCollective(
                    place=place, when=when, kind=kind, axis=DATA, size=size
                )

    def _of_outputs(self) -> Iterator[WorkCollective]:
        """Yield what makes the outputs of the model whole."""
        outputs = {*self._graph.outputs}
        for value in self._graph.values:
            is_made = value.producer is not None and value.name in outputs
            if is_made and self._splits(value.dims):
                yield WorkCollective(
                    place=self._graph.index[value.producer or ""],
                    when="F",
                    kind="all-gather",
                    axis=MODEL,
                    size=value.size,
                )

    def _of_parameter(
        self, parameter: WorkParameter
    ) -> Iterator[tuple[str, str, Amount]]:
        """Yield when a parameter is exchanged, how, and how much."""
        if self._strategy.data == 1:
            return
        used = Amount(bytes=parameter.bytes / self._factor(parameter, self._used))
        if not self._is_scattered(parameter):
            kept = Amount(bytes=parameter.bytes / self.kept_share(parameter))
            yield "step", "all-reduce", kept
            return
        for when in parameter.read_by:
            yield when, "all-gather", used
        if parameter.looked_up is not None and self._has_whole_rows(parameter):
            # Gradients of rows go where their columns are.
            yield "W", "all-to-all", parameter.looked_up
        else:
            yield "W", "reduce-scatter", used

    def _is_scattered(self, parameter: WorkParameter) -> bool:
        """Tell if the axis `data` splits a parameter between actions alone."""
        kept, used = (
            {axis for axes in self._axes(parameter.name, table) for axis in axes}
            for table in (self._kept, self._used)
        )
        return self._strategy.data > 1 and DATA in kept - used

    def _has_whole_rows(self, parameter: WorkParameter) -> bool:
        return DATA not in self._axes(parameter.name, self._kept)[0]

    def _is_used_split(self, parameter: WorkParameter) -> bool:
        axes = self._axes(parameter.name, self._used)
        is_matrix = len(parameter.shape) > 1
        return is_matrix and self._strategy.model > 1 and (MODEL,) in axes

    def _splits(self, dims: Sequence[ParameterDim]) -> bool:
        """Tell if the axis `model` splits a value with these dimensions."""
        if self._strategy.model == 1:
            return False
        for dim in dims:
            axes = self._axes(dim.parameter, self._used)
            if dim.dim < len(axes) and MODEL in axes[dim.dim]:
                return True
        return False

    def _axes(self, name: str, table: Mapping[str, MeshAxes]) -> tuple[MeshAxes, ...]:
        """Return the mesh axes that split each dimension of a parameter."""
        dims = self._logical.get(name) or ()
        return tuple(() if dim is None else table.get(dim, ()) for dim in dims)

    def _factor(self, parameter: WorkParameter, table: Mapping[str, MeshAxes]) -> int:
        axes = self._axes(parameter.name, table)
        return prod(self._sizes[axis] for own in axes for axis in own)

    def _summed(self, size_of: Callable[[WorkParameter], float]) -> _Array:
        works = self._graph.works
        return np.array([float(sum(map(size_of, w.parameters))) for w in works])

    def _less(self, what: str, remat: str, rows: float) -> _Array:
        """Return what the other devices keep of values that are split."""
        if (what, remat) not in self._parts:
            amounts = [
                self._split_amount(work, what, remat) for work in self._graph.works
            ]
            sizes = [(one.bytes_per_row, one.bytes) for one in amounts]
            self._parts[what, remat] = np.array(sizes, dtype=float).reshape(-1, 2).T
        per_row, fixed = self._parts[what, remat]
        found: _Array = (per_row * rows + fixed) * (1 - 1 / self._strategy.model)
        return found

    def _split_amount(self, work: Work, what: str, remat: str) -> Amount:
        kept: Iterator[Amount] = (
            (part.saved if what == "saved" else part.passed)[remat]
            for part in work.parts
            if self._splits(part.dims)
        )
        return sum(kept, Amount())

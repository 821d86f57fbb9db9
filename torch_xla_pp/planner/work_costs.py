"""The time and memory of each work of a model on one device, under one strategy.

Times are a roofline: the larger one of FLOPs over the share of its peak that the device
reaches, and of bytes over the bandwidth of its memory; collectives are added. The time
of a stage is the sum over its works, and the time to start a program.

Source of the roofline: Williams, Waterman and Patterson, "Roofline: An Insightful
Visual Performance Model for Multicore Architectures", CACM 2009.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.devices import Cluster
from torch_xla_pp.planner.measured_costs import MeasuredCosts, RowSeconds, WorkSeconds
from torch_xla_pp.planner.parameter_rules import LogicalDims, ParameterRules
from torch_xla_pp.planner.rule_splits import RING_PASSES, RuleSplits
from torch_xla_pp.planner.strategies import Strategy, ring_s
from torch_xla_pp.work import Cost, Work, WorkGraph

Array = NDArray[np.float64]

_Pair = tuple[NDArray[np.int_], NDArray[np.int_]]
# Bytes of the optimizer's state for each byte of parameters.
OPTIMIZERS: Mapping[str, float] = {"sgd": 0.0, "momentum": 1.0, "adamw": 2.0}


@dataclass(frozen=True, eq=False)
class WorkTable:
    """The numbers of a work graph as arrays, one item for each work or value.

    Args:
        graph: The works.
        measured: Measured times of the works, None for rooflines.
        rules: How parameters may be split, None to judge that by their shapes.
    """

    graph: WorkGraph
    measured: MeasuredCosts | None = None
    rules: ParameterRules | None = None
    _split: dict[int, Array] = field(default_factory=dict, repr=False)
    _homes: dict[str, tuple[tuple[int, ...], _Pair]] = field(
        default_factory=dict, repr=False
    )
    _by_rules: dict[Strategy, RuleSplits] = field(default_factory=dict, repr=False)

    @cached_property
    def num_works(self) -> int:
        """Number of works."""
        return len(self.graph.works)

    @cached_property
    def costs(self) -> tuple[Array, Array, Array]:
        """FLOPs and bytes, per row and fixed, of F, I and W: (works, 4) each."""
        kinds: tuple[Callable[[Work], Cost], ...] = (
            lambda work: work.forward,
            lambda work: work.backward_input,
            lambda work: work.backward_weight,
        )
        forward, backward_input, backward_weight = (
            np.array([_numbers(of(work)) for work in self.graph.works]) for of in kinds
        )
        return forward, backward_input, backward_weight

    @cached_property
    def measured_lines(self) -> Mapping[str, Array]:
        """F, B, I and W → seconds per row and fixed of each work: (works, 2)."""
        kinds: Mapping[str, Callable[[WorkSeconds], RowSeconds]] = {
            "F": lambda work: work.forward,
            "B": lambda work: work.backward,
            "I": lambda work: work.backward_input,
            "W": lambda work: work.backward_weight,
        }
        found = [] if self.measured is None else self.measured.of(self.graph.works)
        return {
            kind: np.array([(of(x).seconds_per_row, of(x).seconds) for x in found])
            for kind, of in kinds.items()
        }

    def by_rules(self, strategy: Strategy) -> RuleSplits | None:
        """Return what a strategy splits by the rules, None if there are none."""
        if self.rules is None:
            return None
        if strategy not in self._by_rules:
            self._by_rules[strategy] = RuleSplits(
                self.graph, self.rules, self._logical, strategy
            )
        return self._by_rules[strategy]

    @cached_property
    def _logical(self) -> dict[str, LogicalDims | None]:
        """Name of each parameter → its logical axes by the rules."""
        if self.rules is None:
            return {}
        names = {p.name for work in self.graph.works for p in work.parameters}
        for work in self.graph.works:
            dims = [one.dims for one in work.sums] + [one.dims for one in work.parts]
            names |= {dim.parameter for own in dims for dim in own}
        names |= {dim.parameter for value in self.graph.values for dim in value.dims}
        return {name: self.rules.logical(name) for name in sorted(names)}

    def homes_and_users(
        self, stages: Sequence[int] | NDArray[np.int_]
    ) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
        """Return the stage of each value, -1 for inputs, and of the work of each use.

        Args:
            stages: The stage of each work.
        """
        last, found = self._homes.get("last", ((), None))
        if found is None or last is not stages:
            stage_of = np.array([*stages, -1])
            found = stage_of[self.makers], stage_of[self.uses[:, 1]]
            if isinstance(stages, tuple):
                # The same stages are asked for many times in turn.
                self._homes["last"] = stages, found
        return found

    def takes(self, rows: float) -> bool:
        """Return whether times are known for so many rows on a device."""
        if self.measured is None:
            return True
        least, most = self.measured.range
        return least <= rows <= most

    def saved(self, remat: str, rows: float) -> Array:
        """Return the bytes that each work keeps for its backward."""
        per_row, fixed = self._saved[remat]
        found: Array = per_row * rows + fixed
        return found

    @cached_property
    def _saved(self) -> Mapping[str, Array]:
        """Remat → bytes per row, and fixed ones, that each work keeps."""
        works = self.graph.works
        return {
            remat: np.array(
                [(w.saved[remat].bytes_per_row, w.saved[remat].bytes) for w in works]
            ).T
            for remat in ("none", "full")
        }

    def passed(self, remat: str, rows: float) -> Array:
        """Return the bytes that each work keeps from I to W."""
        return np.array([w.passed[remat].of(rows) for w in self.graph.works])

    def made(self, remat: str, rows: float) -> Array:
        """Return the bytes of that which each work's I makes."""
        return np.array([w.made[remat].of(rows) for w in self.graph.works])

    @cached_property
    def parameter_bytes(self) -> Array:
        """Bytes of the parameters of each work."""
        works = self.graph.works
        return np.array([float(sum(p.bytes for p in w.parameters)) for w in works])

    def split_bytes(self, model: int) -> Array:
        """Return each work's bytes of parameters that `model` devices can split."""
        if model not in self._split:
            self._split[model] = np.array(
                [
                    float(sum(p.bytes for p in w.parameters if _splits(p.shape, model)))
                    for w in self.graph.works
                ]
            )
        return self._split[model]

    @cached_property
    def value_sizes(self) -> Array:
        """Bytes per row and fixed of each value: (values, 2)."""
        sizes = [(v.bytes_per_row, v.bytes) for v in self.graph.values]
        return np.array(sizes, dtype=float).reshape(-1, 2)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Places of the users of each value."""
        index = self.graph.index
        return tuple(tuple(index[u] for u in v.users) for v in self.graph.values)

    @cached_property
    def keepers(self) -> tuple[tuple[int, ...], ...]:
        """Places of the works that keep each value."""
        index = self.graph.index
        return tuple(tuple(index[u] for u in v.kept_by) for v in self.graph.values)

    @cached_property
    def producers(self) -> tuple[int, ...]:
        """Place of the producer of each value, -1 for an input of the model."""
        index = self.graph.index
        return tuple(
            -1 if v.producer is None else index[v.producer] for v in self.graph.values
        )

    @cached_property
    def makers(self) -> NDArray[np.int_]:
        """The same as an array."""
        return np.array(self.producers, dtype=int)

    @cached_property
    def kept_values(self) -> NDArray[np.int_]:
        """Numbers of the values that a work keeps."""
        return np.unique(self.keeping[:, 0])

    @cached_property
    def last_users(self) -> tuple[tuple[int, ...], ...]:
        """Places of the users of each value, the last one first."""
        return tuple(tuple(sorted(own, reverse=True)) for own in self.users)

    @cached_property
    def uses(self) -> NDArray[np.int_]:
        """Number of a value and place of a work that uses it: (uses, 2)."""
        return _pairs(self.users)

    @cached_property
    def keeping(self) -> NDArray[np.int_]:
        """Number of a value and place of a work that keeps it: (keepers, 2)."""
        return _pairs(self.keepers)

    @cached_property
    def passing(self) -> NDArray[np.int_]:
        """Number of a value and place of a work whose W reads it: (works, 2)."""
        index = self.graph.index
        return _pairs([[index[w] for w in v.passed_by] for v in self.graph.values])

    @cached_property
    def passing_again(self) -> NDArray[np.int_]:
        """The same of further ones, where these works compute again."""
        index, values = self.graph.index, self.graph.values
        return _pairs([[index[w] for w in v.passed_again_by] for v in values])

    @cached_property
    def are_unread(self) -> NDArray[np.bool_]:
        """Whether the I of each use's work, which computes again, does not read it."""
        index, values = self.graph.index, self.graph.values
        found = {(n, index[w]) for n, v in enumerate(values) for w in v.unread_by}
        return np.array([(v, w) in found for v, w in self.uses.tolist()], dtype=bool)

    @cached_property
    def are_used(self) -> NDArray[np.bool_]:
        """Whether each value leaves its work, and not only views of it."""
        found = np.array([bool(value.users) for value in self.graph.values], dtype=bool)
        found[list(self.outputs)] = True
        return found

    @cached_property
    def wholes(self) -> NDArray[np.int_]:
        """Number of the value that each value is a view of, -1 for none."""
        values = self.graph.values
        numbers = {value.name: number for number, value in enumerate(values)}
        own = [-1 if v.view_of is None else numbers[v.view_of] for v in values]
        return np.array(own, dtype=int)

    @cached_property
    def views(self) -> tuple[NDArray[np.int_], ...]:
        """Numbers of the values that are views: those of other views come first."""
        found = []
        left = np.flatnonzero(self.wholes >= 0)
        while left.size:
            last = left[~np.isin(left, self.wholes[left])]
            found.append(last)
            left = np.setdiff1d(left, last)
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Places of the works that use no value with a gradient."""
        users = set(self.uses[self.have_gradients[self.uses[:, 0]], 1].tolist())
        return tuple(place for place in range(self.num_works) if place not in users)

    @cached_property
    def have_gradients(self) -> NDArray[np.bool_]:
        """Whether each value has a gradient."""
        return np.array([v.has_gradient for v in self.graph.values], dtype=bool)

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """Numbers of the values that the model returns."""
        names = set(self.graph.outputs)
        values = enumerate(self.graph.values)
        return tuple(number for number, value in values if value.name in names)

    @cached_property
    def ties(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Name of each tied group → place of each work that uses it, and its bytes."""
        found: dict[str, list[tuple[int, int]]] = {}
        for place, work in enumerate(self.graph.works):
            for parameter in work.parameters:
                if parameter.tied is not None:
                    entry = found.setdefault(parameter.tied, [])
                    entry.append((place, parameter.bytes))
        return {name: tuple(uses) for name, uses in found.items() if len(uses) > 1}


@dataclass(frozen=True, eq=False)
class WorkCosts:
    """The time and memory of works on one device.

    Args:
        table: The works.
        cluster: The devices.
        strategy: The way in which a rank's devices share the works.
        rows: Rows of a microbatch, those of all devices of a rank.
        optimizer_bytes: Bytes of the optimizer's state for a byte of parameters.
    """

    table: WorkTable
    cluster: Cluster
    strategy: Strategy
    rows: int
    optimizer_bytes: float
    _final: dict[int, Array] = field(default_factory=dict, init=False, repr=False)
    _paths: dict[bool, float] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def device_rows(self) -> float:
        """Rows of a microbatch on one device."""
        return self.rows / self.strategy.data

    @cached_property
    def by_rules(self) -> RuleSplits | None:
        """What is split by the rules, None if there are none."""
        return self.table.by_rules(self.strategy)

    @cached_property
    def is_split(self) -> NDArray[np.bool_]:
        """Whether each work is split over the axis `model`."""
        if self.by_rules is not None:
            return self.by_rules.is_split
        model = self.strategy.model
        return (self.table.split_bytes(model) > 0) & (model > 1)

    @cached_property
    def share(self) -> Array:
        """Share of each work that one device of the axis `model` does."""
        return np.where(self.is_split, 1 / self.strategy.model, 1.0)

    @cached_property
    def seconds(self) -> tuple[Array, Array, Array]:
        """The times of F, I and W of each work, with collectives."""
        forward, inputs, weights = self._alone
        if self.by_rules is not None:
            exchanged = (self._exchanges_s[when] for when in "FIW")
            alone = (forward, inputs, weights)
            both = zip(alone, exchanged, strict=True)
            forward, inputs, weights = (own + more for own, more in both)
            return forward, inputs, weights
        gather, scatter = self._fsdp_s
        reduce_outputs, reduce_inputs = self._tensor_s
        return (
            forward + gather + reduce_outputs,
            inputs + gather + reduce_inputs,
            weights + scatter,
        )

    @cached_property
    def parameter_bytes(self) -> Array:
        """Bytes of parameters of each work on one device while it does not run."""
        if self.by_rules is not None:
            return self.by_rules.kept_bytes
        split = self.table.split_bytes(self.strategy.model)
        whole = self.table.parameter_bytes - split
        found = whole + split / self.strategy.model
        return found / (self.strategy.data if self.strategy.has_fsdp else 1)

    def tie_share(self, tied: str, place: int) -> float:
        """Return the share of a tied parameter that a device has.

        Args:
            tied: Name of the group.
            place: Place of a work that uses it.
        """
        if self.by_rules is not None:
            own = self.table.graph.works[place].parameters
            one = next(p for p in own if p.tied == tied)
            return 1 / self.by_rules.kept_share(one)
        whole = float(self.table.parameter_bytes[place])
        return float(self.parameter_bytes[place]) / whole if whole else 0.0

    @cached_property
    def gathered_bytes(self) -> Array:
        """Bytes of parameters of each work on one device while it runs."""
        if self.by_rules is not None:
            return self.by_rules.used_bytes
        factor = self.strategy.data if self.strategy.has_fsdp else 1
        return self.parameter_bytes * factor

    @cached_property
    def saved(self) -> Mapping[str, Array]:
        """Remat → bytes that each work keeps from F to its backward."""
        rows, split = self.device_rows, self.by_rules
        whole = {r: self.table.saved(r, rows) for r in ("none", "full")}
        if split is not None:
            return {r: size - split.saved(r, rows) for r, size in whole.items()}
        return {r: size * self.share for r, size in whole.items()}

    @cached_property
    def running_bytes(self) -> Array:
        """A guess of the temporaries of each work while it runs."""
        table = self.table
        producers = table.makers
        made = (producers >= 0) & table.are_used
        found = self.saved["none"].copy()
        np.add.at(found, table.uses[:, 1], self.inner_bytes[table.uses[:, 0]])
        np.add.at(found, producers[made], self.inner_bytes[made])
        return found + self.gathered_bytes if self.strategy.has_fsdp else found

    @cached_property
    def passed(self) -> Mapping[str, Array]:
        """Remat → bytes that each work keeps from I to W."""
        rows, split = self.device_rows, self.by_rules
        whole = {r: self.table.passed(r, rows) for r in ("none", "full")}
        if split is not None:
            return {r: size - split.passed(r, rows) for r, size in whole.items()}
        return {r: size * self.share for r, size in whole.items()}

    @cached_property
    def made(self) -> Mapping[str, Array]:
        """Remat → bytes of that which each work's I makes, split as the rest is."""
        rows, found = self.device_rows, {}
        for remat, own in self.passed.items():
            whole = self.table.passed(remat, rows)
            share = self.table.made(remat, rows) / np.where(whole > 0, whole, 1.0)
            found[remat] = own * share
        return found

    @cached_property
    def message_bytes(self) -> Array:
        """Bytes of each value for all devices of a rank."""
        sizes = self.table.value_sizes
        return sizes[:, 0] * self.rows + sizes[:, 1]

    @cached_property
    def message_sizes(self) -> list[int]:
        """The same, rounded to whole bytes."""
        sizes: list[int] = np.rint(self.message_bytes).astype(int).tolist()
        return sizes

    @cached_property
    def value_bytes(self) -> Array:
        """Bytes of each value on one device, where the axis `model` splits none."""
        sizes = self.table.value_sizes
        return sizes[:, 0] * self.device_rows + sizes[:, 1]

    @cached_property
    def inner_bytes(self) -> Array:
        """Bytes of each value on one device while no other stage uses it."""
        split = self.by_rules
        return self.value_bytes * (1.0 if split is None else split.value_shares)

    @cached_property
    def border_s(self) -> Array:
        """What making each value whole takes, for another stage."""
        device, model = self.cluster.device, self.strategy.model
        per_s, latency_s = device.link_bytes_per_s, device.link_latency_s
        is_inner = self.inner_bytes < self.value_bytes
        return _ring(self.value_bytes * is_inner, model, per_s, latency_s)

    @cached_property
    def optimizer_s(self) -> Array:
        """The optimizer's time for each work: parameters, gradients, state."""
        moved = self.parameter_bytes * (2 + self.optimizer_bytes)
        return moved / self.cluster.device.bytes_per_s

    def longest_path_s(self, has_late_weights: bool) -> float:
        """Return the time of the longest path of works, which is cached.

        Args:
            has_late_weights: Whether W is not on it.
        """
        if has_late_weights not in self._paths:
            forward, inputs, weights = self.seconds
            own = forward + inputs if has_late_weights else forward + inputs + weights
            found = own.tolist()
            loads = found[:]
            for producer, consumer in self.table.graph.edges:
                through = found[producer] + loads[consumer]
                found[consumer] = max(found[consumer], through)
            self._paths[has_late_weights] = max(found)
        return self._paths[has_late_weights]

    def final_s(self, replicas: int) -> Array:
        """Return the time of each work at the end of a step, which is cached."""
        if replicas not in self._final:
            self._final[replicas] = self.gradient_sum_s(replicas) + self.optimizer_s
        return self._final[replicas]

    def gradient_sum_s(self, replicas: int) -> Array:
        """Return the time to sum each work's gradients at the end of a step.

        They are summed within a rank first, over the fast links. The latency of
        messages between replicas is that of a stage, and not counted here.
        """
        device, link = self.cluster.device, self.cluster.link_of_replicas
        found = np.zeros(self.table.num_works)
        once, per_s = self._summed_once_bytes, device.link_bytes_per_s
        found += _ring(once, self.strategy.data, per_s, 0.0) * 2
        # A link carries what all devices of a rank send: every parameter, once.
        sent = self.table.parameter_bytes
        return found + 2 * _ring(sent, replicas, link.bytes_per_s, 0.0)

    @property
    def _summed_once_bytes(self) -> Array:
        """Bytes of gradients of each work that devices sum at the end of a step."""
        if self.by_rules is not None:
            return self.by_rules.summed_once_bytes
        return self.parameter_bytes * (not self.strategy.has_fsdp)

    @cached_property
    def _exchanges_s(self) -> Mapping[str, Array]:
        """F, I and W → what the exchanges of each work take by the rules."""
        device, sizes = self.cluster.device, self.strategy.sizes
        found = {when: np.zeros(self.table.num_works) for when in "FIW"}
        for one in () if self.by_rules is None else self.by_rules.collectives:
            if one.when in found:
                found[one.when][one.place] += RING_PASSES[one.kind] * ring_s(
                    one.size.of(self.device_rows),
                    sizes[one.axis],
                    device.link_bytes_per_s,
                    device.link_latency_s,
                )
        return found

    @cached_property
    def split_s(self) -> Array:
        """The further time of each work's backward if it is split in two."""
        if self.table.measured is None:
            return np.zeros(self.table.num_works)
        _, inputs, _ = self._alone
        return self._measured("I") - inputs

    @cached_property
    def _alone(self) -> tuple[Array, Array, Array]:
        """The times of F, I and W of each work, without collectives."""
        if self.table.measured is None:
            forward, inputs, weights = (self._roofline(c) for c in self.table.costs)
            return forward, inputs, weights
        weights = self._measured("W")
        whole = np.maximum(self._measured("B"), weights)
        return self._measured("F"), whole - weights, weights

    def _measured(self, kind: str) -> Array:
        lines = self.table.measured_lines[kind]
        found: Array = (lines[:, 0] * self.device_rows + lines[:, 1]) * self.share
        return found

    def _roofline(self, cost: Array) -> Array:
        device, rows = self.cluster.device, self.device_rows
        compute_s = (cost[:, 0] * rows + cost[:, 1]) / (
            device.flops_per_s * device.efficiency
        )
        memory_s = (cost[:, 2] * rows + cost[:, 3]) / device.bytes_per_s
        return np.maximum(compute_s, memory_s) * self.share

    @cached_property
    def _fsdp_s(self) -> tuple[Array, Array]:
        """Return the time to gather parameters, and to sum their gradients."""
        if not self.strategy.has_fsdp:
            none = np.zeros(self.table.num_works)
            return none, none
        device = self.cluster.device
        found = _ring(
            self.gathered_bytes,
            self.strategy.data,
            device.link_bytes_per_s,
            device.link_latency_s,
        )
        return found, found

    @cached_property
    def _tensor_s(self) -> tuple[Array, Array]:
        """Return times of all-reduces: of results in F, of inputs' gradients in I."""
        outputs, inputs = np.zeros((2, self.table.num_works))
        device, model = self.cluster.device, self.strategy.model
        if model == 1:
            return outputs, inputs
        table, is_split = self.table, self.is_split
        per_s, latency_s = device.link_bytes_per_s, device.link_latency_s
        seconds = 2 * _ring(self.value_bytes, model, per_s, latency_s)
        producers = table.makers
        is_made = (producers >= 0) & table.have_gradients
        made = np.flatnonzero(is_made & is_split[producers])
        np.add.at(outputs, producers[made], seconds[made])
        numbers, users = table.uses.T
        used = is_made[numbers] & is_split[users]
        np.add.at(inputs, users[used], seconds[numbers[used]])
        return outputs, inputs


def _ring(sizes: Array, count: int, bytes_per_s: float, latency_s: float) -> Array:
    """Return the time of a gather of each of these, as `ring_s`."""
    if count == 1:
        return np.zeros_like(sizes)
    seconds = latency_s + (count - 1) / count * sizes / bytes_per_s
    found: Array = np.where(sizes > 0, seconds, 0.0)
    return found


def _pairs(members: Sequence[Sequence[int]]) -> NDArray[np.int_]:
    """Return the number of each group with each of its members."""
    pairs = [(number, place) for number, own in enumerate(members) for place in own]
    return np.array(pairs, dtype=int).reshape(-1, 2)


def _numbers(cost: Cost) -> tuple[float, float, float, float]:
    return cost.flops_per_row, cost.flops, cost.bytes_per_row, cost.bytes


def _splits(shape: tuple[int, ...], count: int) -> bool:
    """Return whether a matrix has a dimension that so many devices can split."""
    return len(shape) > 1 and any(size % count == 0 and size for size in shape)

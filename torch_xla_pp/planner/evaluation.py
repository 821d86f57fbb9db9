"""The cost of a cut of a model: seconds of a step, and bytes on each rank.

Terms: a *cut* gives each work a stage; a *setting* is all other choices of a plan.
Stages are numbered so that values go to higher ones only.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.devices import Cluster, DeviceSpec
from torch_xla_pp.planner.orders import (
    LIST_RULES,
    LISTED,
    SPLIT,
    OrderRule,
    PlannedOrder,
    listed_order,
    planned_order,
    sequence_of,
    usual_placement,
)
from torch_xla_pp.planner.stage_flows import WorkParts, flows_of
from torch_xla_pp.planner.strategies import Strategy
from torch_xla_pp.planner.work_costs import Array, WorkCosts, WorkTable
from torch_xla_pp.simulate import (
    Costs,
    Routes,
    chain_flows,
    ring_all_reduce_s,
    stage_seconds,
    step_seconds,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The choices of a plan besides the stages.

    Args:
        num_ranks: Ranks of one pipeline.
        replicas: Number of pipelines.
        strategy: How the devices of a rank share its stages.
        rows: Rows of a microbatch.
        num_microbatches: Microbatches of a step.
        schedule: Name of the order of actions.
        stages_per_rank: Number of stages on each rank.
        strategies: The strategy of each rank if ranks differ, the first of which is
            `strategy`; () if all ranks are equal.
    """

    num_ranks: int
    replicas: int = 1
    strategy: Strategy = field(default_factory=Strategy)
    rows: int
    num_microbatches: int
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    strategies: tuple[Strategy, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.num_ranks * self.stages_per_rank

    @property
    def usual_ranks(self) -> tuple[int, ...]:
        """Rank of each stage if a plan does not say it."""
        return usual_placement(self.schedule, self.num_ranks, self.stages_per_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The stage of each work, and which stages compute values again.

    Args:
        setting: The other choices.
        stages: Stage of each work.
        remat: "none" or "full" for each stage.
        placement: Rank of each stage if the schedule is "list" or ranks differ; () for
            the usual one.
    """

    setting: Setting
    stages: tuple[int, ...]
    remat: tuple[str, ...]
    placement: tuple[int, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages; a listed order may have any number on a rank."""
        return len(self.remat)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return self.placement or self.setting.usual_ranks

    @property
    def stages_per_rank(self) -> int:
        """The most stages on a rank, which a listed order is free to choose."""
        return max(Counter(self.ranks).values())

    @property
    def sequence(self) -> tuple[int, ...] | None:
        """The rank in the place of rank 0, 1, … of a builder's order.

        It is () for these themselves, and None if no ranks have just their stages.
        """
        if not self.placement:
            return ()
        usual = self.setting.usual_ranks
        return () if self.placement == usual else sequence_of(self.placement, usual)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBytes:
    """The most bytes that one device of a rank holds, part by part.

    Args:
        parameters: Parameters.
        gradients: Their gradients, which add up over a step.
        optimizer: The optimizer's state.
        saved: What is kept from F to B or I, to the end of that.
        passed: What is kept from I to W, including saved values. What I makes of it is
            there with what is saved, as it runs.
        outputs: The model's outputs, or their gradients, from F to B. Outputs that a
            caller keeps to the end of a step are not counted.
        temporary: A guess of the temporaries of the largest program.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    passed: int
    outputs: int
    temporary: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.state + self.saved + self.passed + self.outputs + self.temporary

    @property
    def state(self) -> int:
        """The state between steps, and gradients."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The costs of a cut.

    Args:
        cut: The cut.
        step_s: Seconds of a step.
        costs: The costs of its stages.
        held_bytes: The parts of each rank's bytes, as in `RankBytes`: (ranks, parts).
        order: The order of actions.
        capacities: The memory of a device of each rank for it.
        rule: The rule that made the order, if it is listed.
    """

    cut: Cut
    step_s: float
    costs: Costs
    held_bytes: NDArray[np.int_]
    order: PlannedOrder
    capacities: tuple[int, ...]
    rule: OrderRule | None = None

    @cached_property
    def ranks(self) -> tuple[RankBytes, ...]:
        """The bytes of each rank."""
        names = [part.name for part in fields(RankBytes)]
        lines = self.held_bytes.tolist()
        return tuple(RankBytes(**dict(zip(names, line, strict=True))) for line in lines)

    @cached_property
    def peak_bytes(self) -> int:
        """The most that a device holds."""
        return int(self.held_bytes.sum(1).max())

    @cached_property
    def lacking_bytes(self) -> tuple[int, ...]:
        """What a device of each rank holds beyond what it has, below 0 if it fits."""
        return tuple((self.held_bytes.sum(1) - self.capacities).tolist())

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return max(self.lacking_bytes) <= 0

    @property
    def sort_key(self) -> tuple[int, float, float]:
        """The key to compare plans by: those that fit by time, others by memory."""
        return max(0, *self.lacking_bytes), self.step_s, self.peak_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluator:
    """An evaluator of cuts of one model on one cluster.

    Args:
        table: The works.
        cluster: The devices.
        optimizer_bytes: Bytes of the optimizer's state for a byte of parameters.
        has_own_inputs: Whether stages take the model's inputs on their own rank.
            Otherwise the first stage takes all and sends them on.
        has_chain: Whether each stage waits for the one before, as when stages run as a
            chain whatever their edges.
        whole: The evaluator of all works, if the works of the table are joined ones.
        groups: Then for each work of the whole the joined one.
    """

    table: WorkTable
    cluster: Cluster
    optimizer_bytes: float = 2.0
    has_own_inputs: bool = False
    has_chain: bool = False
    whole: "Evaluator | None" = None
    groups: tuple[int, ...] = ()
    _works: dict[tuple[Strategy, int], WorkCosts] = field(
        default_factory=dict, init=False
    )
    _tables: dict[object, dict[object, Any]] = field(default_factory=dict, init=False)

    def works(self, strategy: Strategy, rows: int) -> WorkCosts:
        """Return the costs of works on the cluster's first device, which are cached."""
        key = strategy, rows
        if key not in self._works:
            self._works[key] = WorkCosts(
                self.table, self.cluster, strategy, rows, self.optimizer_bytes
            )
        return self._works[key]

    def works_of_ranks(self, setting: Setting) -> tuple[WorkCosts, ...]:
        """Return the costs of works on each rank; equal ones are one, and cached.

        Args:
            setting: A setting for ranks that differ.
        """
        known = self.tables("works of ranks")
        whole = setting.strategies, setting.rows
        if whole not in known:
            ranks = self.cluster.ranks[: setting.num_ranks]
            pairs = zip(ranks, setting.strategies, strict=True)
            known[whole] = tuple(
                self._works_on(rank.device, strategy, setting.rows)
                for rank, strategy in pairs
            )
        found: tuple[WorkCosts, ...] = known[whole]
        return found

    def _works_on(self, device: DeviceSpec, strategy: Strategy, rows: int) -> WorkCosts:
        known = self.tables("works on devices")
        key = device, strategy, rows
        if key not in known:
            cluster = self.cluster.of_device(device)
            known[key] = WorkCosts(
                self.table, cluster, strategy, rows, self.optimizer_bytes
            )
        found: WorkCosts = known[key]
        return found

    def by_stage(
        self, cut: Cut, count: Callable[[WorkCosts], Sequence[Array]]
    ) -> Sequence[Array]:
        """Return arrays with an item for each stage, by what works cost on its rank.

        Args:
            cut: The cut.
            count: The same from the costs of works on one rank.
        """
        setting = cut.setting
        if not setting.strategies:
            return count(self.works(setting.strategy, setting.rows))
        of_ranks = self.works_of_ranks(setting)
        kinds = {works: kind for kind, works in enumerate(dict.fromkeys(of_ranks))}
        every = np.array([count(works) for works in kinds])
        homes = [kinds[of_ranks[rank]] for rank in cut.ranks]
        return tuple(every[homes, :, range(cut.num_stages)].T)

    def capacities(self, num_ranks: int) -> tuple[int, ...]:
        """Return the memory of a device of each rank of a pipeline; it is cached."""
        known = self.tables("capacities")
        if num_ranks not in known:
            known[num_ranks] = self.cluster.capacities(num_ranks)
        found: tuple[int, ...] = known[num_ranks]
        return found

    def tables(self, name: object) -> dict[object, Any]:
        """Return a cache that searches with this evaluator share."""
        return self._tables.setdefault(name, {})

    def evaluate(
        self, cut: Cut, rules: tuple[OrderRule, ...] = LIST_RULES
    ) -> Evaluation:
        """Return the costs of a cut, which are cached.

        Args:
            cut: The cut.
            rules: Rules for its order, if that is listed; the best one is taken.
        """
        key = _key_of(cut, rules)
        known = self.tables("evaluations")
        if key not in known:
            known[key] = self._evaluate(cut, rules, np.inf)
        found: Evaluation = known[key]
        return found

    def evaluate_within(
        self, limit_s: float, cut: Cut, rules: tuple[OrderRule, ...] = LIST_RULES
    ) -> Evaluation | None:
        """Return the costs of a cut, or None if its step takes longer than a limit.

        Of a longer step the memory is not counted; neither is that of longer orders
        where several are tried.

        Args:
            limit_s: The limit.
            cut: The cut.
            rules: As for `evaluate`.
        """
        key = _key_of(cut, rules)
        known, longer = self.tables("evaluations"), self.tables("longer than")
        if key not in known:
            if longer.get(key, -np.inf) >= limit_s:
                return None
            found = self._evaluate(cut, rules, limit_s)
            if found is None:
                longer[key] = limit_s
                return None
            if found.rule is not None:
                return found
            known[key] = found
        evaluation: Evaluation = known[key]
        return evaluation if evaluation.step_s <= limit_s else None

    def whole_cut(self, cut: Cut) -> Cut:
        """Return the cut of all works for one of joined works."""
        return replace(cut, stages=tuple(cut.stages[group] for group in self.groups))

    def _evaluate(
        self, cut: Cut, rules: Sequence[OrderRule], limit_s: float
    ) -> Evaluation | None:
        if self.whole is not None:
            found = self.whole._evaluate(self.whole_cut(cut), rules, limit_s)
            return None if found is None else replace(found, cut=cut)
        setting = cut.setting
        if setting.schedule == LISTED:
            return self._listed(cut, rules, limit_s)
        costs = self.costs(cut)
        edges = costs.edges if setting.schedule == "dag" else ()
        order = planned_order(
            setting.schedule,
            setting.num_ranks,
            setting.num_microbatches,
            setting.stages_per_rank,
            edges,
            cut.sequence or (),
        )
        step_s = step_seconds(order, costs, self.cluster.network, limit_s=limit_s)
        if step_s > limit_s:
            return None
        return self._evaluation(cut, order, step_s, costs, self._held(cut))

    def _held(self, cut: Cut) -> "_Held":
        return _Held(*self.by_stage(cut, lambda works: _held_bytes(works, cut)))

    def _listed(
        self, cut: Cut, rules: Sequence[OrderRule], limit_s: float
    ) -> Evaluation | None:
        """Return the best of several orders, None if all take longer than a limit.

        Of those that take longer than one that fits, the memory does not matter.
        """
        count, network = cut.setting.num_microbatches, self.cluster.network
        held = None
        best: Evaluation | None = None
        kinds: dict[bool, tuple[Costs, Routes]] = {}
        for rule in rules:
            if rule.is_split not in kinds:
                own = self.costs(cut, rule.is_split)
                routes = Routes.of(own.flows, cut.ranks, network)
                kinds[rule.is_split] = own, routes
            costs, routes = kinds[rule.is_split]
            listed = listed_order(
                rule,
                cut.ranks,
                count,
                costs,
                network,
                routes=routes,
                has_sequences=bool(cut.setting.strategies),
                limit_s=min(limit_s, best.step_s) if best and best.fits else limit_s,
            )
            if listed is None:
                continue
            held = held or self._held(cut)
            found = self._evaluation(cut, *listed, costs, held, rule)
            if best is None or found.sort_key < best.sort_key:
                best = found
        return best

    def _evaluation(
        self,
        cut: Cut,
        order: PlannedOrder,
        step_s: float,
        costs: Costs,
        held: "_Held",
        rule: OrderRule | None = None,
    ) -> Evaluation:
        return Evaluation(
            cut=cut,
            step_s=step_s,
            costs=held.in_costs(costs),
            held_bytes=_rank_bytes(held, order),
            order=order,
            capacities=self.capacities(cut.setting.num_ranks),
            rule=rule,
        )

    def costs(self, cut: Cut, is_split: bool | None = None) -> Costs:
        """Return the times of a cut's stages, and their messages.

        Args:
            cut: The cut.
            is_split: Whether W is a program of its own; None to follow its schedule.
        """
        setting = cut.setting
        works = self.works(setting.strategy, setting.rows)
        if is_split is None:
            is_split = setting.schedule in SPLIT
        count = split_stage_times if is_split else stage_times
        times = zip(*self.by_stage(cut, lambda own: count(own, cut)), strict=True)
        # Messages are of all devices of a rank, whatever their number.
        flows = flows_of(
            works,
            cut.stages,
            has_own_inputs=self.has_own_inputs,
            parts=self._parts(works, cut, is_split),
        )
        if self.has_chain:
            near = {edge for flow in flows if flow.has_gradient for edge in flow.edges}
            chain = chain_flows(cut.num_stages)
            flows += tuple(flow for flow in chain if near.isdisjoint(flow.edges))
        return Costs(
            seconds=stage_seconds((float(f), float(i), float(w)) for f, i, w in times),
            flows=flows,
            final_s=dict(enumerate(self.final_s(cut))),
        )

    def _parts(self, works: WorkCosts, cut: Cut, is_split: bool) -> WorkParts:
        """Return when in actions the values and gradients of works are there."""
        if not self.cluster.sends_inside:
            return WorkParts.at_ends(self.table.num_works)
        forward, inputs, weights = works.seconds
        is_full = np.array([remat == "full" for remat in cut.remat])
        return WorkParts.in_order(
            np.array(cut.stages),
            forward,
            inputs + (works.split_s if is_split else weights),
            action_s=works.cluster.device.action_s,
            again_s=stage_sums(cut, forward) * is_full,
        )

    def final_s(self, cut: Cut) -> list[float]:
        """Return each stage's time at the end: sums of gradients, optimizer."""
        replicas = cut.setting.replicas
        (found,) = self.by_stage(
            cut, lambda own: (stage_sums(cut, own.final_s(replicas)),)
        )
        found = found + ring_all_reduce_s(0, replicas, self.cluster.link_of_replicas)
        link = self.cluster.network.default
        for uses in self.table.ties.values():
            sharing = {cut.stages[place] for place, _ in uses}
            if len(sharing) > 1:
                for stage in sharing:
                    found[stage] += 2 * (link.latency_s + uses[0][1] / link.bytes_per_s)
        return [float(seconds) for seconds in found]


def _key_of(cut: Cut, rules: tuple[OrderRule, ...]) -> tuple[Cut, object]:
    """Return what tells one evaluation from others."""
    return cut, rules if cut.setting.schedule == LISTED else ()


def stage_times(works: WorkCosts, cut: Cut) -> tuple[Array, Array, Array]:
    """Return the times of F, I and W of each stage; B is I and W in one program."""
    stages = np.array(cut.stages)
    count = cut.num_stages
    forward, inputs, weights = (_binned(stages, s, count) for s in works.seconds)
    action_s = works.cluster.device.action_s
    if works.by_rules is not None and works.strategy.model > 1:
        _add_borders(works, cut, forward, inputs)
    inputs += action_s
    if "full" in cut.remat:
        inputs += forward * [remat == "full" for remat in cut.remat]
    return forward + action_s, inputs, weights


def split_stage_times(works: WorkCosts, cut: Cut) -> tuple[Array, Array, Array]:
    """Return the times of F, I and W of each stage if I and W are programs each.

    Without a gradient to send there is no I, and W is the whole backward.
    """
    forward, inputs, weights = stage_times(works, cut)
    have_inputs = _have_input_grads(works.table, cut)
    apart = inputs + stage_sums(cut, works.split_s)
    late = weights + works.cluster.device.action_s
    return (
        forward,
        np.where(have_inputs, apart, 0.0),
        np.where(have_inputs, late, inputs + weights),
    )


def _add_borders(works: WorkCosts, cut: Cut, forward: Array, inputs: Array) -> None:
    """Add what makes values whole that stages send, and gradients of them."""
    table, count = works.table, cut.num_stages
    homes, entered = table.homes_and_users(cut.stages)
    numbers = table.uses[:, 0]
    is_sent = (homes[numbers] >= 0) & (entered != homes[numbers])
    sent = np.unique(numbers[is_sent])
    # Outputs of the model are whole in any case.
    sent = sent[~np.isin(sent, table.outputs)]
    forward += _binned(homes[sent], works.border_s[sent], count)
    is_graded = is_sent & table.have_gradients[numbers]
    keys = np.unique(numbers[is_graded] * count + entered[is_graded])
    inputs += _binned(keys % count, works.border_s[keys // count], count)


class _Held(NamedTuple):
    """The bytes of one device for each stage; `saved` to `outputs` per microbatch.

    Of what is passed, `late` is saved from F on.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    saved: Array
    passed: Array
    late: Array
    outputs: Array
    temporary: Array

    def in_costs(self, costs: Costs) -> Costs:
        """Return costs with what stages save and pass."""
        return replace(
            costs,
            saved_bytes=dict(enumerate(map(round, self.saved.tolist()))),
            passed_bytes=dict(enumerate(map(round, self.passed.tolist()))),
        )


def _held_bytes(works: WorkCosts, cut: Cut) -> _Held:
    """Return what stages hold, if all ranks are as the one of these costs."""
    parameters = stage_sums(cut, works.parameter_bytes)
    _count_ties_once(works, cut.stages, parameters)
    again = _computed_again(works.table, cut)
    values, outputs = _value_bytes(works, cut, again)
    is_full = np.array([remat == "full" for remat in cut.remat])
    own = {remat: stage_sums(cut, held) for remat, held in works.saved.items()}
    saved = values + np.where(is_full, own["full"], own["none"])
    passed, late = _passed_bytes(works, cut, saved, again)
    largest = np.zeros(cut.num_stages)
    np.maximum.at(largest, np.array(cut.stages), works.running_bytes)
    return _Held(
        parameters=parameters,
        gradients=parameters,
        optimizer=parameters * works.optimizer_bytes,
        saved=saved,
        passed=passed,
        late=late,
        outputs=outputs,
        temporary=largest,
    )


def _passed_bytes(
    works: WorkCosts, cut: Cut, saved: Array, computed: "_ComputedAgain"
) -> tuple[Array, Array]:
    """Return the bytes that stages keep from I to W, and those of them saved from F on.

    All saved ones are if there is no I. A work from which no gradient goes to another
    stage has no part in I: gradients of its values wait for W, too. Those from other
    ranks are received by W itself. What I does not need it does not compute again: W
    does.
    """
    table, count, stages = works.table, cut.num_stages, np.array(cut.stages)
    have_inputs = _have_input_grads(table, cut)
    is_full = np.array([remat == "full" for remat in cut.remat])
    again = is_full[stages]
    own, keys = works.passed["none"], computed.read
    made = np.where(again, own, works.made["none"])
    is_late = ~have_inputs[stages]
    homes, _ = table.homes_and_users(cut.stages)
    if "full" in cut.remat:
        own = np.where(computed.is_last, works.passed["full"], own)
        made = np.where(computed.is_last, works.made["full"], made)
    if any(have_inputs[cut.stages[place]] for place in table.sources):
        is_late = ~_in_input_backward(table, cut)
        held = np.where(again, works.saved["full"], works.saved["none"])
        own = np.where(is_late, held, own)
        made = np.where(is_late, 0.0, made)
        late = table.keeping[is_late[table.keeping[:, 1]]]
        keys = np.concatenate((keys[~is_late[keys[:, 1]]], late))
    readers = stages[keys[:, 1]]
    values = kept_values = _least_bytes(works, cut, keys[:, 0], readers)
    if "full" in cut.remat:
        are_saved = ~is_full[readers] | (homes[keys[:, 0]] != readers)
        keys, readers = keys[are_saved], readers[are_saved]
        kept_values = _least_bytes(works, cut, keys[:, 0], readers)
    found = _binned(stages, own, count) + values
    kept = _binned(stages, own - made, count) + kept_values
    grads = _gradient_bytes(works, cut, is_late)
    found = np.where(have_inputs, found, saved) + grads
    return found, np.where(have_inputs, kept, saved)


class _ComputedAgain(NamedTuple):
    """What I computes again, and W does.

    Of works that compute again, `is_last` tells those of whose values I reads none, and
    computes none: W does, of their operands. `read` has numbers of values and places of
    works: what W of a work reads, of a stage's values and of others'.
    """

    is_last: NDArray[np.bool_]
    read: NDArray[np.int_]


def _computed_again(table: WorkTable, cut: Cut) -> _ComputedAgain:
    """Return what I computes again, and W does."""
    if "full" not in cut.remat:
        return _ComputedAgain(np.zeros(table.num_works, dtype=bool), table.passing)
    stages = np.array(cut.stages)
    homes, entered = table.homes_and_users(cut.stages)
    again = np.array([remat == "full" for remat in cut.remat])[stages]
    is_last = _last_computed(table, again, entered == homes[table.uses[:, 0]])
    more = table.passing_again[is_last[table.passing_again[:, 1]]]
    read = np.concatenate((table.passing, more))
    read = _operands_in_place(table, read, stages, is_last)
    return _ComputedAgain(is_last, read)


def _last_computed(
    table: WorkTable, again: NDArray[np.bool_], are_inside: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return the works that compute again of whose values I reads none.

    Args:
        table: The works.
        again: Which works compute again.
        are_inside: Which uses are in the stage that makes the value.
    """
    values, users = table.uses[are_inside].T
    makers, are_unread = table.makers[values], table.are_unread[are_inside]
    found = again
    while True:
        left = again.copy()
        left[makers[~(are_unread & found[users])]] = False
        if (left == found).all():
            return found
        found = left


def _operands_in_place(
    table: WorkTable,
    keys: NDArray[np.int_],
    stages: NDArray[np.int_],
    is_last: NDArray[np.bool_],
) -> NDArray[np.int_]:
    """Put operands in the place of what W reads, where W computes that itself.

    Args:
        table: The works.
        keys: Number of a value and place of a work whose W reads it: (works, 2).
        stages: The stage of each work.
        is_last: Of which works I does not compute the values.
    """
    makers = table.makers
    computed = np.zeros(table.num_works, dtype=bool)
    while True:
        own, readers = makers[keys[:, 0]], keys[:, 1]
        is_inside = (own >= 0) & (own != readers) & (stages[own] == stages[readers])
        is_computed = is_inside & is_last[own]
        if not is_computed.any():
            return keys
        new = own[is_computed & ~computed[own]]
        computed[new] = True
        more = table.uses[np.isin(table.uses[:, 1], new)]
        keys = np.concatenate((keys[~is_computed], more))


def _gradient_bytes(works: WorkCosts, cut: Cut, are_makers: NDArray[np.bool_]) -> Array:
    """Return the bytes of gradients of some works' values from stages of their rank."""
    table, count, ranks = works.table, cut.num_stages, np.array(cut.ranks)
    if len({*cut.ranks}) == count:
        return np.zeros(count)
    homes, entered = table.homes_and_users(cut.stages)
    values = table.uses[:, 0]
    makers = np.array([*are_makers, False])[table.makers[values]]
    is_near = (entered != homes[values]) & (ranks[entered] == ranks[homes[values]])
    is_sent = makers & table.have_gradients[values] & is_near
    # Each stage that uses a value sends a gradient of it.
    pairs = np.unique(values[is_sent] * count + entered[is_sent]) // count
    return _binned(homes[pairs], works.value_bytes[pairs], count)


def _have_input_grads(table: WorkTable, cut: Cut) -> NDArray[np.bool_]:
    """Return for each stage whether it has an I, and W is not the whole backward."""
    homes, entered = table.homes_and_users(cut.stages)
    values = table.uses[:, 0]
    found = np.zeros(cut.num_stages, dtype=bool)
    found[entered[table.have_gradients[values] & (entered != homes[values])]] = True
    return found


def _in_input_backward(table: WorkTable, cut: Cut) -> NDArray[np.bool_]:
    """Return for each work whether a gradient goes from it to an earlier stage."""
    found = [False] * table.num_works
    for value, user in sorted(table.uses.tolist(), key=lambda use: use[1]):
        producer = table.producers[value]
        if producer >= 0 and table.have_gradients[value]:
            is_own = cut.stages[producer] == cut.stages[user]
            found[user] |= found[producer] or not is_own
    return np.array(found)


def stage_sums(cut: Cut, per_work: Array) -> Array:
    """Return the sum over the works of each stage."""
    return _binned(np.array(cut.stages), per_work, cut.num_stages)


def _binned(places: NDArray[np.int_], sizes: Array, count: int) -> Array:
    """Return the sum of the sizes at each of so many places."""
    return np.bincount(places, sizes, count).astype(np.float64, copy=False)


def _count_ties_once(works: WorkCosts, stages: Sequence[int], found: Array) -> None:
    """Subtract the bytes of a parameter that a stage counts several times."""
    for name, uses in works.table.ties.items():
        counts = Counter(stages[place] for place, _ in uses)
        place, num_bytes = uses[0]
        share = works.tie_share(name, place)
        for stage, count in counts.items():
            found[stage] -= (count - 1) * num_bytes * share


def _value_bytes(
    works: WorkCosts, cut: Cut, computed: _ComputedAgain
) -> tuple[Array, Array]:
    """Return the bytes of values that stages keep, each once, and of outputs."""
    table, count = works.table, cut.num_stages
    stages = np.array(cut.stages)
    homes, entered = table.homes_and_users(cut.stages)
    numbers, keepers = table.keeping[:, 0], stages[table.keeping[:, 1]]
    if "full" in cut.remat:
        is_full = np.array([remat == "full" for remat in cut.remat])
        values, users = table.uses.T
        again = is_full[entered] & (entered != homes[values])
        is_unread = again & table.are_unread & computed.is_last[users]
        if is_unread.any():
            codes = (table.num_works, 1)
            is_read = np.isin(table.uses @ codes, computed.read @ codes)
            again &= ~is_unread | is_read
        is_saved = ~is_full[keepers]
        numbers = np.concatenate((numbers[is_saved], values[again]))
        keepers = np.concatenate((keepers[is_saved], entered[again]))
    saved = _least_bytes(works, cut, numbers, keepers)
    outputs = np.zeros(count)
    for number in table.outputs:
        if homes[number] >= 0:
            outputs[homes[number]] += works.value_bytes[number]
    return saved, outputs


def _least_bytes(
    works: WorkCosts, cut: Cut, values: NDArray[np.int_], stages: NDArray[np.int_]
) -> Array:
    """Return the bytes that stages keep of values, each value once.

    A stage that makes views keeps them, or what they are views of if that is less.

    Args:
        works: The costs of works.
        cut: The stages.
        values: Values that are read later.
        stages: The stage that reads each of these.
    """
    table, count = works.table, cut.num_stages
    sizes = _kept_bytes(works, cut)
    keys = np.unique(values * count + stages)
    if not table.views:
        return _binned(keys % count, sizes[keys // count], count)
    least = np.zeros((len(sizes), count))
    least[keys // count, keys % count] = sizes[keys // count]
    are_read = least > 0
    parts = np.zeros_like(least)
    homes, _ = table.homes_and_users(cut.stages)
    for views in table.views:
        makers, wholes = homes[views], table.wholes[views]
        np.add.at(parts, (wholes, makers), least[views, makers])
        least[views, makers] = 0
        whole = np.where(are_read[wholes], np.inf, parts[wholes])
        whole = np.minimum(whole, sizes[wholes, None])
        least[wholes] = np.where(parts[wholes] > 0, whole, least[wholes])
    found: Array = least.sum(0)
    return found


def _kept_bytes(works: WorkCosts, cut: Cut) -> Array:
    """Return the bytes of each value: those that stages send are whole."""
    if works.by_rules is None or works.strategy.model == 1:
        return works.value_bytes
    table = works.table
    homes, entered = table.homes_and_users(cut.stages)
    found = works.inner_bytes.copy()
    sent = table.uses[entered != homes[table.uses[:, 0]], 0]
    whole = np.concatenate((sent, np.array(table.outputs, dtype=int)))
    found[whole] = works.value_bytes[whole]
    return found


def _rank_bytes(held: _Held, order: PlannedOrder) -> NDArray[np.int_]:
    """Return the bytes of a device of each rank at the peak of its saved values."""
    stages, has, live, waiting, both = order.live_table
    own, each = np.arange(len(stages)), stages[:, None, :]
    saved = (live * held.saved[each]).sum(2)
    kept = (live * held.outputs[each]).sum(2)
    passed = (waiting * held.passed[each] - both * held.late[each]).sum(2)
    most = (saved + passed + kept).argmax(1)
    parts = (
        (held.parameters[stages] * has).sum(1),
        (held.gradients[stages] * has).sum(1),
        (held.optimizer[stages] * has).sum(1),
        saved[own, most],
        passed[own, most],
        kept[own, most],
        (held.temporary[stages] * has).max(1),
    )
    found: NDArray[np.int_] = np.rint(np.stack(parts, 1)).astype(int)
    return found


def renumbered(
    labels: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[int, ...] | None:
    """Number stages by data flow, None if they use each other in a circle.

    Of the stages that may come next, the one with the lowest present number does.

    Args:
        labels: Any label of each work's stage.
        edges: Edges between works.
    """
    pairs = {(labels[p], labels[c]) for p, c in edges if labels[p] != labels[c]}
    count = len(set(labels))
    if max(labels) == count - 1 and all(first < second for first, second in pairs):
        return tuple(labels)
    needs = Counter(consumer for _, consumer in pairs)
    users: dict[int, list[int]] = {}
    for producer, consumer in pairs:
        users.setdefault(producer, []).append(consumer)
    free = sorted({*labels} - set(needs))
    numbers: dict[int, int] = {}
    while free:
        label = free.pop(0)
        numbers[label] = len(numbers)
        for consumer in users.get(label, ()):
            needs[consumer] -= 1
            if not needs[consumer]:
                free.append(consumer)
        free.sort()
    if len(numbers) < count:
        return None
    return tuple(numbers[label] for label in labels)


def with_remat(cut: Cut, remat: Mapping[int, str]) -> Cut:
    """Return the cut with another choice for some stages."""
    changed = tuple(remat.get(stage, old) for stage, old in enumerate(cut.remat))
    return replace(cut, remat=changed)

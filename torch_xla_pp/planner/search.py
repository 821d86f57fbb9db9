"""Search for the plan with the shortest step that fits.

All settings are tried in the order of an estimate: a step of perfectly balanced stages.
For each, orders of works are cut into runs, and branches into stages of their own; what
is found is evaluated with its true edges. The best cuts are then improved by moves.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from torch_xla_pp.planner.branch_search import BranchCuts, BranchTables, absorbed
from torch_xla_pp.planner.evaluation import (
    Cut,
    Evaluation,
    Evaluator,
    Setting,
    renumbered,
)
from torch_xla_pp.planner.given_stages import given_cut
from torch_xla_pp.planner.linear_orders import Order, linear_orders
from torch_xla_pp.planner.listed_search import ListedCandidates, stand_in
from torch_xla_pp.planner.moves import (
    SMALL,
    estimated_s,
    moved_from,
    num_actions_of,
)
from torch_xla_pp.planner.orders import LISTED, SPLIT
from torch_xla_pp.planner.runs_search import Division, OrderRuns, RunCuts, RunTables
from torch_xla_pp.planner.sequence_cuts import SequenceCuts, balanced_on_ranks
from torch_xla_pp.planner.settings import Request, settings_for
from torch_xla_pp.planner.work_tree import WorkTree, tree_of

# How far an estimate may be above the best step: for settings, and for cuts, which cost
# little to evaluate in small graphs.
_SLACK = 1.05
_SLACK_OF_CUTS = 1.02
_SLACK_OF_SMALL = 1.3
# The least share of the average of live microbatches that a plan holds, as heavy stages
# may be those with few microbatches.
_SURE = 0.8
_FEW_STAGES = 8
_NUM_STARTS = 5
# A bound on the actions of all cuts that moves lead to, instead of a time limit.
_MOVED = 400_000


@dataclass(kw_only=True, eq=False)
class SearchResult:
    """The result of a search.

    Args:
        best: The best evaluation of each setting that was tried.
        starts: The best evaluations, from which moves begin.
        num_settings: Number of settings.
        num_pruned: How many of them were not tried.
        num_evaluated: Number of cuts that were evaluated.
    """

    best: dict[Setting, Evaluation] = field(default_factory=dict)
    starts: list[Evaluation] = field(default_factory=list)
    num_settings: int = 0
    num_pruned: int = 0
    num_evaluated: int = 0

    @property
    def ranking(self) -> list[Evaluation]:
        """The best of each setting, the best of all first."""
        return sorted(self.best.values(), key=lambda found: found.sort_key)

    def add(self, found: Evaluation, *, is_asked: bool = True) -> None:
        """Note an evaluation; one that was not requested is only a start of moves."""
        self.num_evaluated += 1
        self.starts.append(found)
        if len(self.starts) > 4 * _NUM_STARTS:
            self._keep_best_starts()
        if not is_asked:
            return
        old = self.best.get(found.cut.setting)
        if old is None or found.sort_key < old.sort_key:
            self.best[found.cut.setting] = found

    def take_starts(self) -> list[Evaluation]:
        """Return the starts of moves, and forget them."""
        self._keep_best_starts()
        taken, self.starts = self.starts, []
        return taken

    def _keep_best_starts(self) -> None:
        self.starts = sorted(self.starts, key=lambda e: e.sort_key)[:_NUM_STARTS]


def search(
    request: Request,
    evaluator: Evaluator,
    allowed: Callable[[Setting], bool] = lambda setting: True,
    *,
    has_moves: bool = True,
) -> SearchResult:
    """Return the best cuts of all settings that may be the best.

    Args:
        request: The request.
        evaluator: Evaluates cuts.
        allowed: Which of the settings to try.
        has_moves: Whether the full planner improves the best cuts.

    Raises:
        ValueError: No setting is possible.
    """
    cutter = _Cutter(request, evaluator)
    settings = [*filter(allowed, settings_for(request, evaluator))]
    asked = {*settings}
    estimates: dict[Setting, list[float]] = {}
    for setting in settings:
        seconds = estimates.setdefault(stand_in(setting), [])
        seconds.append(cutter.balanced_s(setting))
    ordered = sorted(estimates, key=lambda own: (min(estimates[own]), own.rows))
    found = SearchResult(num_settings=len(asked))
    candidates = ListedCandidates(evaluator, asked)
    limit_s = np.inf
    is_small = evaluator.table.num_works <= SMALL
    slack = _SLACK_OF_SMALL if is_small else _SLACK_OF_CUTS
    for setting in ordered:
        if min(estimates[setting]) > _SLACK * limit_s or (
            limit_s < np.inf and not cutter.may_fit(setting)
        ):
            found.num_pruned += len(estimates[setting])
            continue
        for cut in cutter.cuts(setting, limit_s < np.inf):
            if estimated_s(evaluator, cut) > slack * limit_s:
                continue
            evaluation = evaluator.evaluate(cut)
            candidates.add(evaluation)
            found.add(evaluation, is_asked=setting in asked)
            if evaluation.fits:
                limit_s = min(limit_s, evaluation.step_s)
    has_moves = has_moves and request.planner == "full"
    if has_moves:
        left = _MOVED
        for start in found.take_starts():
            if request.stages is not None:
                better = given_cut(evaluator, start, request.remat)
            else:
                num_actions = num_actions_of(start.cut)
                better, num_tried = moved_from(
                    evaluator, start, request.remat, left // num_actions
                )
                left -= num_tried * num_actions
            candidates.add(better)
            found.add(better, is_asked=better.cut.setting in asked)
    for evaluation in candidates.best(request, has_moves=has_moves):
        found.add(evaluation)
    return found


class _Cutter:
    """A maker of cuts for one setting after another, which caches what they share."""

    def __init__(self, request: Request, evaluator: Evaluator) -> None:
        self._request = request
        self._evaluator = evaluator
        own, kept = request.remat, evaluator.tables
        self._divisions: dict[object, RunCuts] = kept(("cuts", own))
        self._tables: dict[object, RunTables] = kept(("runs", own))
        self._branches: dict[object, BranchTables] = kept(("branches", own))
        self._cuts_of_branches: dict[object, BranchCuts] = kept(("branch cuts", own))
        self._grown: dict[object, list[Division]] = kept(("grown", own))
        self._runs: dict[object, OrderRuns] = kept("orders' runs")
        self._trees: dict[object, WorkTree] = kept("trees")
        self._orders: dict[object, tuple[Order, ...]] = kept("orders")
        self._sums: dict[object, _Totals] = kept("sums")
        self._final: dict[object, float] = kept("final seconds")
        sequences = kept(("sequences", own))
        if not sequences:
            sequences[own] = SequenceCuts(evaluator, own, self._runs_of)
        self._sequences: SequenceCuts = sequences[own]

    def balanced_s(self, setting: Setting) -> float:
        """Estimate a step of stages that all take equally long.

        If memory does not suffice, even that of all ranks together, as few values as
        necessary are computed again.
        """
        if setting.strategies:
            return balanced_on_ranks(self._evaluator, setting)
        totals = self._totals(setting)
        total, late = totals.seconds, totals.weight_s
        ranks, per_rank = setting.num_ranks, setting.stages_per_rank
        action_s = self._evaluator.cluster.device.action_s
        load = total / ranks + 2 * per_rank * action_s
        fill = max(0.0, totals.path_s - total / ranks) * (1 - 1 / ranks)
        if setting.schedule in SPLIT:
            fill *= max(0.0, 1 - 2 * late / total) if total else 0.0
        if setting.schedule == "zbv":
            fill /= 2
        share = min(1.0, self._share_too_many(setting, totals))
        load += share * totals.forward_s / ranks
        final = self._final_s(setting) / ranks
        return setting.num_microbatches * load + fill / per_rank + final

    def may_fit(self, setting: Setting) -> bool:
        """Return whether all stages together fit the memory of all ranks together."""
        if setting.strategies:
            return True  # That is not known before stages are on ranks.
        most = 1.0 if "full" in self._request.remat else 0.0
        return self._share_too_many(setting, self._totals(setting)) <= most

    def _share_too_many(self, setting: Setting, totals: "_Totals") -> float:
        """Return the share of all saved values that would have to be computed again.

        It is above 1 if not even the state fits.
        """
        capacity = self._evaluator.cluster.capacity_bytes * setting.num_ranks
        lives = self._lives(setting)
        saved = _SURE * totals.saved_bytes * sum(lives) / len(lives)
        lacking = totals.state_bytes + saved - capacity
        if lacking <= 0:
            return 0.0
        return lacking / saved if saved else np.inf

    def cuts(self, setting: Setting, has_fit: bool = False) -> Iterator[Cut]:
        """Yield cuts that may be good for a setting.

        Args:
            setting: The setting.
            has_fit: Whether a plan that fits is known, so that fewer cuts are tried.
        """
        if setting.strategies:
            yield from self._on_sequences(setting, has_fit)
            return
        if self._request.stages is not None:
            for choice in self._request.remat:
                yield Cut(
                    setting=setting,
                    stages=self._request.stages,
                    remat=(choice,) * setting.num_stages,
                )
            return
        edges = self._evaluator.table.graph.edges
        seen = set()
        for division in self._found(setting, has_fit):
            numbers = renumbered(division.stages, edges)
            if numbers is None:
                continue
            places = dict(zip(numbers, division.stages, strict=True))
            remat = tuple(division.remat[places[n]] for n in range(len(places)))
            cut = Cut(setting=setting, stages=numbers, remat=remat)
            if (cut.stages, cut.remat) not in seen:
                seen.add((cut.stages, cut.remat))
                yield cut

    def _on_sequences(self, setting: Setting, has_fit: bool) -> Iterator[Cut]:
        """Yield cuts for ranks that differ."""
        if self._request.stages is not None:
            yield from self._sequences.given(setting, self._request.stages)
            return
        lives = self._lives(setting)
        lives += lives[-1:] * (setting.num_stages - len(lives))
        orders = self._orders_of(setting)
        is_large = setting.num_stages > _FEW_STAGES or len(orders[0]) > SMALL
        yield from self._sequences.cuts(
            setting, lives, orders, has_least=not (has_fit and is_large)
        )

    def _found(self, setting: Setting, has_fit: bool) -> Iterator[Division]:
        count = setting.num_stages
        planner = self._request.planner
        lives = self._lives(setting)
        capacity = self._evaluator.cluster.capacity_bytes / setting.stages_per_rank
        if planner in ("full", "spp", "pipedream"):
            if planner == "pipedream":
                capacity = np.inf
            for order in self._orders_of(setting):
                if planner != "full" and order != tuple(range(len(order))):
                    continue
                # If memory is a constraint, also begin from the cut that holds least.
                bounds = [capacity, None] if np.isfinite(capacity) else [capacity]
                if has_fit and (count > _FEW_STAGES or len(order) > SMALL):
                    bounds = [capacity]
                for bound in bounds:
                    division = self._division(setting, order, lives, bound)
                    if division is not None:
                        yield division
                        if count > _FEW_STAGES:
                            break
                    if self._has_room(setting, order, lives, capacity):
                        break
        if planner in ("full", "graphpipe") and setting.stages_per_rank == 1:
            yield from self._branched(setting, lives, capacity)

    def _division(
        self,
        setting: Setting,
        order: Order,
        lives: tuple[float, ...],
        capacity: float | None,
    ) -> Division | None:
        """Cut an order; results for several settings are cached."""
        remat, count = self._request.remat, setting.num_stages
        key = setting.strategy, setting.rows, order
        if key not in self._tables:
            works = self._evaluator.works(setting.strategy, setting.rows)
            self._tables[key] = RunTables(self._runs_of(order), works, remat)
        if capacity is not None:
            # Runs that are the best of all and fit are the best of those that fit.
            free = self._run_cuts(key, (1.0,), np.inf)
            division = free.division(count)
            if division is None or free.fit(count, lives, capacity):
                return division
        return self._run_cuts(key, lives, capacity).division(count)

    def _run_cuts(
        self, key: object, lives: tuple[float, ...], capacity: float | None
    ) -> RunCuts:
        whole = key, lives, capacity
        if whole not in self._divisions:
            self._divisions[whole] = RunCuts(self._tables[key], lives, capacity)
        return self._divisions[whole]

    def _has_room(
        self,
        setting: Setting,
        order: Order,
        lives: tuple[float, ...],
        capacity: float,
    ) -> bool:
        """Return whether memory rules out no run of an order."""
        tables = self._tables[setting.strategy, setting.rows, order]
        return tables.fits(max(lives), capacity)

    def _branched(
        self, setting: Setting, lives: tuple[float, ...], capacity: float
    ) -> Iterator[Division]:
        """Cut the tree of works; results for several settings are cached."""
        tree = self._tree_of(setting)
        if not tree.has_branches and self._request.planner == "full":
            return
        key = setting.strategy, setting.rows
        if key not in self._branches:
            works = self._evaluator.works(setting.strategy, setting.rows)
            runs = self._runs_of(tree.works)
            tables = BranchTables(tree, runs, works, self._request.remat)
            self._branches[key] = tables
        count, has_branches = setting.num_ranks, tree.has_branches
        lives = (*lives, lives[-1] + 1)
        # Stages that are the best of all and fit are the best of those that fit.
        cuts, bound = self._branch_cuts(key, count + has_branches, None), None
        counts = (count, count + 1) if has_branches else (count,)
        if not all(cuts.fit(number, lives, capacity) for number in counts):
            bound = lives, capacity
            cuts = self._branch_cuts(key, count + has_branches, bound)
        whole = key, count, bound
        if whole not in self._grown:
            self._grown[whole] = self._grow(setting, cuts, has_branches)
        yield from self._grown[whole]

    def _branch_cuts(
        self,
        key: object,
        most_ranks: int,
        bound: tuple[tuple[float, ...], float] | None,
    ) -> BranchCuts:
        """Return the tables of a tree for as many ranks or more, with a bound or none.

        Depths do not matter without a bound, so that the same serve for fewer ranks.
        """
        whole = key, bound
        known = self._cuts_of_branches.get(whole)
        if known is None or known.most_ranks < most_ranks:
            lives, capacity = bound or ((1.0,), np.inf)
            known = BranchCuts(self._branches[key], most_ranks, lives, capacity)
            self._cuts_of_branches[whole] = known
        return known

    def _grow(
        self, setting: Setting, cuts: BranchCuts, has_branches: bool
    ) -> list[Division]:
        """Cut the tree, also into one stage more, two of which are then joined."""
        count = setting.num_ranks
        found = cuts.divisions(count)
        if has_branches:
            loads = self._weights(setting)
            edges = self._evaluator.table.graph.edges
            for division in cuts.divisions(count + 1):
                found += absorbed(division, edges, loads)
        return found

    def _runs_of(self, order: Order) -> OrderRuns:
        if order not in self._runs:
            self._runs[order] = OrderRuns(order, self._evaluator.table)
        return self._runs[order]

    def _tree_of(self, setting: Setting) -> WorkTree:
        key = setting.strategy
        if key not in self._trees:
            ancestors = self._evaluator.table.graph.ancestors
            self._trees[key] = tree_of(ancestors, self._weights(setting))
        return self._trees[key]

    def _weights(self, setting: Setting) -> list[float]:
        """Return the time of each work."""
        works = self._evaluator.works(setting.strategy, setting.rows)
        forward, inputs, weights = works.seconds
        found: list[float] = (forward + inputs + weights).tolist()
        return found

    def _lives(self, setting: Setting) -> tuple[float, ...]:
        """Return the live microbatches with 1, 2, … stages to the end."""
        stages, count = setting.num_stages, setting.num_microbatches
        ranks, per_rank = setting.num_ranks, setting.stages_per_rank
        if setting.schedule == LISTED:
            stages = ranks  # It may hold as many as 1F1B at most.
        if setting.schedule in ("1f1b", "dag", LISTED):
            return tuple(float(min(f, count)) for f in range(1, stages + 1))
        live = {
            "gpipe": float(count),
            "zb1p": float(ranks),
            "zbv": float(ranks),
            "interleaved": ((per_rank - 1) * ranks + 2 * ranks) / per_rank,
        }[setting.schedule]
        return (min(live, float(count)),) * stages

    def _orders_of(self, setting: Setting) -> tuple[Order, ...]:
        key = setting.strategy
        if key not in self._orders:
            edges = self._evaluator.table.graph.edges
            self._orders[key] = linear_orders(edges, self._weights(setting))
        return self._orders[key]

    def _totals(self, setting: Setting) -> "_Totals":
        key = setting.strategy, setting.rows
        if key not in self._sums:
            works = self._evaluator.works(setting.strategy, setting.rows)
            forward, inputs, weights = works.seconds
            kept = works.value_bytes[works.table.kept_values].sum()
            again = works.saved["full"].sum()
            state = works.parameter_bytes.sum() * (2 + works.optimizer_bytes)
            self._sums[key] = _Totals(
                seconds=float((forward + inputs + weights).sum()),
                path_s=works.longest_path_s(False),
                forward_s=float(forward.sum()),
                weight_s=float(weights.sum()),
                state_bytes=float(state),
                saved_bytes=float(works.saved["none"].sum() + kept - again),
            )
        return self._sums[key]

    def _final_s(self, setting: Setting) -> float:
        """Return the time of all works at the end of a step, whatever the rows."""
        key = setting.strategy, setting.replicas
        if key not in self._final:
            works = self._evaluator.works(setting.strategy, setting.rows)
            self._final[key] = float(works.final_s(setting.replicas).sum())
        return self._final[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Totals:
    """The time and memory of all works together.

    Args:
        seconds: F, I and W of a microbatch.
        path_s: The same along the longest path.
        forward_s: F alone.
        weight_s: W alone.
        state_bytes: Parameters, gradients and the optimizer's state on a device.
        saved_bytes: The bytes of a microbatch that remat does not keep.
    """

    seconds: float
    path_s: float
    forward_s: float
    weight_s: float
    state_bytes: float
    saved_bytes: float


def balanced_seconds(evaluator: Evaluator, setting: Setting) -> float:
    """Estimate a step of stages that all take equally long."""
    request = Request(rows=setting.rows)
    return _Cutter(request, evaluator).balanced_s(setting)


def best_of(found: SearchResult) -> Evaluation:
    """Return the best evaluation, whether it fits or not."""
    return found.ranking[0]

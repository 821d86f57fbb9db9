"""Plans whose order of actions is listed: made for the times of their stages.

Making such an order takes several times as long as evaluating a cached one, so that
cuts are found with the orders of builders; the most promising ones then get orders of
their own, and moves begin from the best.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from heapq import nsmallest

from torch_xla_pp.planner.evaluation import Cut, Evaluation, Evaluator, Setting
from torch_xla_pp.planner.moves import estimated_s, moved_from, num_actions_of
from torch_xla_pp.planner.orders import FEWEST_RULES, LIST_RULES, LISTED, takes
from torch_xla_pp.planner.settings import Request

# Numbers of actions: bounds that do not depend on a clock.
_SCREENED = 20_000
_RULED = 80_000
_MOVED = 40_000
_MOST_STARTS = 4
# Cuts that are tried with several rules as they are the best with builders.
_SUREST = 5


def stand_in(setting: Setting) -> Setting:
    """Return the setting whose order is used to find cuts for a listed order."""
    if setting.schedule != LISTED:
        return setting
    if setting.stages_per_rank > 1:
        return replace(setting, schedule="interleaved")
    is_possible = takes("zb1p", setting.num_ranks, setting.num_microbatches)
    return replace(setting, schedule="zb1p" if is_possible else "dag")


class ListedCandidates:
    """Candidates of cuts that may be good with an order of their own.

    Args:
        evaluator: Evaluates cuts.
        asked: The settings that are allowed.
    """

    def __init__(self, evaluator: Evaluator, asked: Set[Setting]) -> None:
        self._evaluator = evaluator
        self._asked = asked
        # Cut → its evaluation with a builder's order.
        self._found: dict[Cut, tuple[int, float, float]] = {}

    def add(self, evaluation: Evaluation) -> None:
        """Note a cut, if its setting with a listed order is allowed."""
        cut = evaluation.cut
        setting = replace(cut.setting, schedule=LISTED)
        if setting in self._asked:
            listed = replace(cut, setting=setting, placement=cut.ranks)
            key = evaluation.sort_key
            self._found[listed] = min(key, self._found.get(listed, key))

    def best(self, request: Request, *, has_moves: bool) -> Iterator[Evaluation]:
        """Yield the best of them with orders of their own, and what moves lead to.

        Args:
            request: The request.
            has_moves: Whether to move from them.
        """
        tried = [self._evaluator.evaluate(cut, LIST_RULES[:1]) for cut in self._some()]
        yield from tried
        cuts = dict.fromkeys(
            [*self._surest(), *(found.cut for found in _best_of_settings(tried))]
        )
        starts = [self._ruled(cut) for cut in cuts]
        yield from starts
        if has_moves and request.stages is None:
            left = _MOVED
            for start in _best_of_settings(starts):
                most = left // (2 * num_actions_of(start.cut))
                moved, num_tried = moved_from(
                    self._evaluator, start, request.remat, most
                )
                left -= 2 * num_tried * num_actions_of(start.cut)
                yield moved
                yield self._ruled(moved.cut)

    def _ruled(self, cut: Cut) -> Evaluation:
        """Evaluate with as many rules as the bound allows."""
        share = _RULED // (2 * _MOST_STARTS * num_actions_of(cut))
        count = max(FEWEST_RULES, share)
        return self._evaluator.evaluate(cut, LIST_RULES[:count])

    def _surest(self) -> list[Cut]:
        """Return the cuts that are best with builders, two if they are long."""
        found = self._found
        best = nsmallest(_SUREST, found, key=lambda cut: (found[cut], cut.stages))
        long = [cut for cut in best if FEWEST_RULES * num_actions_of(cut) > _RULED]
        return best[:2] if long else best

    def _some(self) -> Iterator[Cut]:
        """Yield the most promising cuts, as many as the bound allows."""
        left = _SCREENED
        estimates = {cut: estimated_s(self._evaluator, cut) for cut in self._found}
        for cut in sorted(estimates, key=lambda cut: (estimates[cut], cut.stages)):
            left -= num_actions_of(cut)
            if left < 0:
                break
            yield cut


def _best_of_settings(found: Iterable[Evaluation]) -> list[Evaluation]:
    """Return the best evaluations, one for each setting."""
    best: dict[Setting, Evaluation] = {}
    for evaluation in sorted(found, key=lambda e: e.sort_key):
        best.setdefault(evaluation.cut.setting, evaluation)
    return [*best.values()][:_MOST_STARTS]

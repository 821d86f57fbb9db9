"""Which actions of a rank may be one program, by the order of all actions.

See docs/design/031-adjacent-actions.md.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from torch_xla_pp.schedule import Schedule
from torch_xla_pp.simulate import Costs, edge_flows, step_seconds

_NO_ORDER = Schedule(actions=((),))


class JoinedActions:
    """What the order of actions says of one rank.

    Args:
        order: The actions of all ranks, None if they are not known.
        edges: Pairs of a stage and one that uses its values.
        rank: The rank.

    Attributes:
        inputs: The backwards of inputs.
        whole: Those that the backward of weights comes right after.
        last: The last action of a step, None if there is none.
    """

    def __init__(
        self,
        order: Schedule | None = None,
        edges: Iterable[tuple[int, int]] = (),
        rank: int = 0,
    ) -> None:
        if order is None:
            order, rank = _NO_ORDER, 0
        self._order, self._edges, self._rank = order, tuple(edges), rank
        row = order.actions[rank]
        self.inputs = frozenset(action for action in row if action.kind == "I")
        self.whole = order.whole_backwards(rank)
        self.last = next(reversed(row), None)

    @cached_property
    def is_prompt(self) -> bool:
        """Return whether backwards of the last stage may come with their forwards.

        The stage is one of this rank then. They wait for no other rank. Others may wait
        for what the order has before them, so a step must not take longer if all
        forwards take the same time, and all backwards. It takes seconds for 100,000
        actions.
        """
        order, last = self._order, self._order.num_stages - 1
        if last not in order.stages_of(self._rank):
            return False
        prompt = order.with_backwards_at_once(last)
        if prompt == order:
            return True
        costs = replace(Costs.uniform(last + 1), flows=edge_flows(self._edges, 0))
        return step_seconds(prompt, costs) <= step_seconds(order, costs)

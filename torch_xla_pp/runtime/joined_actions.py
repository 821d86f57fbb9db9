"""Which actions of a rank may be one program, by the order of all actions.

See docs/design/031-adjacent-actions.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch_xla_pp.schedule import Action, Schedule
from torch_xla_pp.simulate import Costs, edge_flows, step_seconds


@dataclass(frozen=True, kw_only=True)
class JoinedActions:
    """What the order of actions says of one rank.

    Attributes:
        is_prompt: Whether the backwards of the last stage may run at once with its
            forwards, wherever the order has them.
        inputs: The backwards of inputs.
        whole: Those that the backward of weights comes right after.
        last: The last action of a step, None if there is none.
    """

    is_prompt: bool = False
    inputs: frozenset[Action] = frozenset()
    whole: frozenset[Action] = frozenset()
    last: Action | None = None

    @classmethod
    def of(
        cls, order: Schedule | None, edges: Iterable[tuple[int, int]], rank: int
    ) -> "JoinedActions":
        """Return them.

        Args:
            order: The actions of all ranks, None if they are not known.
            edges: Pairs of a stage and one that uses its values.
            rank: The rank.
        """
        if order is None:
            return cls()
        row = order.actions[rank]
        return cls(
            is_prompt=order.num_stages - 1 in order.stages_of(rank)
            and _may_be_prompt(order, edges),
            inputs=frozenset(action for action in row if action.kind == "I"),
            whole=order.whole_backwards(rank),
            last=row[-1] if row else None,
        )


def _may_be_prompt(order: Schedule, edges: Iterable[tuple[int, int]]) -> bool:
    """Return whether the backwards of the last stage may come with its forwards.

    They wait for no other rank. Others may wait for what the order has before them, so
    a step must not take longer if all forwards take the same time, and all backwards.
    """
    prompt = order.with_backwards_at_once(order.num_stages - 1)
    if prompt == order:
        return True
    costs = replace(Costs.uniform(order.num_stages), flows=edge_flows(edges, 0))
    return step_seconds(prompt, costs) <= step_seconds(order, costs)

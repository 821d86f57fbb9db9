"""The values that stages send each other, and when in an action they are there."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Self

import numpy as np
from numpy.typing import NDArray

from torch_xla_pp.planner.work_costs import Array, WorkCosts
from torch_xla_pp.simulate import Flow


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class WorkParts:
    """When in an action of its stage a work has run.

    Args:
        forward: The part of F after which each work's values are there.
        backward: The part of B or I after which the gradients are of what it uses.
    """

    forward: Sequence[float]
    backward: Sequence[float]

    @classmethod
    def at_ends(cls, num_works: int) -> Self:
        """Return those of programs that send at their end."""
        return cls(forward=(1.0,) * num_works, backward=(1.0,) * num_works)

    @classmethod
    def in_order(
        cls,
        stages: NDArray[np.int_],
        forward_s: Array,
        backward_s: Array,
        *,
        action_s: float,
        again_s: Array,
    ) -> Self:
        """Return those of programs that run works in their order, and backwards.

        Args:
            stages: The stage of each work.
            forward_s: The time of each work in F.
            backward_s: The time of each work in B or I, whichever sends gradients.
            action_s: The time to start a program.
            again_s: The time for which each stage computes again at first in B or I.
        """
        before_s = np.full(len(again_s), action_s)
        backward = _parts(stages[::-1], backward_s[::-1], before_s + again_s)[::-1]
        return cls(forward=_parts(stages, forward_s, before_s), backward=backward)


def _parts(
    stages: NDArray[np.int_], seconds: Array, before_s: Array
) -> Sequence[float]:
    """Return the parts of actions after which their works have run, one by one."""
    order = np.argsort(stages, kind="stable")
    sums = np.cumsum(seconds[order])
    counts = np.bincount(stages, minlength=len(before_s))
    ends = np.cumsum(counts)
    starts_s = np.concatenate(((0.0,), sums))[ends - counts]
    whole_s = before_s + np.concatenate(((0.0,), sums))[ends] - starts_s
    own = stages[order]
    done_s = before_s[own] + sums - starts_s[own]
    done_s[ends[counts > 0] - 1] = whole_s[counts > 0]
    found = np.ones(len(stages))
    is_timed = whole_s[own] > 0
    found[order[is_timed]] = done_s[is_timed] / whole_s[own][is_timed]
    parts: list[float] = np.minimum(found, 1.0).tolist()
    return parts


def flows_of(
    works: WorkCosts,
    stages: Sequence[int],
    *,
    has_own_inputs: bool,
    parts: WorkParts,
) -> tuple[Flow, ...]:
    """Return the flows between stages; values with the same stages go together.

    Args:
        works: The costs of works.
        stages: The stage of each work.
        has_own_inputs: Whether stages take the model's inputs on their own rank.
        parts: When works have run.
    """
    table = works.table
    homes, entered = table.homes_and_users(stages)
    keys: dict[tuple[int, tuple[int, ...], bool], _Joined] = {}
    crossing = np.unique(table.uses[entered != homes[table.uses[:, 0]], 0])
    sizes, have_gradients = works.message_sizes, table.have_gradients.tolist()
    for number in crossing.tolist():
        producer = table.producers[number]
        if producer < 0 and has_own_inputs:
            continue
        home = 0 if producer < 0 else stages[producer]
        firsts = {stages[user]: user for user in table.last_users[number]}
        firsts.pop(home, None)
        if not firsts:
            continue
        consumers = tuple(sorted(firsts))
        key = home, consumers, producer >= 0 and have_gradients[number]
        made_at = 1.0 if producer < 0 else parts.forward[producer]
        times = [made_at, *(parts.backward[firsts[stage]] for stage in consumers)]
        if key in keys:
            joined = keys[key]
            joined.num_bytes += sizes[number]
            joined.times = [*map(max, times, joined.times)]
        else:
            keys[key] = _Joined(sizes[number], times)
    return tuple(
        _flow(key, joined.num_bytes, joined.times)
        for key, joined in sorted(keys.items(), key=itemgetter(0))
    )


@dataclass(slots=True)
class _Joined:
    """Bytes of values with the same stages, and when these and gradients are made."""

    num_bytes: int
    times: Sequence[float]


def _flow(
    key: tuple[int, tuple[int, ...], bool], num_bytes: int, times: Sequence[float]
) -> Flow:
    producer, consumers, has_gradient = key
    made_at, *graded_at = times
    is_early = has_gradient and min(graded_at) < 1
    return Flow(
        producer=producer,
        consumers=consumers,
        num_bytes=num_bytes,
        has_gradient=has_gradient,
        made_at=made_at,
        graded_at=tuple(graded_at) if is_early else (),
    )

"""Schedules in which stage k is on rank k modulo the number of ranks."""

from collections.abc import Callable, Sequence

from torch_xla_pp.schedule.action import Action, Kind
from torch_xla_pp.schedule.builders.counts import check_counts
from torch_xla_pp.schedule.schedule import Schedule

_Work = tuple[int, int]  # stage and microbatch


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run all forwards, then all backwards, both in the order of microbatches.

    A rank holds the saved values of all microbatches.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using
    Pipeline Parallelism", NeurIPS 2019, section 2.2.

    Raises:
        ValueError: A count is below one.
    """
    check_counts("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return _looped(num_ranks, num_microbatches, lambda _: num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Alternate forwards and backwards as soon as the first gradient is back.

    Rank r holds the saved values of at most `num_ranks - r` microbatches.

    Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML
    2021, section 3.2 (PipeDream-Flush).

    Raises:
        ValueError: A count is below one.
    """
    check_counts("one_f_one_b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    return _looped(num_ranks, num_microbatches, lambda rank: num_ranks - 1 - rank)


def interleaved_1f1b(
    num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Schedule:
    """Alternate forwards and backwards, with several stages on each rank.

    Microbatches go in rounds of about `num_ranks`: a round passes a rank's first
    stage, then its second, and so on. The bubble is `stages_per_rank` times smaller
    than that of `one_f_one_b`.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", SC 2021, section 2.2; rounds as in
    torch.distributed.pipelining, which also takes numbers of microbatches that are
    no multiple of the number of ranks.

    Raises:
        ValueError: A count is below one, or the microbatches do not make equal rounds.
    """
    round_size = _round_size(
        "interleaved_1f1b", num_ranks, num_microbatches, stages_per_rank
    )
    first_stages = (stages_per_rank - 1) * round_size
    return _looped(
        num_ranks,
        num_microbatches,
        lambda rank: first_stages + 2 * (num_ranks - 1 - rank),
        stages_per_rank,
        round_size,
    )


def zb1p(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Fill the bubble of 1F1B with the gradients of weights.

    Rank r delays those by r microbatches, and so holds saved values of `num_ranks`
    microbatches, as many as rank 0 of 1F1B. The bubble is a third of 1F1B's if F, I and
    W take equally long.

    Source: Qi et al., "Zero Bubble (Almost) Pipeline Parallelism", ICLR 2024, section
    2.1 (ZB-H1, also called ZB1P); several stages on a rank, and rounds, as in
    torch.distributed.pipelining.

    Raises:
        ValueError: A count is below one, or the microbatches do not make equal rounds.
    """
    round_size = _round_size("zb1p", num_ranks, num_microbatches, stages_per_rank)
    first_stages = (stages_per_rank - 1) * round_size
    return _looped(
        num_ranks,
        num_microbatches,
        lambda rank: first_stages + num_ranks - 1 - rank,
        stages_per_rank,
        round_size,
        is_split=True,
    )


def _looped(
    num_ranks: int,
    num_microbatches: int,
    warmup_of: Callable[[int], int],
    stages_per_rank: int = 1,
    round_size: int = 1,
    *,
    is_split: bool = False,
) -> Schedule:
    """Weave the forwards and backwards of every rank's stages, see `_woven`.

    Args:
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        warmup_of: Rank → number of its forwards before the first pair.
        stages_per_rank: Number of stages on each rank.
        round_size: Microbatches in a round; not used for one stage per rank.
        is_split: Whether backwards are split; rank r then delays W by r backwards.
    """
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = _in_rounds(stages, num_microbatches, round_size)
        backwards = _in_rounds(stages[::-1], num_microbatches, round_size)
        weights_late = rank if is_split else None
        rows.append(_woven(forwards, backwards, warmup_of(rank), weights_late))
    return Schedule(actions=tuple(rows))


def _woven(
    forwards: Sequence[_Work],
    backwards: Sequence[_Work],
    warmup: int,
    weights_late: int | None = None,
) -> tuple[Action, ...]:
    """Run `warmup` forwards, then forward and backward in turn, then the rest.

    Args:
        forwards: Stage and microbatch of each forward.
        backwards: The same of each backward.
        warmup: Number of forwards before the first pair.
        weights_late: If given, backwards are split, and each W comes this many
            backwards after its I.
    """
    row = [_action("F", work) for work in forwards[:warmup]]
    for number, work in enumerate(backwards):
        if warmup + number < len(forwards):
            row.append(_action("F", forwards[warmup + number]))
        if weights_late is None:
            row.append(_action("B", work))
            continue
        row.append(_action("I", work))
        if number >= weights_late:
            row.append(_action("W", backwards[number - weights_late]))
    if weights_late is not None:
        left = max(0, len(backwards) - weights_late)
        row += [_action("W", work) for work in backwards[left:]]
    return tuple(row)


def _action(kind: Kind, work: _Work) -> Action:
    return Action(stage=work[0], kind=kind, microbatch=work[1])


def _in_rounds(
    stages: Sequence[int], num_microbatches: int, round_size: int
) -> list[_Work]:
    """Let each round of microbatches pass all stages before the next begins."""
    return [
        (stage, microbatch)
        for first in range(0, num_microbatches, round_size)
        for stage in stages
        for microbatch in range(first, first + round_size)
    ]


def _round_size(
    builder: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> int:
    """Return how many microbatches a round has: as near to the ranks as possible."""
    check_counts(
        builder,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds:
        raise ValueError(
            f"{builder}: expected a multiple of the {num_rounds} rounds for "
            f"num_microbatches, got {num_microbatches}. With {num_ranks} ranks, take "
            f"e.g. {num_rounds * num_ranks}."
        )
    return num_microbatches // num_rounds

"""Check before the first step that a schedule can run to its end.

Every rank runs its actions in order; an action waits for the values that it needs,
while sending never waits. Such a schedule runs to its end exactly if the order of each
rank and the dependencies of the data have no cycle.

Laws:

* every stage runs for every microbatch F and B, or F, I and W, each once;
* all actions of a stage are on one rank, the one where it is placed;
* F comes before B or I, and I before W, of the same stage and microbatch;
* along an edge, the producer's F comes before the consumer's, and its B or I after;
* the last stage runs its forwards in the order of microbatches, since losses are
  listed in the order in which they are computed;
* a carrier's F comes before that of the stages that it receives a value for;
* no stage holds the saved values of more microbatches than it may.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch_xla_pp.schedule.edges import StagePair, check_edges
from torch_xla_pp.schedule.live import live_after
from torch_xla_pp.schedule.schedule import Schedule
from torch_xla_pp.schedule.verify.faults import Fault, refuse
from torch_xla_pp.schedule.verify.lookup import Lookup, first_places
from torch_xla_pp.schedule.verify.precedence import precedence_faults
from torch_xla_pp.schedule.verify.presence import (
    FORWARD_ONLY,
    TRAINING,
    placement_faults,
    presence_faults,
)


def verify(
    schedule: Schedule,
    edges: Iterable[StagePair],
    *,
    placement: Mapping[int, int] | None = None,
    num_microbatches: int | None = None,
    max_live: int | Mapping[int, int] | None = None,
    carriers: Iterable[StagePair] = (),
    forward_only: bool = False,
) -> None:
    """Refuse a schedule that breaks one of the laws above.

    Takes some seconds for 200,000 actions.

    Args:
        schedule: The schedule.
        edges: Pairs (producer, consumer) of stages.
        placement: Stage → rank; None for the schedule's own.
        num_microbatches: Number of microbatches; None for those of the schedule.
        max_live: How many microbatches' saved values a stage may hold: one number
            for all stages, or stage → number.
        carriers: Pairs (carrier, other) of stages on one rank that use the same
            value, which the carrier receives for both; see `carriers_of`.
        forward_only: Whether the schedule is for evaluation: only forwards.

    Raises:
        ScheduleError: Lists all faults; of cycles between ranks, one.
        ValueError: An edge does not lead to a higher stage.
    """
    edges, carriers = sorted(set(edges)), sorted(set(carriers))
    named = [*(placement or ()), *(consumer for _, consumer in edges)]
    if num_microbatches is None:
        num_microbatches = schedule.num_microbatches
    lookup = Lookup(
        schedule=schedule,
        at=first_places(schedule),
        num_stages=max([schedule.num_stages, *(stage + 1 for stage in named)]),
        num_microbatches=num_microbatches,
        placement=schedule.placement if placement is None else placement,
    )
    check_edges("verify", [*edges, *carriers], lookup.num_stages)
    faults = [
        *presence_faults(lookup, FORWARD_ONLY if forward_only else TRAINING),
        *placement_faults(lookup),
        *precedence_faults(lookup, edges, carriers),
        *_memory_faults(lookup, max_live),
    ]
    refuse(schedule, faults)


def _memory_faults(
    lookup: Lookup, max_live: int | Mapping[int, int] | None
) -> Iterator[Fault]:
    """Find stages with too many live microbatches; one fault a stage, the first."""
    if max_live is None:
        return
    seen = set()
    for rank, row in enumerate(lookup.schedule.actions):
        for step, (action, live) in enumerate(live_after(row)):
            stage = action.stage
            bound = max_live if isinstance(max_live, int) else max_live.get(stage, live)
            if live <= bound or stage in seen:
                continue
            seen.add(stage)
            yield Fault(
                text=f"rank {rank}, step {step}: {action}: expected at most {bound} "
                f"live microbatches in stage {stage}, got {live}. Run a backward "
                "first, or allow more.",
                rank=rank,
                step=step,
                action=action,
            )

"""The groups of ranks that a stage works with: its pipeline's, and its replicas'."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch.distributed as dist

from torch_xla_pp.errors import TransportError
from torch_xla_pp.transport.process_group import XlaPpProcessGroup


class LinkedGroups:
    """The groups through which errors reach all ranks that work with this one.

    Reports of one group are forwarded to the other, so that an error reaches all ranks
    of all replicas.

    Args:
        pipeline: The ranks of the pipeline.
        replicas: The ranks that run the stage in each replica, None if there is one.

    Attributes:
        groups: The groups, the pipeline's first.
        key: Equal for equal groups of this process.
        activity: The activity of this rank, for the texts of errors.
    """

    def __init__(
        self, pipeline: XlaPpProcessGroup, replicas: XlaPpProcessGroup | None
    ) -> None:
        self.groups = [pipeline] if replicas is None else [pipeline, replicas]
        self.key = tuple(map(id, self.groups))
        for group in self.groups:
            group.rendezvous.activity = self.activity = pipeline.rendezvous.activity
            for other in self.groups:
                group.rendezvous.link(other.rendezvous)

    def check(self) -> None:
        """Raise the error that another rank has reported, if there is one."""
        for group in self.groups:
            group.rendezvous.check()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block to the others."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.rendezvous.reporting())
            try:
                yield
            except TransportError as error:
                if len(self.groups) > 1:
                    error.add_note(_ranks_of(self.groups))
                raise


def end_step(linked: Iterable[LinkedGroups], *, is_training: bool) -> None:
    """Note the end of a step in groups; errors that were held may be raised then.

    Replicas need not evaluate as often as each other.

    Args:
        linked: The groups of the stages of a step.
        is_training: Whether it has backwards.
    """
    groups = (g for x in linked for g in x.groups[: None if is_training else 1])
    ended = list(dict.fromkeys(group.rendezvous for group in groups))
    for rendezvous in ended:
        rendezvous.end_step()
    for rendezvous in ended:
        rendezvous.tell_others()


def _ranks_of(groups: Sequence[XlaPpProcessGroup]) -> str:
    """Explain the numbers of ranks in errors about messages between ranks."""
    pipeline, replicas = map(dist.get_process_group_ranks, groups)
    return (
        "Messages count ranks within a group: those of gradient sums from a stage to "
        f"itself (S) within ranks {replicas} of the job, others within {pipeline}."
    )

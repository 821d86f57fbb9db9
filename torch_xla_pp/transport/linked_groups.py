"""The groups of ranks that a stage works with: its pipeline's, and its replicas'."""

import contextlib
from collections.abc import Iterator, Sequence

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
        key: Equal for equal groups of this process.
        activity: The activity of this rank, for the texts of errors.
    """

    def __init__(
        self, pipeline: XlaPpProcessGroup, replicas: XlaPpProcessGroup | None
    ) -> None:
        self._groups = [pipeline] if replicas is None else [pipeline, replicas]
        self.key = tuple(map(id, self._groups))
        self.activity = pipeline.rendezvous.activity
        for group in self._groups:
            group.rendezvous.share(self.activity)
            for other in self._groups:
                group.rendezvous.link(other.rendezvous)

    def check(self) -> None:
        """Raise the error that another rank has reported, if there is one."""
        for group in self._groups:
            group.rendezvous.check()

    def end_step(self) -> None:
        """Let errors be raised that were held until the step has ended."""
        for group in self._groups:
            group.rendezvous.end_step()

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that leaves the block to the others."""
        with contextlib.ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(group.rendezvous.reporting())
            try:
                yield
            except TransportError as error:
                if len(self._groups) > 1:
                    error.add_note(_ranks_of(self._groups))
                raise


def _ranks_of(groups: Sequence[XlaPpProcessGroup]) -> str:
    """Explain the numbers of ranks in errors about messages between ranks."""
    pipeline, replicas = map(dist.get_process_group_ranks, groups)
    return (
        "Messages count ranks within a group: those of gradient sums from a stage to "
        f"itself (S) within ranks {replicas} of the job, others within {pipeline}."
    )

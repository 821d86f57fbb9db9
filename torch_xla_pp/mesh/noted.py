"""Partitions that are noted on tensors before there are devices to hold them."""

from torch import Tensor

from torch_xla_pp.mesh.local_mesh import Partition

_NAME = "_torch_xla_pp_partition"


def note_partition(tensor: Tensor, partition: Partition) -> None:
    """Let the stage that gets a parameter partition it so, if no rule says else."""
    setattr(tensor, _NAME, partition)


def noted_partition(tensor: Tensor) -> Partition | None:
    """Return what was noted on a tensor, None if nothing."""
    found: Partition | None = getattr(tensor, _NAME, None)
    return found

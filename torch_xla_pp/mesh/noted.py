"""Partitions that are noted on tensors before there are devices to hold them."""

from torch import Tensor

from torch_xla_pp.mesh.local_mesh import Partition

_NAME = "_torch_xla_pp_partition"


def note_partition(tensor: Tensor, partition: Partition) -> None:
    """Note a partition for a parameter's stage, which uses it unless a rule matches."""
    setattr(tensor, _NAME, partition)


def noted_partition(tensor: Tensor) -> Partition | None:
    """Return the partition that was noted on a tensor, None if there is none."""
    found: Partition | None = getattr(tensor, _NAME, None)
    return found

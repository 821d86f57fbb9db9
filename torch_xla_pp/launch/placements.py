"""torch.distributed.tensor's functions on meshes of one rank's devices.

They annotate: the partition of a parameter on the host is noted, for the stage that
gets it; a tensor on the device is marked; where a sequence is split between blocks, the
module's output is marked as by `shard`. Nothing is scattered, as there is one process,
and no activation is a DTensor: XLA shards all others.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch_xla.distributed.spmd as xs
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
)

from torch_xla_pp.graph import shard
from torch_xla_pp.launch.rank_mesh import RankMesh
from torch_xla_pp.mesh import ROWS, Partition, note_partition, on_mesh

# Style and kind of module → dimension of each parameter that it splits.
_SPLITS: dict[tuple[type, type], dict[str, int]] = {
    (ColwiseParallel, nn.Linear): {"weight": 0, "bias": 0},
    (ColwiseParallel, nn.Embedding): {"weight": 1},
    (RowwiseParallel, nn.Linear): {"weight": 1},
    (RowwiseParallel, nn.Embedding): {"weight": 0},
}


def annotate_for_placements() -> None:
    """Let `distribute_tensor` and `distribute_module` accept meshes of ranks.

    For the device type "xla" torch calls functions of torch_xla, which take torch's own
    meshes; these still go there.
    """
    _extend("xla_distribute_tensor", _distribute_tensor)
    _extend("xla_distribute_module", _distribute_module)


def _extend(name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(xs, name)

    @functools.wraps(theirs)
    def extended(value: Any, device_mesh: Any = None, *args: Any, **kw: Any) -> Any:
        known = isinstance(device_mesh, RankMesh)
        return (ours if known else theirs)(value, device_mesh, *args, **kw)

    setattr(xs, name, extended)


def _distribute_tensor(
    tensor: Tensor, mesh: RankMesh, placements: Sequence[Placement] | None = None
) -> Any:
    """Partition a tensor; returns it, marked if it is on the device."""
    partition = _partition(tensor, mesh, placements)
    if tensor.device.type == "xla":
        return xs.mark_sharding(tensor, mesh.whole, partition)
    note_partition(tensor, partition)
    return tensor


def _distribute_module(
    module: nn.Module,
    mesh: RankMesh,
    partition_fn: Callable[[str, nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Partition a module's parameters by a style or a function of the user's."""
    style = getattr(partition_fn, "__self__", None)
    if isinstance(style, (ColwiseParallel, RowwiseParallel)):
        _apply(style, module, mesh)
        return module
    if isinstance(style, SequenceParallel):
        _split_output(module, mesh, style.sequence_sharding[0].dim)
        return module
    if input_fn or output_fn:
        raise ValueError(
            "distribute_module: expected what partitions parameters, got input_fn or "
            "output_fn, which place activations. XLA finds out how they are split; to "
            "split the sequence between blocks use SequenceParallel, or pass "
            "sharding=presets.tensor_sequence(...) with patterns to the stage, or name "
            "a value's axes by xpp.shard."
        )
    for name, submodule in module.named_modules() if partition_fn else ():
        before = dict(submodule.named_parameters(recurse=False))
        partition_fn(name, submodule, mesh)  # type: ignore[misc]
        _keep(before, submodule)
    return module


def _apply(
    style: ColwiseParallel | RowwiseParallel, module: nn.Module, mesh: RankMesh
) -> None:
    """Partition a linear layer or an embedding as a style does."""
    colwise = isinstance(style, ColwiseParallel)
    usual: tuple[Placement, Placement] = (Replicate(), Shard(-1))
    if not colwise:
        is_linear = isinstance(module, nn.Linear)
        usual = (Shard(-1) if is_linear else Replicate(), Replicate())
    given = (*style.input_layouts, *style.output_layouts)
    # The output of the last layer may be whole, or as it is; between blocks the
    # sequence may be split, as the input of a column-wise layer and the output of a
    # row-wise one.
    taken, made = given
    split = None if colwise else _split_dim(made)
    is_taken = taken == usual[0] or (colwise and _split_dim(taken) is not None)
    if not is_taken or (split is None and made not in (usual[1], Replicate())):
        raise ValueError(
            f"{type(style).__name__}: expected layouts {usual}, got {given}. XLA finds "
            "out how activations are split: leave the layouts out; to split the "
            "sequence between blocks let a column take Shard(1) and a row make it, or "
            "pass sharding=presets.tensor_sequence(...) with patterns to the stage."
        )
    if split is not None:
        _split_output(module, mesh, split)
    kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    splits = _SPLITS[ColwiseParallel if colwise else RowwiseParallel, kind]
    for name, parameter in module.named_parameters(recurse=False):
        placement = Shard(splits[name]) if name in splits else Replicate()
        _distribute_tensor(parameter, mesh, [placement])


def _split_dim(placement: Placement) -> int | None:
    """Return the dimension that a placement splits, None if not that of a sequence."""
    if isinstance(placement, Shard) and placement.dim > 0:
        return placement.dim
    return None


def _split_output(module: nn.Module, mesh: RankMesh, dim: int) -> None:
    """Split the output of a module along the sequence, and leave the batch as it is."""
    if mesh.ndim != 1:
        raise ValueError(
            f"SequenceParallel: expected one axis of the mesh, got {mesh}. Slice it: "
            'mesh["model"].'
        )
    (axis,) = mesh.mesh_dim_names
    # Not a local function, so that the module can be copied and pickled.
    module.register_forward_hook(functools.partial(_shard_output, axis, dim))


def _shard_output(
    axis: str, dim: int, module: nn.Module, args: Any, output: Any
) -> Any:
    if not isinstance(output, Tensor) or not 0 <= dim < output.dim():
        raise ValueError(
            f"SequenceParallel: expected {type(module).__name__} to return a tensor "
            f"with dimension {dim}, got {type(output).__name__}. Split the sequence "
            "of another module, or call xpp.shard in forward."
        )
    names: list[str | None] = [None] * output.dim()
    names[0] = ROWS
    names[dim] = on_mesh(axis)
    return shard(output, *names)


def _partition(
    tensor: Tensor, mesh: RankMesh, placements: Sequence[Placement] | None
) -> Partition:
    """Return the axes of each dimension of a tensor, for placements on each axis."""
    placed = [Replicate()] * mesh.ndim if placements is None else list(placements)
    if len(placed) != mesh.ndim:
        raise ValueError(
            f"distribute_tensor: expected a placement for each axis of {mesh}, got "
            f"{placed}. Add Replicate() for axes that split nothing."
        )
    axes: list[tuple[str, ...]] = [()] * tensor.dim()
    for name, placement in zip(mesh.mesh_dim_names, placed, strict=True):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard:
            raise ValueError(
                f"distribute_tensor: expected Shard or Replicate, got {placement} on "
                f"axis {name!r}. Sums over devices are XLA's: leave it out."
            )
        if not -tensor.dim() <= placement.dim < tensor.dim():
            raise ValueError(
                f"distribute_tensor: expected a dimension of {[*tensor.shape]}, got "
                f"{placement}. Correct it."
            )
        dim = placement.dim % tensor.dim()
        axes[dim] = (*axes[dim], name)
    return tuple(None if not a else a[0] if len(a) == 1 else a for a in axes)


def _keep(before: dict[str, nn.Parameter], module: nn.Module) -> None:
    """Restore the parameters with noted partitions, whose memory new ones use now.

    Functions for torch's own meshes write `nn.Parameter(distribute_tensor(old, ...))`.
    """
    for key, parameter in module.named_parameters(recurse=False):
        old = before.get(key)
        if old is not None and old is not parameter:
            if (
                old.device == parameter.device
                and old.data_ptr() == parameter.data_ptr()
            ):
                module.register_parameter(key, old)

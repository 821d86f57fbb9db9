"""Stages made by hand, with upstream's signature."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_xla_pp.compile import Remat
from torch_xla_pp.mesh import Sharding
from torch_xla_pp.plan import InputsFrom
from torch_xla_pp.runtime.stage import XlaPipelineStage
from torch_xla_pp.runtime.world import AUTO, BatchAxis


class PipelineStage(XlaPipelineStage):
    """Run a module written by hand as one stage of a pipeline.

    Takes what `torch.distributed.pipelining.PipelineStage` takes, and how to lay
    values out over the local devices.

    Args:
        submodule: The stage's module; on the host, on meta, or on the XLA device.
        stage_index: Index of this stage.
        num_stages: Number of stages of the pipeline.
        device: `xpp.device()`.
        input_args: Example of the positional inputs; if given, what arrives must have
            these shapes and dtypes. Without it the module takes what it can run on;
            XLA promotes dtypes where eager would refuse to mix them.
        output_args: Example of the outputs, likewise.
        group: Group of the pipeline's ranks, of backend "xla_pp"; None for the
            default group.
        dw_builder: Not supported: the backward is always split by the compiler.
        mesh: SPMD mesh of this rank's devices.
        sharding: `AxisRules` for the whole model, or glob pattern on parameter names
            → mesh axis per dimension.
        batch_axis: Mesh axis that splits the batch; "auto" takes what axis rules say of
            "batch", or else the axis called "data" if there is one.
        inputs_from: Which stages make the first arguments of the module: `[0, (1, 2)]`
            for the output of stage 0 and item 2 of that of stage 1, `{"x": 0}` for
            keyword arguments, `[]` for none; None for the previous stage, the items
            of whose output are taken one by one. Further arguments are those of the
            schedule's `step` on this rank.
        tied: Name of a parameter → name of a group, for a parameter of which other
            stages have copies, e.g. `{"head.weight": "embedding"}`: parameters of one
            group begin with equal values and get the sum of all their gradients.
        remat: Which forward values the backward computes again: "none" for those under
            `torch.utils.checkpoint` only, "full" for all, or the ops whose results
            are kept, e.g. `[torch.ops.aten.mm.default]`.
        replicas: Group of the ranks that run this stage in each replica of the
            pipeline, e.g. `mesh.get_group("dp")`; None if there is one. Every replica
            is given its own part of the batch; gradients are averaged over replicas
            once a step. Parameters must begin with equal values; buffers, losses and
            outputs are each replica's own.

    Raises:
        TypeError: Examples are no tensors.
        ValueError: An argument does not fit.

    Example:
        >>> stage = PipelineStage(block, 0, 2, xpp.device(), mesh=mesh["data"])
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensor | tuple[Tensor, ...] | None = None,
        output_args: Tensor | tuple[Tensor, ...] | None = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Any = None,
        *,
        mesh: Any | None = None,
        sharding: Sharding | None = None,
        batch_axis: BatchAxis = AUTO,
        inputs_from: InputsFrom | None = None,
        tied: Mapping[str, str] | None = None,
        remat: Remat = "none",
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        if dw_builder is not None:
            raise ValueError(
                "dw_builder: expected None, got a builder. The backward of an XLA "
                "stage is split by the compiler; leave the argument out."
            )
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            device,
            group,
            mesh=mesh,
            sharding=sharding,
            batch_axis=batch_axis,
            inputs_from=inputs_from,
            tied=tied,
            remat=remat,
            replicas=replicas,
            expected_inputs=_tensors("input_args", input_args),
            expected_outputs=_tensors("output_args", output_args),
        )


def _tensors(
    name: str, values: Tensor | tuple[Tensor, ...] | None
) -> tuple[Tensor, ...] | None:
    if values is None or isinstance(values, Tensor):
        return None if values is None else (values,)
    if isinstance(values, (tuple, list)) and all(isinstance(x, Tensor) for x in values):
        return tuple(values)
    kind = type(values).__name__
    raise TypeError(
        f"{name}: expected a tensor or a tuple of tensors, got {kind}. "
        "Pass arguments behind the device by name, e.g. group=group."
    )

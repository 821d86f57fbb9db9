"""From a model to stages: trace, split, place, compile, run.

`pipeline` does the first two steps and `Pipe.build_stage` the third; programs are
compiled when a schedule of torch.distributed.pipelining runs its first step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint

from torch_xla_pp.compile import Remat, marking_checkpoints
from torch_xla_pp.errors import PlanError
from torch_xla_pp.graph import (
    StageGraph,
    check_split_spec,
    parameter_names,
    shared_parameters,
    tie_parameters,
)
from torch_xla_pp.mesh import Partition
from torch_xla_pp.runtime import Pipe as _TracedPipe
from torch_xla_pp.runtime import XlaPipelineStage, move_factories_to, trace_and_split


class Pipe(_TracedPipe):
    """Hold a model that was traced and split into stages.

    As `torch.distributed.pipelining.Pipe`, but its stages run on XLA devices. Made
    by `pipeline`.

    Args:
        traced: The traced and split model.
        names: All names of each parameter of the model.

    Attributes:
        stage_graph: The stages and the values that flow between them.
    """

    def __init__(self, traced: _TracedPipe, names: Sequence[tuple[str, ...]]) -> None:
        super().__init__(
            traced.split_gm,
            traced.num_stages,
            traced.has_loss_and_backward,
            traced.loss_spec,
        )
        self.stage_graph = StageGraph.from_split(self.split_gm)
        stages = [self.get_stage_module(i) for i in range(self.num_stages)]
        shared = shared_parameters(names, stages)
        if shared:
            raise PlanError(
                "pipeline: expected every parameter to be used by one stage, got "
                f"shared ones: {'; '.join(shared)}. Move the split points so that "
                "all uses are in one stage, or untie the parameters."
            )
        for stage in stages:
            tie_parameters(names, stage)

    def build_stage(  # type: ignore[override]  # another class of stage
        self,
        stage_index: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        *,
        mesh: Any | None = None,
        sharding: Mapping[str, Partition] | None = None,
        batch_axis: str | tuple[str, ...] | None = "auto",
        remat: Remat = "none",
    ) -> XlaPipelineStage:
        """Make the stage that this rank runs.

        Args:
            stage_index: Index of the stage.
            device: `xpp.device()`.
            group: Group of the pipeline's ranks; None for the default group.
            mesh: SPMD mesh of this rank's devices, e.g. `mesh["data", "model"]`.
            sharding: Glob pattern on parameter names → mesh axis per dimension,
                e.g. `{"*.weight": ("model", None)}`; the first match counts, what
                nothing matches is replicated.
            batch_axis: Mesh axis that splits dimension 0 of inputs and activations;
                "auto" takes the axis called "data" if there is one, None replicates.
            remat: Which forward values the backward computes again: "none" for those
                under `torch.utils.checkpoint` only, "full" for all, or the ops whose
                results are kept, e.g. `[torch.ops.aten.mm.default]`.

        Raises:
            ValueError: An argument does not fit.
        """
        module: nn.Module = nn.Module()
        expected = None
        if 0 <= stage_index < self.num_stages:
            module = self.get_stage_module(stage_index)
            move_factories_to(module, device)
            expected = _traced_inputs(module)
        return XlaPipelineStage(
            module,
            stage_index,
            self.num_stages,
            device,
            group,
            mesh=mesh,
            sharding=sharding,
            batch_axis=batch_axis,
            remat=remat,
            inputs_from=None,
            expected_inputs=expected,
        )


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: dict[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and split it into stages.

    As `torch.distributed.pipelining.pipeline`, whose tracer does the work.

    Args:
        module: The model, on the host or on meta.
        mb_args: Example of one microbatch's positional arguments.
        mb_kwargs: Example of its keyword arguments.
        split_spec: Name of a submodule → where to split at it.
        split_policy: Splits the traced graph in another way.

    Raises:
        ValueError: `split_spec` names unknown submodules.
        PlanError: A value skips a stage, or stages share a parameter.

    Example:
        >>> pipe = pipeline(model, mb_args=(x,),
        ...                 split_spec={"layers.4": SplitPoint.BEGINNING})
    """
    check_split_spec(module, split_spec or {})
    names = parameter_names(module)
    with marking_checkpoints():
        traced = trace_and_split(module, mb_args, mb_kwargs, split_spec, split_policy)
    return Pipe(traced, names)


def _traced_inputs(module: nn.Module) -> list[torch.Tensor] | None:
    """Return what a traced stage takes, known from its placeholders."""
    if not isinstance(module, fx.GraphModule):
        return None
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return tensors if len(tensors) == len(values) else None

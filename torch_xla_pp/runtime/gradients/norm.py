"""The norm of the gradients of a whole pipeline."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from torch_xla_pp.runtime.stage import PipelineStage


@torch.no_grad()
def clip_grad_norm_(
    stages: PipelineStage | Iterable[PipelineStage],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of a pipeline so that their norm is at most `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for the parameters of all stages as one
    vector; parameters that several stages have copies of count once. All ranks of the
    pipeline's group must call it, after a step. Waits for the step.

    Args:
        stages: All stages of this rank.
        max_norm: The largest norm after the scaling.
        norm_type: Which p-norm, may be `math.inf`.
        error_if_nonfinite: Whether a norm that is not finite is an error.

    Returns:
        The norm before the scaling, a scalar on the host.

    Raises:
        RuntimeError: The norm is not finite, on every rank.
    """
    own = [stages] if isinstance(stages, PipelineStage) else list(stages)
    counted = [
        parameter.grad
        for stage in own
        for parameter in stage.owned_parameters().values()
        if parameter.grad is not None
    ]
    total = _total_norm(counted, norm_type, own[0].group)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite norm of the gradients, got {total}. "
            "Look at the loss, or pass error_if_nonfinite=False."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for stage in own:
        for parameter in stage.submod.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
    return total


def _total_norm(
    grads: Iterable[Tensor], norm_type: float, group: dist.ProcessGroup | None
) -> Tensor:
    norms = [torch.linalg.vector_norm(grad, norm_type).float() for grad in grads]
    local = torch.stack(norms).cpu() if norms else torch.zeros(1)
    if math.isinf(norm_type):
        most = local.max()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return most
    total = (local**norm_type).sum()
    dist.all_reduce(total, group=group)
    return torch.as_tensor(total ** (1.0 / norm_type))

"""Pending updates of optimizers, computed before they are read."""

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_xla_pp import xla_compat


@functools.cache
def compute_updates() -> None:
    """Let optimizers whose gradients are pending compute their updates; once.

    After `torch.nn.utils.clip_grad_norm_` each update reads the gradients of all
    parameters. torch_xla confuses such graphs of parameters of equal shapes, see
    `xla_compat.is_mistaken`: `parameter.cpu()` would return another one's value. So
    they are computed together, as scripts of torch_xla do by `torch_xla.sync()`.
    """
    register_optimizer_step_post_hook(_compute)


def _compute(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [p.grad for group in optimizer.param_groups for p in group["params"]]
    grads = [grad for grad in held if grad is not None and grad.device.type == "xla"]
    if grads and any(xla_compat.are_pending(grads)):
        xla_compat.sync_all()

"""Run a module through its stage programs, and eagerly."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_xla_pp import xla_compat
from torch_xla_pp.compile import (
    Forwarded,
    LoweringRule,
    StagePrograms,
    export_joint,
)
from torch_xla_pp.compile.group_sums.group_gradients import Grouping
from torch_xla_pp.compile.partition import Remat
from torch_xla_pp.runtime.gradients.sums import SumPrograms


class Compiled:
    """A module's stage programs, with parameters replicated and inputs split."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        mesh: Any,
        remat: Remat = "none",
        rules: Sequence[LoweringRule] = (),
        used: Mapping[str, Any] | None = None,
        grouping: Grouping | None = None,
        is_recycling: bool = False,
        **kwargs: Any,
    ) -> None:
        self.mesh = mesh
        self.whole = xla_compat.replicated_sharding()
        self.module = _on_device(module)
        self.fixed = {f"param:{n}": p for n, p in self.module.named_parameters()}
        for name, value in self.module.named_buffers():
            self.fixed[f"buffer:{name}"] = value
        for value in self.fixed.values():
            xla_compat.annotate(value, self.whole)
        xla_compat.materialize(list(self.fixed.values()))
        device = xla_compat.device()
        examples = [
            torch.empty(x.shape, dtype=x.dtype, device=device).requires_grad_(
                x.requires_grad
            )
            for x in inputs
        ]
        self.joint = export_joint(self.module, examples, kwargs)
        outputs = [node.meta["val"] for node in self.joint.outputs]
        self.programs = StagePrograms(
            self.joint,
            [self.rows(v) for v in outputs],
            [self.rows(v) for v in inputs],
            dict.fromkeys(self.fixed, self.whole),
            remat=remat,
            rules=rules,
            used=used,
            grouping=grouping,
            is_recycling=is_recycling,
        )
        self.sum_programs = SumPrograms(self.programs.summed)

    def rows(self, value: Tensor) -> Any:
        """Return the sharding that splits dimension 0."""
        if value.dim() == 0:
            return self.whole
        partition = ("data",) + (None,) * (value.dim() - 1)
        return self.mesh.get_op_sharding(partition)

    def upload(self, value: Tensor, sharding: Any = None) -> Tensor:
        data = value.detach().to(xla_compat.device())
        xla_compat.annotate(data, sharding or self.rows(value))
        xla_compat.materialize([data])
        return data

    def forward(self, inputs: list[Tensor], seed: int = 0) -> Forwarded:
        live = {f"input:{i}": value for i, value in enumerate(inputs)}
        return self.programs.forward(self.fixed, live, seed)

    def zero_sums(self) -> dict[str, Tensor]:
        return self.sum_programs.start(self.fixed, {})


def _on_device(module: nn.Module) -> nn.Module:
    """Copy a module to the device; shared parameters stay shared."""
    module = copy.deepcopy(module)
    moved: dict[int, nn.Parameter] = {}
    for sub in module.modules():
        for key, value in sub._parameters.items():
            if value is not None and id(value) not in moved:
                data = value.detach().to(xla_compat.device())
                moved[id(value)] = nn.Parameter(data, value.requires_grad)
            if value is not None:
                sub._parameters[key] = moved[id(value)]
        for key, buffer in sub._buffers.items():
            if buffer is not None:
                sub._buffers[key] = buffer.to(xla_compat.device())
    return module


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    scale = expected.detach().abs().max().clamp_min(1e-1)
    return bool(
        (got.detach().cpu() - expected.detach()).abs().max() < tolerance * scale
    )

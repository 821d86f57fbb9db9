"""The exchanges of a compiled program, by the mesh axes that they go over."""

from collections.abc import Iterator
from typing import Any

from torch_xla_pp.accelerators import CompiledProgram
from torch_xla_pp.fitting.stage_fit import FitCollective
from torch_xla_pp.hlo import axes_of_groups
from torch_xla_pp.mesh import LocalMesh


def collectives_by_kind(
    answer: CompiledProgram, mesh: LocalMesh
) -> Iterator[FitCollective]:
    """Yield the exchanges of a program, those of one kind and axes together."""
    found: dict[tuple[str, tuple[str, ...] | None], list[Any]] = {}
    for one in answer.collectives:
        key = one.kind, axes_of_groups(one.groups, mesh)
        found.setdefault(key, []).append(one)
    for (kind, axes), ones in sorted(found.items(), key=str):
        yield FitCollective(
            kind=kind,
            axes=axes,
            count=len(ones),
            num_bytes=sum(one.num_bytes for one in ones),
            num_asynchronous=sum(one.is_asynchronous for one in ones),
        )

"""Planners of torch.distributed.checkpoint that know sharded tensors of a rank.

torch_xla's own planner drops a tensor that several devices of a process hold alike, and
its loader compares the parts of devices. Here a rank writes each part once, one rank
writes a tensor that several have, and a rank reads whole tensors, once each.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from torch_xla_pp.checkpoint.contents import contents_in
from torch_xla_pp.checkpoint.device_tensor import DeviceTensor


class SavePlanner(DefaultSavePlanner):
    """Let `torch.distributed.checkpoint.save` write what a `State` has.

    Args:
        shares: Whether the other names of a tied tensor are left out of what is
            written; `with_aliases` then adds them to what was.

    Example:
        >>> dcp.save({"app": state}, checkpoint_id=path, planner=SavePlanner())
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self._shares = shares
        self._aliases: dict[str, str] = {}
        self._last: tuple[str, dict[tuple[int, ...], Tensor]] = ("", {})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take what is to be written."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if self._shares:
            for prefix, contents in contents_in(state_dict):
                for alias, name in contents.aliases.items():
                    self._aliases[prefix + alias] = prefix + name
            for alias in self._aliases:
                self.state_dict.pop(alias, None)

    def create_global_plan(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """Let one rank write each tensor; equal on every rank that calls it."""
        plans, metadata = super().create_global_plan(_once(all_plans))
        for alias, name in self._aliases.items():
            known = metadata.state_dict_metadata
            known[alias] = known[name]
            metadata.planner_data[alias] = tuple(_path(alias, name, metadata))
        return plans, metadata

    def with_aliases(self, results: Sequence[WriteResult]) -> list[WriteResult]:
        """Add results for the names that were left out: they have the same bytes."""
        names: dict[str, list[str]] = {}
        for alias, name in self._aliases.items():
            names.setdefault(name, []).append(alias)
        return [
            *results,
            *(
                replace(result, index=replace(result.index, fqn=alias))
                for result in results
                for alias in names.get(result.index.fqn, ())
            ),
        ]

    def stage(self, plan: SavePlan) -> None:
        """Copy what a plan writes to the host, as it is now."""
        offsets: dict[str, list[tuple[int, ...]]] = {}
        for item in plan.items:
            offsets.setdefault(item.index.fqn, []).append(
                tuple(item.index.offset or ())
            )
        for name, value in self.state_dict.items():
            if isinstance(value, DeviceTensor):
                value.stage(offsets.get(name, ()))
            elif isinstance(value, Tensor):
                self.state_dict[name] = value.detach().cpu().clone()
            elif name in offsets:
                self.state_dict[name] = _Pickled(self._bytes_of(value))

    def _bytes_of(self, value: Any) -> bytes:
        data = io.BytesIO()
        torch.save(value, data)
        return data.getvalue()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value, or the part of a tensor, on the host.

        The parts of one tensor are asked for one after the other, and read at once.
        """
        value = self.state_dict[index.fqn]
        if not isinstance(value, DeviceTensor):
            return super().lookup_object(index)
        if self._last[0] != index.fqn:
            self._last = ("", {})
            self._last = (index.fqn, value.parts())
        return self._last[1][tuple(index.offset or ())]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what is written for an object."""
        if isinstance(object, _Pickled):
            return io.BytesIO(object.data)
        return super().transform_object(write_item, object)


class LoadPlanner(DefaultLoadPlanner):
    """Let `torch.distributed.checkpoint.load` read what a `State` needs.

    Example:
        >>> dcp.load({"app": state}, checkpoint_id=path, planner=LoadPlanner())
    """

    def __init__(self, *, strict: bool = True) -> None:
        super().__init__()
        self._strict = strict

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Ask for what there is.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        if metadata is not None:
            for prefix, contents in contents_in(state_dict):
                contents.ask(metadata, prefix, strict=self._strict)
        super().set_up_planner(state_dict, metadata, is_coordinator)


class _Pickled:
    """Hold the bytes of an object that may have changed since."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _once(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave each tensor to the rank that has the least to write so far.

    A rank that has a tensor has all of it, perhaps in other parts than another one. Of
    what is no tensor the first rank's counts.
    """
    holders: dict[str, dict[int, None]] = {}
    sizes: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index.fqn, {})[rank] = None
            sizes[item.index.fqn] = item.tensor_storage_size() or 0
    load = [0] * len(plans)
    writer: dict[str, int] = {}
    for name, ranks in holders.items():
        is_large = sizes[name] > 0
        chosen = min(ranks, key=lambda rank: load[rank]) if is_large else min(ranks)
        writer[name] = chosen
        load[chosen] += sizes[name]
    return [
        replace(plan, items=[i for i in plan.items if writer[i.index.fqn] == rank])
        for rank, plan in enumerate(plans)
    ]


def _path(alias: str, name: str, metadata: Metadata) -> list[str | int]:
    """Return where a tied name is in the nested state, given where its first is."""
    path: Mapping[str, Sequence[str | int]] = metadata.planner_data
    outer = list(path[name][:-1])
    depth = len(".".join(map(str, outer))) + 1 if outer else 0
    return [*outer, alias[depth:]]

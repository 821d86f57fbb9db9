"""Planners of torch.distributed.checkpoint for tensors that are sharded within a rank.

torch_xla's own planner drops a tensor that several devices of a process hold alike, and
its loader compares the parts of devices. Here a rank writes each part once, one rank
writes a tensor that several have, and a rank reads whole tensors, once each.
"""

import io
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
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

from torch_xla_pp import xla_compat
from torch_xla_pp.checkpoint.contents import contents_in
from torch_xla_pp.checkpoint.device_tensor import DeviceTensor, Offset

Parts = dict[Offset, Tensor]


class SavePlanner(DefaultSavePlanner):
    """The planner with which `torch.distributed.checkpoint.save` writes a `State`.

    Args:
        shares: Whether the further names of a tied tensor are left out of the files;
            `with_aliases` then adds them to the results.

    Example:
        >>> dcp.save({"app": state}, checkpoint_id=path, planner=SavePlanner())
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self._shares = shares
        self._aliases: dict[str, str] = {}
        self._is_staged = self._is_launched = False
        self._lock = threading.Lock()
        self._left: Counter[str] = Counter()
        self._read: dict[str, Future[Parts]] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Receive what is to be written."""
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

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Count how often each tensor will be asked for."""
        plan = super().finish_plan(new_plan)
        self._left = Counter(item.index.fqn for item in plan.items)
        return plan

    def stage(self, plan: SavePlan) -> None:
        """Copy what a plan writes, as it is now.

        Values on devices are copied there, by a program that is compiled once; values
        on the host are copied on the host.
        """
        written = {item.index.fqn for item in plan.items}
        on_devices = []
        for name, value in self.state_dict.items():
            if isinstance(value, DeviceTensor):
                if name not in written:
                    value.drop()
                elif value.is_on_devices:
                    on_devices.append(value)
                else:
                    value.stage(value.tensor.detach().clone())
            elif isinstance(value, Tensor):
                self.state_dict[name] = value.detach().cpu().clone()
            elif name in written:
                self.state_dict[name] = _Pickled(self._bytes_of(value))
        copied = xla_compat.copies([value.tensor for value in on_devices])
        for value, copy in zip(on_devices, copied, strict=True):
            value.stage(copy)
        self._is_staged = True

    def _bytes_of(self, value: Any) -> bytes:
        data = io.BytesIO()
        torch.save(value, data)
        return data.getvalue()

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value, or the part of a tensor, on the host; any thread may call.

        A tensor is read when its first part is asked for, and dropped with the last.
        """
        name = index.fqn
        if not isinstance(self.state_dict[name], DeviceTensor):
            return super().lookup_object(index)
        with self._lock:
            is_first = name not in self._read
            parts = self._read.setdefault(name, Future())
        if is_first:
            try:
                parts.set_result(self._parts_of(name))
            except BaseException as error:
                parts.set_exception(error)
        found = parts.result()[tuple(index.offset or ())]
        with self._lock:
            self._left[name] -= 1
            if self._left[name] <= 0:
                self._read.pop(name, None)
        return found

    def _parts_of(self, name: str) -> Parts:
        value: DeviceTensor = self.state_dict[name]
        if not self._is_staged:
            return value.parts()
        with self._lock:
            if value.is_on_devices and not self._is_launched:
                xla_compat.wait_launched(value.tensor)
                self._is_launched = True
        parts = value.parts()
        value.drop()
        return parts

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what is written for an object."""
        if isinstance(object, _Pickled):
            return io.BytesIO(object.data)
        return super().transform_object(write_item, object)


class LoadPlanner(DefaultLoadPlanner):
    """The planner with which `torch.distributed.checkpoint.load` reads a `State`.

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
        """Ask for what the checkpoint has.

        Raises:
            CheckpointError: The checkpoint is of another model.
        """
        if metadata is not None:
            for prefix, contents in contents_in(state_dict):
                contents.ask(metadata, prefix, strict=self._strict)
        super().set_up_planner(state_dict, metadata, is_coordinator)


class _Pickled:
    """The bytes of an object that may have changed since."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _once(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Assign each tensor to the rank that has the least to write so far.

    A rank that has a tensor has all of it, perhaps in other parts than another rank. Of
    other objects the first rank's is written.
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

"""The operations on tensors that have no memory yet, recorded to be run later.

Terms: a *record* belongs to the storage of a meta tensor and lists the operations that
wrote to it. Views need no record of their own: an operation knows the part of a
storage that it reads or writes by shape, strides and offset.

Law: a recorded value depends on the operations that it needs and, where these are
random, on the seed at that time and on the name of a tensor: not on what else is
computed, nor on when or where.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from torch_xla_pp.errors import PipelineError

# An attribute of the storage, so that parameters, views and exported modules have it.
_ATTRIBUTE = "torch_xla_pp_record"

Storage = torch.UntypedStorage


@dataclass(eq=False, slots=True)
class Record:
    """The writes to a storage.

    Args:
        num_bytes: Size of the storage when it was first seen.
        writes: Operations that wrote to it, in order; none if it has no value.
        clock: Number of the last operation that read or wrote it.
        version: Version of the tensor that holds it, when it got a name.
    """

    num_bytes: int
    writes: "list[Operation]" = field(default_factory=list)
    clock: int = 0
    version: int | None = None

    def zeros(self) -> Storage:
        """Return memory for the storage; bytes that nothing writes to are zero."""
        size = self.num_bytes
        return torch.zeros(size, dtype=torch.uint8, device="cpu").untyped_storage()


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A stand-in for a tensor: a part of a recorded storage."""

    record: Record
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        """Describe a meta tensor; one that was not seen before gets a record."""
        record = record_of(tensor)
        if record is None:
            record = Record(tensor.untyped_storage().nbytes())
            share_record(record, tensor)
        offset = int(tensor.storage_offset())
        return cls(record, tensor.dtype, tensor.shape, tensor.stride(), offset)

    def on(self, storage: Storage) -> Tensor:
        """Return this part of a storage that has memory."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(storage, self.offset, self.shape, self.stride)

    def fitted(self, value: Tensor) -> Storage:
        """Return the storage of a value that has the meta tensor's strides."""
        layout = (value.stride(), value.storage_offset())
        if layout != (self.stride, self.offset) or value.device.type != "cpu":
            value = self.on(self.record.zeros()).copy_(value)
        return value.untyped_storage()


@dataclass(eq=False, slots=True)
class Operation:
    """A call that wrote to recorded storages.

    Args:
        function: What was called.
        args: Its arguments, with views in place of meta tensors.
        kwargs: Its keyword arguments, likewise.
        results: For each leaf of the result a view, if its storage is a new one.
        records: The storages that it reads or writes.
        number: Larger than those of all earlier operations on the same storages.
        default_dtype: The default dtype when it was called.
        seed: The seed when it was called, None if it is not random.
        owner: The name of the tensor whose random numbers it draws, and the number of
            random operations of that name before it.
    """

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...]
    records: tuple[Record, ...]
    number: int
    default_dtype: torch.dtype
    seed: int | None
    owner: tuple[str, int] | None = None

    def run(self, storages: dict[Record, Storage]) -> None:
        """Run it on storages that have memory; adds those that it makes."""

        def value(view: View) -> Tensor:
            if view.record not in storages:
                storages[view.record] = view.record.zeros()
            return view.on(storages[view.record])

        args, kwargs = pytree.tree_map_only(View, value, (self.args, self.kwargs))
        if takes_device(self.function):
            kwargs = kwargs | {"device": torch.device("cpu")}
        leaves = pytree.tree_leaves(self._call(args, kwargs))
        for view, leaf in zip(self.results, leaves, strict=True):
            if view is not None:
                storages[view.record] = view.fitted(leaf)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        before = torch.get_default_dtype()
        state = torch.get_rng_state() if self.seed is not None else None
        try:
            torch.set_default_dtype(self.default_dtype)
            if self.seed is not None:
                torch.default_generator.manual_seed(self._own_seed(self.seed))
            return self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
            if state is not None:
                torch.set_rng_state(state)

    def _own_seed(self, seed: int) -> int:
        if self.owner is None:
            raise PipelineError(
                f"deferred_init: expected a random value that a module holds, got one "
                f"of {self.function} without a name, on which its numbers would depend."
                " Make it a parameter, a buffer or an attribute of a module, or draw "
                "it before deferred_init."
            )
        digest = hashlib.blake2b(repr((seed, *self.owner)).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def record_of(tensor: Tensor) -> Record | None:
    """Return the record of a tensor's storage, None if there is none."""
    return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)


def share_record(record: Record, tensor: Tensor) -> None:
    """Give a meta tensor the record of another storage."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, record)


def meta_like(value: Tensor) -> Tensor:
    """Return a meta tensor of a value's sizes, strides and dtype, without a record."""
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="meta"
    )


def takes_device(function: OpOverload) -> bool:
    """Return whether a function takes the device of its result."""
    return any(argument.name == "device" for argument in function._schema.arguments)


def needed_for(record: Record) -> list[Operation]:
    """Return the operations that make the final contents of a storage, in order."""
    found: dict[Operation, None] = {}
    wanted: list[tuple[Record, int]] = [(record, record.clock + 1)]
    while wanted:
        part, before = wanted.pop()
        for operation in part.writes:
            if operation.number < before and operation not in found:
                found[operation] = None
                wanted += [(read, operation.number) for read in operation.records]
    return sorted(found, key=lambda operation: operation.number)


@torch.no_grad()
def value_of(tensor: Tensor) -> Tensor | None:
    """Compute the value that a meta tensor stands for, on the host.

    Memory: the operands and results of the operations, each freed when no later one
    needs it; twice the tensor for one that is made in place.

    Returns:
        The value, None if nothing was ever written to the tensor.

    Raises:
        PipelineError: It needs random numbers that belong to no name.
    """
    record = record_of(tensor)
    if record is None or not record.writes:
        return None
    operations = needed_for(record)
    last = {part: op for op in operations for part in _parts(op)}
    storages: dict[Record, Storage] = {}
    for operation in operations:
        operation.run(storages)
        for part in _parts(operation):
            if last[part] is operation and part is not record:
                storages.pop(part, None)
    value = View.of(tensor).on(storages[record])
    return value if value.nbytes == storages[record].nbytes() else value.clone()


def _parts(operation: Operation) -> Iterator[Record]:
    yield from operation.records
    yield from (view.record for view in operation.results if view is not None)

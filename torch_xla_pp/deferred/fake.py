"""Trace modules on meta as if they were on the host.

Models ask tensors for their device, and not everything that they do with it supports
meta: `torch.autocast(x.device.type)`, for example. Traced on fake tensors of the host
they give the same graph as models that have values.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from torch_xla_pp.deferred.deferred_init import constant
from torch_xla_pp.deferred.materialize import replace_tensors
from torch_xla_pp.deferred.module_tensors import all_places_of
from torch_xla_pp.deferred.recipes import meta_like, record_of, share_record


@contextlib.contextmanager
def as_on_host(module: nn.Module) -> Iterator[Callable[[Any], Any]]:
    """Let a module that is on meta, or partly, look as if it were on the host.

    Yields:
        A function that does the same with the tensors of a pytree.
    """
    if not any(place.tensor.is_meta for place in all_places_of(module)):
        yield lambda tree: tree
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(value: Tensor) -> Tensor:
        data = value.detach() if value.is_meta else constant(value)
        return FakeTensor(mode, data, torch.device("cpu"))

    undo = replace_tensors(module, faked)
    try:
        yield lambda tree: pytree.tree_map_only(Tensor, faked, tree)
    finally:
        for place, value in undo:
            place.put(value)


def back_to_meta(module: nn.Module) -> None:
    """Put the fake tensors of a traced module on meta, each with its values."""
    replace_tensors(module, _unfaked)


def _unfaked(value: Tensor) -> Tensor:
    if not isinstance(value, FakeTensor):
        return value
    if value.constant is not None:
        return constant(value.constant)
    data = meta_like(value)
    record = record_of(value)
    if record is not None:
        share_record(record, data)
    return data

"""Copies of models without memory, to be traced again."""

import copy

from torch import Tensor, nn

from torch_xla_pp.deferred.module_tensors import ATTRIBUTE, TensorPlace, all_places_of
from torch_xla_pp.deferred.recipes import meta_like


def skeleton_of(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on meta, unrecorded.

    Tensors that are plain attributes are not copied: a trace reads their values.

    Raises:
        Exception: Something that the module holds cannot be copied.
    """
    places = all_places_of(module)
    return copy.deepcopy(module, {id(place.tensor): _bare(place) for place in places})


def _bare(place: TensorPlace) -> Tensor:
    if place.holding == ATTRIBUTE:
        return place.tensor
    data = meta_like(place.tensor)
    if isinstance(place.tensor, nn.Parameter):
        return nn.Parameter(data, requires_grad=place.tensor.requires_grad)
    return data

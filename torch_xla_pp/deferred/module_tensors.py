"""The tensors of a module, wherever it holds them.

Terms: a *place* is where a module holds a tensor under a name. A *tied* tensor is in
several places; a submodule that is used twice has places under both of its names.
"""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

Holding = Literal["parameter", "buffer", "attribute"]

PARAMETER: Holding = "parameter"
BUFFER: Holding = "buffer"
ATTRIBUTE: Holding = "attribute"


class TensorPlace(NamedTuple):
    """A place of a tensor in a module.

    Attributes:
        name: Its name in the whole module.
        holding: The kind of place: parameter, buffer or plain attribute.
        slots: The dictionary of the submodule that has it.
        key: Its name there.
    """

    name: str
    holding: Holding
    slots: dict[str, Any]
    key: str

    @property
    def tensor(self) -> Tensor:
        """Return the tensor that is there now."""
        tensor: Tensor = self.slots[self.key]
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Hold another tensor there."""
        self.slots[self.key] = tensor


def places_of(module: nn.Module) -> list[TensorPlace]:
    """Return all places of parameters and buffers, tied ones under all their names."""
    found = []
    for path, sub in module.named_modules(remove_duplicate=False):
        if sub._parameters:
            found += _places_in(path, PARAMETER, sub._parameters)
        if sub._buffers:
            found += _places_in(path, BUFFER, sub._buffers)
    return found


def all_places_of(module: nn.Module) -> list[TensorPlace]:
    """Return the places of parameters, buffers and plain attributes, likewise."""
    found = []
    for path, sub in module.named_modules(remove_duplicate=False):
        found += _places_in(path, PARAMETER, sub._parameters)
        found += _places_in(path, BUFFER, sub._buffers)
        found += _places_in(path, ATTRIBUTE, vars(sub))
    return found


def _places_in(path: str, holding: Holding, slots: dict[str, Any]) -> list[TensorPlace]:
    """Return the places of the tensors that a module of this path holds in a dict."""
    start = f"{path}." if path else ""
    return [
        TensorPlace(start + key, holding, slots, key)
        for key, value in slots.items()
        if isinstance(value, Tensor)
    ]


def state_of(module: nn.Module) -> list[TensorPlace]:
    """Return the first place of each parameter, then all places of buffers."""
    return state_in(places_of(module))


def state_in(places: Iterable[TensorPlace]) -> list[TensorPlace]:
    """Return the first place of each parameter among some, then those of buffers."""
    seen: set[int] = set()
    first, buffers = [], []
    for place in places:
        if place.holding == BUFFER:
            buffers.append(place)
        elif id(tensor := place.tensor) not in seen:
            seen.add(id(tensor))
            first.append(place)
    return first + buffers


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and buffers, under all of their names."""
    return {place.name: tuple(place.tensor.shape) for place in places_of(module)}


def parameter_names(module: nn.Module) -> list[tuple[str, ...]]:
    """Return for each parameter of `module` all names that it has."""
    names: dict[int, list[str]] = {}
    for place in places_of(module):
        if place.holding == PARAMETER:
            names.setdefault(id(place.tensor), []).append(place.name)
    return [tuple(group) for group in names.values()]

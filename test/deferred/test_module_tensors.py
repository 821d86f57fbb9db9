"""All tensors of a module are found, under all of their names."""

import pytest
import torch
from torch import nn

from torch_xla_pp.deferred import parameter_names, places_of, shapes_of, state_of

pytestmark = pytest.mark.pure


class Tied(nn.Module):
    """A parameter with two names, a submodule with two, a buffer with two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 3)
        self.embedding = nn.Embedding(3, 2)
        self.embedding.weight = self.head.weight
        self.again = self.head
        self.register_buffer("mask", torch.ones(4))
        self.embedding.register_buffer("mask", self.mask)
        self.register_buffer("none", None)
        self.plain = torch.ones(1)


def test_tied_tensors_have_all_of_their_names() -> None:
    module = Tied()
    expected = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found = {place.name: place.tensor for place in places_of(module)}
    assert found.keys() == expected.keys()
    assert all(found[name] is value for name, value in expected.items())
    assert shapes_of(module)["again.weight"] == (3, 2)
    assert parameter_names(module) == [
        ("head.weight", "embedding.weight", "again.weight"),
        ("head.bias", "again.bias"),
    ]


def test_a_state_has_each_parameter_once_and_parameters_first() -> None:
    roles = [place.role for place in state_of(Tied())]
    assert roles == [
        "param:head.weight",
        "param:head.bias",
        "buffer:mask",
        "buffer:embedding.mask",
    ]


def test_what_is_put_somewhere_is_seen_in_the_places_that_follow() -> None:
    module, seen = Tied(), []
    for place in places_of(module):
        if place.slots is module.head._parameters and place.key == "bias":
            seen.append(place.tensor)
            place.put(nn.Parameter(torch.zeros(3)))
    first, second = seen
    assert second is not first
    assert module.again.bias is not second

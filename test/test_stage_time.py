"""What `benchmarks/stage_time.py` compares, without measuring it."""

import gpt
import programs
import pytest
import stage_time
import torch

from torch_xla_pp.testing import Worlds

SIZE = {"width": 8, "heads": 2, "layers": 6, "length": 4}


def parameters() -> dict[str, torch.Tensor]:
    named = gpt.make_part(1, 3, SIZE).named_parameters()
    # Biases start at zero, which has no norm to compare with.
    return {name: value.detach() + 1 for name, value in named}


def test_weights_come_back_from_jax_as_they_were() -> None:
    given = parameters()
    found = stage_time.from_jax(stage_time.to_jax(given))
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], value) for name, value in given.items())


def test_jax_has_the_inputs_of_a_linear_layer_as_rows() -> None:
    given = parameters()
    weight = stage_time.to_jax(given)["1.up"]
    assert torch.equal(weight, given["blocks.1.up.weight"].t())


def test_sides_that_differ_are_not_measured() -> None:
    given = parameters()
    other = {**given, "blocks.0.up.bias": given["blocks.0.up.bias"] + 1}
    assert stage_time.largest_error(given, given) == 0
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.bias: expected eager"):
        stage_time.largest_error(other, given)
    del other["blocks.0.up.bias"]
    with pytest.raises(RuntimeError, match="results: expected"):
        stage_time.largest_error(other, given)


def test_ratios_are_of_times_of_the_same_turn() -> None:
    seconds = {"ours": [1.0, 4.0, 9.0], "eager": [2.0, 4.0, 6.0]}
    row = stage_time.columns(seconds)
    assert row["ours_ms"] == 4000.0
    assert row["to_eager"] == 1.0
    assert row["spread"] == {"to_eager": (0.5, 1.5)}


def gradients(products: str) -> dict[str, torch.Tensor]:
    """Return those of a stage after a forward and its backward."""
    given = programs.activations(SIZE)
    alone = programs.Alone(gpt.make_part(1, 3, SIZE), *given, products)
    alone.both()
    return {name: value.cpu() for name, value in alone.gradients().items()}


@pytest.mark.worlds
@pytest.mark.parametrize("products", ["best", "xla"])
def test_our_sides_compute_what_eager_does(worlds: Worlds, products: str) -> None:
    (found,) = worlds.run(gradients, ranks=1, args=(products,))
    module, (x, grad) = gpt.make_part(1, 3, SIZE), programs.activations(SIZE)
    module(x).backward(grad)
    expected = {name: value.grad for name, value in module.named_parameters()}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)

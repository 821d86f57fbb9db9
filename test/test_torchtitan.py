"""torchtitan's Llama 3, cut by torchtitan's own code, trains as it does unsplit.

Tolerance 2e-5 of the largest value, float32: sums in another order than in eager, as in
test_parity, through attention. torchtitan is no dependency; without it nothing runs.
"""

import copy
import sys

import pytest
import torch
from joining import join
from torchrun import ROOT

from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds

# Not "torchtitan", which the folder of the example would be.
pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)


def compare(schedule_name: str) -> dict[str, float]:
    """Return the relative errors of the loss and of a rank's gradients."""
    sys.path.append(str(ROOT / "examples" / "torchtitan"))
    from llama3_stages import batch, cross_entropy_loss, debug_model, pipelined

    join()
    model = debug_model()
    reference = copy.deepcopy(model)
    tokens, labels = batch()
    schedule, parts, is_first, is_last = pipelined(model, schedule_name)
    targets, losses = (labels, []) if is_last else (None, None)
    args = (tokens,) if is_first else ()
    schedule.step(*args, target=targets, losses=losses)
    expected = cross_entropy_loss(reference(tokens), labels)
    expected.backward()
    errors = {}
    if is_last:
        loss = torch.stack(losses).sum().item()
        errors["loss"] = abs(loss / expected.item() - 1)
    wanted = dict(reference.named_parameters())
    for part in parts:
        for name, parameter in part.named_parameters():
            grad = wanted.pop(name).grad
            error = (parameter.grad.cpu() - grad).abs().max() / grad.abs().max()
            errors[name] = float(error)
    return errors


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_loss_and_gradients_are_the_unsplit_models(
    worlds: Worlds, schedule: str
) -> None:
    ranks = worlds.run(compare, ranks=2, devices=2, args=(schedule,))
    found = {name: error for errors in ranks for name, error in errors.items()}
    # Nine weights of each of six layers, and three more.
    assert len(found) == sum(map(len, ranks)) == 1 + 6 * 9 + 3
    assert {name: error for name, error in found.items() if not error < 2e-5} == {}

"""A sample of torch's operators computes what eager does, or is refused by name.

`make ops` runs all of them.
"""

import pytest
from ops.table import class_of, results_of

from torch_xla_pp import xla_compat

pytestmark = pytest.mark.xla

RIGHT = (
    "cat",
    "einsum",
    "matmul",
    "nn.functional.conv2d",
    "nn.functional.cross_entropy",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "nn.functional.linear",
    "nn.functional.rms_norm",
    "nn.functional.silu",
    "tril",
    "where",
)
DECOMPOSED = (
    "addmm",
    "as_strided",
    "cdist",
    "diag",
    "linalg.cross",
    "logaddexp",
    "nn.functional.adaptive_avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.celu",
    "nn.functional.dropout",
    "nn.functional.elu",
    "nn.functional.glu",
    "nn.functional.hardsigmoid",
    "nn.functional.hardswish",
    "nn.functional.hardtanh",
    "nn.functional.kl_div",
    "nn.functional.pixel_shuffle",
    "nn.functional.relu6",
    "nn.functional.selu",
    "norm.inf",
    "std",
)
REFUSED = ("fft.rfft", "lgamma", "linalg.qr", "masked_select", "median")


def outcome(name: str) -> str:
    xla_compat.enable_spmd()
    results = results_of(name, most=3)
    found = class_of(results)
    wrong = [record for record in results if record["kind"] == "wrong"]
    return f"{found}: {wrong[0]}" if wrong else found


@pytest.mark.parametrize("name", RIGHT)
def test_an_operator_is_right(name: str) -> None:
    assert outcome(name) == "right"


@pytest.mark.parametrize("name", DECOMPOSED)
def test_an_operator_is_right_as_others_stand_in_for_it(name: str) -> None:
    assert outcome(name) == "decomposed"


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_is_refused_by_name(name: str) -> None:
    assert outcome(name) == "refused"

import pytest

from torch_xla_pp.advice import counted_once

pytestmark = pytest.mark.pure

ONE, SPLIT = "forward and backward", "forward and backward input"


@pytest.mark.parametrize(
    ("programs", "counted"),
    [
        ({"forward", "loss"}, {"forward", "loss"}),
        ({ONE, "gradient reduction"}, {ONE, "gradient reduction"}),
        ({ONE, SPLIT, "backward weight"}, {ONE}),
        ({SPLIT, "backward weight"}, {SPLIT, "backward weight"}),
        ({ONE, "forward", "loss", "backward"}, {"forward", "loss", "backward"}),
        (
            {SPLIT, "forward", "backward input", "backward weight"},
            {"forward", "backward input", "backward weight"},
        ),
    ],
)
def test_each_part_of_a_microbatch_is_counted_once(
    programs: set[str], counted: set[str]
) -> None:
    assert counted_once(programs) == counted

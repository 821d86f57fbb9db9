import pytest
from hypothesis import given
from strategies import actions
from torch.distributed.pipelining.schedules import _Action

from torch_xla_pp.schedule import Action

pytestmark = pytest.mark.pure


@given(actions())
def test_an_action_prints_and_parses_as_upstream(action: Action) -> None:
    assert Action.from_text(str(action)) == action
    assert str(_Action.from_str(str(action))) == str(action)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(stage=2, kind="F", microbatch=0)),
        ("1I3", Action(stage=1, kind="I", microbatch=3)),
        ("0W3", Action(stage=0, kind="W", microbatch=3)),
        (" 1B2 ", Action(stage=1, kind="B", microbatch=2)),
        ("12F34", Action(stage=12, kind="F", microbatch=34)),
    ],
)
def test_texts_of_actions(text: str, action: Action) -> None:
    assert Action.from_text(text) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2G0", "2F0 1F0", "-1F0", "2F0x"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected stage, kind and microbatch such as"):
        Action.from_text(text)


@pytest.mark.parametrize(
    ("stage", "kind", "microbatch"), [(-1, "F", 0), (0, "F", -1), (0, "SEND_F", 0)]
)
def test_impossible_actions_are_refused(stage: int, kind: str, microbatch: int) -> None:
    with pytest.raises(ValueError, match="expected a stage and a microbatch that"):
        Action(stage=stage, kind=kind, microbatch=microbatch)

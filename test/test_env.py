"""Environment variables are read in one place and refused clearly."""

import pytest

from torch_xla_pp import env

pytestmark = pytest.mark.pure


def test_the_transport_is_one_of_two_or_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCH_XLA_PP_TRANSPORT", raising=False)
    assert env.transport() is None
    for name in ("in_graph", "host"):
        monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", name)
        assert env.transport() == name
    monkeypatch.setenv("TORCH_XLA_PP_TRANSPORT", "ingraph")
    with pytest.raises(ValueError, match="TORCH_XLA_PP_TRANSPORT: expected one of"):
        env.transport()

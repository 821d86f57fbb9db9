"""What gloo prints and nobody can act on is left out; all else is there."""

import os
from unittest import mock

import pytest

from torch_xla_pp.transport.gloo_compat import without_lines

pytestmark = pytest.mark.pure


def test_lines_with_the_prefix_are_dropped_and_others_follow(
    capfd: pytest.CaptureFixture[str],
) -> None:
    os.write(1, b"before\n")
    with pytest.raises(ValueError, match="raised"), without_lines(b"[Gloo] Rank "):
        os.write(1, b"[Gloo] Rank 0 is connected\nof another\n[Gloo] Error\n")
        raise ValueError("raised")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nof another\n[Gloo] Error\nafter\n"


def test_without_a_place_for_lines_all_are_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with (
        mock.patch("tempfile.TemporaryFile", side_effect=OSError("full")),
        without_lines(b"[Gloo] Rank "),
    ):
        os.write(1, b"[Gloo] Rank 0\n")
    assert capfd.readouterr().out == "[Gloo] Rank 0\n"

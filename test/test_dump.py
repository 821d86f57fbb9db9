"""Texts for people go into the folder of the rank, or nowhere."""

from pathlib import Path

import pytest

from torch_xla_pp.dump import dump

pytestmark = pytest.mark.pure


def test_a_text_replaces_that_of_the_same_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_XLA_PP_DUMP_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    dump("a.txt", lambda: "one")
    dump("a.txt", lambda: "two")
    assert (tmp_path / "rank3" / "a.txt").read_text() == "two"


def test_a_folder_that_cannot_be_written_to_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_XLA_PP_DUMP_DIR", str(tmp_path / "file"))
    dump("a.txt", lambda: "text")
    assert "TORCH_XLA_PP_DUMP_DIR: a.txt was not written" in caplog.text

"""What the code of the pages prints is what the pages show."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pages
import pytest

from torch_xla_pp.testing import Worlds


def check(page: str, printed: Sequence[str]) -> None:
    blocks = pages.blocks_of(page)
    assert blocks
    for block, text in zip(blocks, printed, strict=True):
        shown, got = pages.comparable(block.shown), pages.comparable(text)
        assert shown == got, f"{page}: {block.code}\nRun: make pages"


@pytest.mark.pure
@pytest.mark.parametrize("page", pages.PURE)
def test_pages_without_devices_show_what_they_print(page: str) -> None:
    check(page, pages.run_here([block.code for block in pages.blocks_of(page)]))


@pytest.mark.worlds
@pytest.mark.parametrize("page", pages.RANKS)
def test_pages_for_ranks_show_what_they_print(page: str, worlds: Worlds) -> None:
    check(page, pages.run_in_ranks(page, worlds))


@pytest.mark.worlds
def test_the_example_of_the_five_steps_shows_what_it_prints(tmp_path: Path) -> None:
    for page, printed in pages.run_example(tmp_path).items():
        check(page, printed)


@pytest.mark.pure
def test_pictures_are_what_their_script_draws() -> None:
    folder = pages.DOCS / "pictures"
    for name, text in load(folder / "draw.py").pictures().items():
        assert (folder / name).read_text() == text, f"{name}. Run: make pages"


@pytest.mark.worlds
def test_pictures_of_recorded_steps_can_be_made_again(tmp_path: Path) -> None:
    folder = pages.DOCS / "pictures"
    load(folder / "measure.py").draw(tmp_path, "tiny", rounds=1)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in folder.glob("measured-*.svg")}


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.pure
def test_every_variable_of_the_package_is_in_the_reference() -> None:
    source = (pages.ROOT / "torch_xla_pp" / "env.py").read_text()
    page = (pages.DOCS / "reference" / "environment.md").read_text()
    variables = set(re.findall(r"TORCH_XLA_PP_[A-Z_]+", source))
    assert variables
    assert all(f"`{name}`" in page for name in variables)

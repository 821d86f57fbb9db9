"""Run the code of the docs and compare what it prints with what the pages show.

    python test/pages.py

writes what was printed into the pages. A `text` block right behind a `python` block
is what that block prints: on all ranks, those that print the same counted once.

A page of `PURE` runs in one process without devices, one of `RANKS` in as many ranks
and devices of each as stand there. The pages of `EXAMPLE` are one script for two ranks
of two devices.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import run_afresh
from torchrun import ROOT

from torch_xla_pp.testing import Worlds

DOCS = ROOT / "docs"
PURE = (
    "how-to/advice.md",
    "how-to/attention-kernel.md",
    "how-to/choose-a-schedule.md",
    "how-to/plan.md",
    "how-to/write-a-schedule.md",
)
RANKS = {
    "how-to/debug-a-hang.md": (2, 1),
    "how-to/verify.md": (2, 1),
    "how-to/write-a-training-loop.md": (2, 1),
    "spmd-pipeline.md": (1, 2),
}
EXAMPLE = tuple(
    f"explanation/{name}.md"
    for name in ("split", "plan", "schedule", "run", "compile", "data-flow")
)

_BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
_FRACTION = re.compile(r"\b(\d+)\.\d+ s\b")
_MARK = "\x1e"


class Block(NamedTuple):
    """The code of a block, and its output in the page."""

    code: str
    shown: str


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, with "" for those that show nothing."""
    found = _BLOCK.findall((DOCS / page).read_text())
    return [Block(code, shown) for code, shown in found]


def run_here(codes: Sequence[str]) -> list[str]:
    """Run blocks one after the other in this process; return what each prints.

    Files that they write are gone afterwards.
    """
    names: dict[str, Any] = {"__name__": "page"}
    printed = []
    environment = dict(os.environ)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            for code in codes:
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(code, "page", "exec"), names)
                printed.append(out.getvalue())
    finally:
        os.environ.clear()
        os.environ.update(environment)
    return printed


def run_in_ranks(page: str, worlds: Worlds) -> list[str]:
    """Run a page in its ranks; return what each of its blocks prints."""
    codes = [block.code for block in blocks_of(page)]
    ranks, devices = RANKS[page]
    return _merged(worlds.run(run_here, ranks=ranks, devices=devices, args=(codes,)))


def run_example(folder: Path) -> dict[str, list[str]]:
    """Run the example that goes through pages; return what their blocks print."""
    blocks = {page: blocks_of(page) for page in EXAMPLE}
    script = folder / "example.py"
    code = ["import os, sys", f"os.chdir({str(folder)!r})"]
    code += ["sys.stdout = open(f'printed.{os.environ[\"RANK\"]}', 'w')"]
    for block in (block for page in EXAMPLE for block in blocks[page]):
        code += [f"print({_MARK!r}, end='', flush=True)", block.code]
    script.write_text("\n".join([*code, "sys.stdout.close()"]))
    run_afresh(script, ranks=2, devices=2)
    ranks = [(folder / f"printed.{rank}").read_text() for rank in range(2)]
    left = iter(_merged([text.split(_MARK)[1:] for text in ranks]))
    return {page: [next(left) for _ in blocks[page]] for page in EXAMPLE}


def _merged(ranks: Sequence[Sequence[str]]) -> list[str]:
    """Join what ranks print, block by block; equal texts are kept once."""
    joined = ["".join(dict.fromkeys(texts)) for texts in zip(*ranks, strict=True)]
    return [_FRACTION.sub(r"\1 s", text) for text in joined]


def comparable(text: str) -> str | list[str]:
    """Return what of a printed text is the same on all machines.

    Of HLO that is what it sends and receives, and the number of its parameters.
    """
    if "custom_call_target" in text:
        return re.findall(r'custom_call_target="(.*?)"|\b(parameter)\(', text)
    return re.sub(r"\b\d+ s\b", "some s", text)


def write(page: str, printed: Sequence[str]) -> None:
    """Put what was printed into a page."""
    left = iter(printed)

    def block(match: re.Match[str]) -> str:
        text = next(left)
        shown = f"\n```text\n{text}```\n" if text else ""
        return f"```python\n{match[1]}```\n{shown}"

    path = DOCS / page
    path.write_text(_BLOCK.sub(block, path.read_text()))


def main() -> None:
    """Run all pages and write what they print."""
    for page in PURE:
        write(page, run_here([block.code for block in blocks_of(page)]))
    with Worlds() as worlds:
        for page in RANKS:
            write(page, run_in_ranks(page, worlds))
    with tempfile.TemporaryDirectory() as folder:
        for page, printed in run_example(Path(folder)).items():
            write(page, printed)


if __name__ == "__main__":
    main()

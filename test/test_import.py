"""Importing the package loads next to nothing, and changes what the docs list."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import ROOT

import torch_xla_pp as xpp

SOURCE = Path(xpp.__file__)

# Prints what there is before and after a statement, as JSON.
COMPARE = """
import json, logging, os, signal, sys, threading, warnings

def facts():
    return dict(
        environment=dict(os.environ),
        loaded=sorted({"torch", "torch_xla", "numpy"} & set(sys.modules)),
        finders=[getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
        hooks=[f.__module__ for f in (sys.excepthook, threading.excepthook)],
        signals=[str(signal.getsignal(s)) for s in signal.valid_signals()],
        threads=threading.active_count(),
        warnings=len(warnings.filters),
        handlers=len(logging.getLogger().handlers),
        folder=os.getcwd(),
    )

before = facts()
STATEMENT
print(json.dumps([before, facts()]))
"""


def run(script: str, **variables: str) -> str:
    """Run a script in a new process, in which nothing is set that could be."""
    kept = {"PATH", "HOME", "LD_LIBRARY_PATH", "XDG_CACHE_HOME"} & set(os.environ)
    env = {name: os.environ[name] for name in kept}
    env |= {"PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", **variables}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def changed_by(statement: str, **variables: str) -> dict[str, tuple[object, object]]:
    """Return what a statement changes: fact → before and after."""
    printed = run(COMPARE.replace("STATEMENT", statement), **variables)
    before, after = json.loads(printed.splitlines()[-1])
    return {
        fact: (before[fact], after[fact])
        for fact in before
        if before[fact] != after[fact]
    }


def variables_set(change: object) -> set[str]:
    before, after = change  # type: ignore[misc]
    return {n for n in {*before, *after} if before.get(n) != after.get(n)}


def listed_as_set() -> set[str]:
    """Return the variables that the docs list as set by the package."""
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    _, _, after = page.partition("## Set by this package")
    rows = [row for row in after.partition("\n## ")[0].splitlines() if "|" in row]
    return {n for row in rows for n in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.mark.pure
def test_an_import_sets_the_variables_that_the_docs_list_and_adds_two_finders() -> None:
    changed = changed_by("import torch_xla_pp", CPU_NUM_DEVICES="64")
    assert changed.keys() == {"environment", "finders"}
    by_ucx = {name for name in listed_as_set() if name.startswith("UCX_")}
    # Set when torch_xla is loaded, which knows the kind of devices.
    for_cpu = {"XLA_FLAGS", "PJRT_NPROC"}
    assert variables_set(changed["environment"]) == listed_as_set() - by_ucx - for_cpu
    before, after = changed["finders"]
    assert after == ["_Watch", "_Watch", *before]  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["CPU", "TPU"])
def test_torch_xla_finds_what_cpu_devices_need_and_no_others(kind: str) -> None:
    printed = run(
        "import torch_xla_pp, torch_xla, os\n"
        "print(os.environ.get('XLA_FLAGS', ''), os.environ.get('PJRT_NPROC'))",
        PJRT_DEVICE=kind,
        CPU_NUM_DEVICES="64",
    )
    flags = {"--xla_cpu_use_xnnpack=false", "--xla_cpu_use_fusion_emitters=false"}
    assert flags & set(printed.split()) == (flags if kind == "CPU" else set())
    assert printed.split()[-1] == ("129" if kind == "CPU" else "None")


@pytest.mark.pure
def test_what_the_user_has_set_stays() -> None:
    mine = dict.fromkeys(listed_as_set(), "1000")
    mine["XLA_FLAGS"] = "--xla_cpu_use_xnnpack=true --xla_cpu_use_fusion_emitters=true"
    changed = changed_by("import torch_xla_pp", CPU_NUM_DEVICES="64", **mine)
    assert changed.keys() == {"finders"}


@pytest.mark.pure
def test_the_command_line_needs_no_torch_however_it_is_called() -> None:
    for options in ([], ["-X", "dev"]):
        command = [sys.executable, *options, "-X", "importtime", "-m", "torch_xla_pp"]
        done = subprocess.run(
            [*command, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        )
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "torch_xla_pp.cli" in loaded
        assert not {"torch", "torch_xla", "numpy"} & loaded


def test_the_use_of_all_names_changes_nothing_that_the_docs_do_not_list() -> None:
    """What torch and torch_xla change when they are imported is not counted."""
    theirs = "import torch, torch_xla, torch._dynamo, torch.distributed.pipelining"
    extern = changed_by(theirs)
    ours = changed_by(f"{theirs}\nimport torch_xla_pp\nfrom torch_xla_pp import *")
    assert ours.keys() - extern.keys() <= {"environment"}
    for fact in ("finders", "hooks", "signals", "threads", "handlers"):
        assert ours.get(fact) == extern.get(fact)
    names = variables_set(ours["environment"])
    if "environment" in extern:
        names -= variables_set(extern["environment"])
    assert names <= listed_as_set()


@pytest.mark.parametrize(
    "imports",
    [
        "import torch_xla_pp\nimport torch.distributed as dist",
        "import torch.distributed as dist\nimport torch_xla_pp",
        "import torch_xla\nimport torch_xla_pp\nimport torch.distributed as dist",
    ],
)
def test_a_group_can_be_made_before_any_name_is_used(
    imports: str, tmp_path: Path
) -> None:
    script = f"""
{imports}
import sys
assert "torch_xla_pp.transport" not in sys.modules
method = "file://{tmp_path}/store"
dist.init_process_group("xla_pp", rank=0, world_size=1, init_method=method)
value = torch_xla_pp.device()
import torch
one = torch.ones(2, device=value)
dist.all_reduce(one)
print(dist.get_backend(), type(dist.group.WORLD).__name__, one.tolist())
dist.destroy_process_group()
"""
    assert run(script).split("\n")[-2] == "xla_pp XlaPpProcessGroup [1.0, 1.0]"


@pytest.mark.pure
def test_what_runs_after_an_import_runs_once_and_leaves_the_source_readable() -> None:
    script = """
import json, sys
from torch_xla_pp.on_import import once_imported
seen = []
once_imported("json", lambda: seen.append("json"))
once_imported("colorsys", lambda: seen.append("colorsys" in sys.modules))
import inspect, importlib, colorsys
assert "def rgb_to_yiq" in inspect.getsource(colorsys)
importlib.reload(colorsys)
print(seen, len([f for f in sys.meta_path if type(f).__name__ == "_Watch"]))
"""
    # Those that are left wait for torch.distributed and torch_xla.
    assert run(script) == "['json', True] 2\n"


@pytest.mark.pure
def test_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(SOURCE.read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        home = str(node.module).removeprefix("torch_xla_pp").removeprefix(".")
        seen |= {alias.name: home for alias in node.names}
    assert seen == xpp._HOME_OF | dict.fromkeys(xpp._ROOMS, "")
    assert sorted(seen) == xpp.__all__
    assert set(xpp.__all__) <= set(dir(xpp))


@pytest.mark.pure
def test_no_name_is_hidden_by_a_part_of_the_package() -> None:
    """Importing a part sets an attribute of the package, which a name must not be."""
    parts = {path.stem for path in SOURCE.parent.iterdir()}
    assert parts & set(xpp.__all__) == set(xpp._ROOMS)


@pytest.mark.pure
def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'torch_xla_pp' has no attribute 'Pip'"):
        xpp.Pip  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("room", ["cpu", "runtime", "xla_compat", "transport"])
def test_each_room_can_be_imported_first(room: str) -> None:
    """Whichever loads torch_xla, what XLA reads is set then."""
    script = f"""
import torch_xla_pp.{room}
import os, torch_xla_pp
print(os.environ["XLA_FLAGS"])
"""
    assert "xnnpack=false" in run(script)

"""An import goes only downward, and only to what a folder exports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

PACKAGE = "torch_xla_pp"
ROOT = Path(__file__).parent.parent / PACKAGE
LAYERS = (
    ("errors", "env"),
    ("mesh", "timeline", "xla_compat"),
    ("graph", "transport"),
    ("plan",),
    ("schedule", "compile"),
    ("simulate", "runtime", "checkpoint"),
    ("planner", "launch"),
    ("pipeline", "__init__", "testing"),
)
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}
PURE = {"mesh", "graph", "plan", "schedule", "timeline", "simulate", "planner"}
EFFECTS = ("torch_xla", "torch.distributed")
XLA_PRIVATE = "xla_compat.py"


def imports_of(source: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each imported module with the names taken from it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, []
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "." * node.level + (node.module or ""), []
            else:
                yield node.module or "", [alias.name for alias in node.names]


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def faults_of(path: str, source: str) -> list[str]:
    """List what a file of the package may not import; `path` is relative to it."""
    parts = Path(path).with_suffix("").parts
    home = parts[0]
    found = []
    if home not in LAYER_OF:
        return [f"{path}: {home} is in no layer"]
    for module, names in imports_of(source):
        if module.startswith("."):
            found.append(f"{path}: relative import {module}")
        if is_in(module, PACKAGE):
            found += own_faults(path, home, module, names)
            continue
        if home in PURE and any(is_in(module, effect) for effect in EFFECTS):
            found.append(f"{path}: a pure folder imports {module}")
        private = [n for n in (*module.split("."), *names) if n.startswith("_")]
        if is_in(module, "torch_xla") and private and path != XLA_PRIVATE:
            found.append(f"{path}: private {private} of torch_xla")
    if path != XLA_PRIVATE and "_XLAC" in names_in(source):
        found.append(f"{path}: uses _XLAC")
    return found


def own_faults(path: str, home: str, module: str, names: list[str]) -> list[str]:
    """List what is wrong with an import from the package itself."""
    parts = module.split(".")[1:]
    targets = [parts[0]] if parts else [n for n in names if n in LAYER_OF]
    found = []
    for target in targets:
        if target == home:
            continue
        if LAYER_OF.get(target, len(LAYERS)) >= LAYER_OF[home]:
            same = LAYER_OF.get(target) == LAYER_OF[home] == len(LAYERS) - 1
            if not (same and home == "__init__"):
                found.append(f"{path}: imports upward from {target}")
        if len(parts) > 1:
            found.append(f"{path}: imports {module}, which {target} does not export")
    return found


def names_in(source: str) -> set[str]:
    """Return the identifiers of a file, without comments and texts."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def cycles_in(folder: Path) -> list[str]:
    """Return the files of a folder that import each other in a circle."""
    name = folder.name
    edges: dict[str, set[str]] = {}
    for file in folder.glob("*.py"):
        prefix = f"{PACKAGE}.{name}."
        edges[file.stem] = {
            module.removeprefix(prefix)
            for module, _ in imports_of(file.read_text())
            if module.startswith(prefix)
        }
    while free := [stem for stem, needs in edges.items() if not needs & set(edges)]:
        for stem in free:
            del edges[stem]
    return sorted(edges)


def files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_the_package_keeps_its_layers() -> None:
    faults = []
    for file in files():
        faults += faults_of(str(file.relative_to(ROOT)), file.read_text())
    assert faults == []


def test_no_folder_has_a_cycle() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir()]
    assert len(folders) > 5
    assert {f.name: c for f in folders if (c := cycles_in(f))} == {}


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("mesh/a.py", "import torch_xla", "a pure folder imports torch_xla"),
        ("graph/a.py", "from torch.distributed import nn", "a pure folder imports"),
        ("graph/a.py", "from torch_xla_pp.runtime import X", "upward from runtime"),
        ("mesh/a.py", "from torch_xla_pp import xla_compat", "upward from xla_compat"),
        ("compile/a.py", "from torch_xla_pp.mesh.rules import x", "does not export"),
        ("compile/a.py", "import torch_xla._XLAC", "private"),
        ("compile/a.py", "import torch_xla\ntorch_xla._XLAC.f()", "uses _XLAC"),
        ("runtime/a.py", "from .stage import X", "relative import"),
        ("utils/a.py", "", "is in no layer"),
    ],
)
def test_a_violation_is_found(path: str, source: str, fault: str) -> None:
    assert any(fault in text for text in faults_of(path, source))


def test_a_cycle_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "compile"
    folder.mkdir()
    (folder / "a.py").write_text(f"from {PACKAGE}.compile.b import x")
    (folder / "b.py").write_text(f"import {PACKAGE}.compile.a")
    (folder / "c.py").write_text(f"from {PACKAGE}.compile.a import y")
    assert cycles_in(folder) == ["a", "b", "c"]

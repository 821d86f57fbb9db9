"""An import goes only downward, and only to what a folder exports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

PACKAGE = "torch_xla_pp"
ROOT = Path(__file__).parent.parent / PACKAGE
LAYERS = (
    ("errors", "env", "text", "record", "phases", "collector", "local_job", "protobuf"),
    ("work", "mesh", "schedule", "timeline", "xla_compat", "dump", "accelerators"),
    ("hlo", "native", "advice"),
    ("cpu", "deferred", "transport"),
    ("graph", "world"),
    ("plan", "simulate", "torch_compat"),
    ("planner",),
    ("compile",),
    ("channels", "state"),
    ("runtime",),
    ("checkpoint", "profile", "launch", "parity"),
    ("torch_pipe",),
    ("tracing", "planned", "health", "retracing", "length_buckets", "padding"),
    ("pipe", "spmd"),
    ("measuring", "fitting"),
    ("cli",),
    ("on_import",),
    ("__init__", "__main__"),
    ("testing",),
)
LAYER_OF = {name: i for i, names in enumerate(LAYERS) for name in names}
PURE = {"work", "mesh", "hlo", "graph", "plan", "schedule", "timeline", "simulate"}
PURE |= {"planner"}
# These do not even need torch.
PLAIN = {"record", "phases", "work", "schedule", "timeline", "simulate", "planner"}
PLAIN |= {"accelerators", "advice", "collector"}
EFFECTS = ("torch_xla", "_XLAC", "torch.distributed")
XLA_PRIVATE = "xla_compat.py"
GROUPS_PRIVATE = "transport/gloo_compat.py"
# Private modules of torch that have no public counterpart, and are used anywhere.
ANYWHERE = ("torch.utils._pytree", "torch._ops", "torch._subclasses.fake_tensor")


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
        reached = (module, *(f"{module}.{name}" for name in names))
        if home in PURE:
            effects = [m for m in reached if any(is_in(m, e) for e in EFFECTS)]
            found += [f"{path}: a pure folder imports {m}" for m in effects[:1]]
        if home in PLAIN and is_in(module, "torch"):
            found.append(f"{path}: a folder that needs no torch imports {module}")
        private = [n for n in (*module.split("."), *names) if n.startswith("_")]
        of_xla = is_in(module, "torch_xla") or is_in(module, "_XLAC")
        if of_xla and private and path != XLA_PRIVATE:
            found.append(f"{path}: private {private} of torch_xla")
    if path != GROUPS_PRIVATE:
        used = privates_of_groups(source)
        found += [f"{path}: private {name} of torch.distributed" for name in used]
    if path != XLA_PRIVATE and "_XLAC" in names_in(source):
        found.append(f"{path}: uses _XLAC")
    return found


def own_faults(path: str, home: str, module: str, names: list[str]) -> list[str]:
    """List what is wrong with an import from the package itself."""
    parts = module.split(".")[1:]
    # What is no member comes from the package's own __init__.
    members = [n if n in LAYER_OF else "__init__" for n in names or ["__init__"]]
    found = []
    for target in [parts[0]] if parts else members:
        if target == home:
            continue
        if LAYER_OF.get(target, len(LAYERS)) >= LAYER_OF[home]:
            found.append(f"{path}: imports upward from {target}")
        if len(parts) > 1:
            found.append(f"{path}: imports {module}, which {target} does not export")
        elif parts:
            hidden = [n for n in names if not is_exported(n, target)]
            found += [
                f"{path}: imports {n}, which {target} does not export" for n in hidden
            ]
    return found


def is_exported(name: str, member: str) -> bool:
    """Tell if a folder exports a name, or a single file does not hide it."""
    init = ROOT / member / "__init__.py"
    if not init.exists():
        return not name.startswith("_")
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return name in ast.literal_eval(node.value)
    return False


def privates_of_groups(source: str) -> list[str]:
    """Return the private names of torch.distributed itself that a file uses."""
    found = [
        module
        for module, _ in imports_of(source)
        if "_distributed_c10d" in module or "distributed.distributed_c10d" in module
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if ast.unparse(node.value).split(".")[0] in ("dist", "distributed_c10d"):
                found.append(node.attr)
    return found


def privates_of_torch(source: str) -> set[str]:
    """Return what a file imports of torch's private modules, or by private names."""
    found = set()
    for module, names in imports_of(source):
        if is_in(module, "torch"):
            found |= {f"{module}.{name}" for name in names} or {module}
    return {
        name
        for name in found
        if any(part.startswith("_") for part in name.split("."))
        and not any(is_in(name, public) for public in ANYWHERE)
    }


def names_in(source: str) -> set[str]:
    """Return the identifiers of a file, without comments and texts."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


def cycles_in(root: Path) -> list[str]:
    """Return the files below a folder that import each other in a circle."""
    paths = {".".join(f.relative_to(root).with_suffix("").parts) for f in files(root)}
    edges: dict[str, set[str]] = {path: set() for path in paths}
    for path in paths:
        source = (root / path.replace(".", "/")).with_suffix(".py").read_text()
        for module, names in imports_of(source):
            if not is_in(module, PACKAGE):
                continue
            own = module.removeprefix(PACKAGE).removeprefix(".")
            reached = [f"{own}.{name}".lstrip(".") for name in names]
            folders = [f"{target}.__init__" for target in reached]
            below = [target for target in reached + folders if target in paths]
            # An import of a name from a folder runs the folder's own file.
            if own not in paths and len(below) < len(names or ["*"]):
                below.append(f"{own}.__init__".lstrip("."))
            edges[path] |= {*below, own} & paths
    for path, needs in edges.items():
        needs.discard(path)
    while free := [path for path, needs in edges.items() if not needs & set(edges)]:
        for path in free:
            del edges[path]
    return sorted(edges)


def files(root: Path = ROOT) -> list[Path]:
    return sorted(root.rglob("*.py"))


def test_the_package_keeps_its_layers() -> None:
    faults = []
    for file in files():
        faults += faults_of(str(file.relative_to(ROOT)), file.read_text())
    assert faults == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycles_in(ROOT) == []


def test_what_torch_does_not_promise_is_imported_by_one_file_each() -> None:
    listed = (ROOT.parent / "CONTRIBUTING.md").read_text()
    homes: dict[str, list[str]] = {}
    for file in files():
        path = str(file.relative_to(ROOT))
        # The worker of tests imports modules early, and uses nothing of them.
        if not path.startswith("testing/"):
            for name in privates_of_torch(file.read_text()):
                homes.setdefault(name, []).append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
    assert len(homes) > 9
    assert {p for (p,) in homes.values() if f"| `{p}` |" not in listed} == set()


def test_imports_of_private_parts_of_torch_are_found() -> None:
    source = (
        "import torch._decomp\nfrom torch.utils import _pytree\n"
        "from torch.a import _b\nfrom torch import nn\n"
        "from torch._ops import OpOverload\nimport torch_x._c\n"
    )
    assert privates_of_torch(source) == {"torch._decomp", "torch.a._b"}


def test_every_name_in_the_layers_is_there() -> None:
    found = {path.stem for path in ROOT.iterdir()}
    assert set(LAYER_OF) <= found


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
        ("compile/a.py", "import _XLAC", "private"),
        ("mesh/a.py", "from torch import distributed", "a pure folder imports"),
        ("mesh/a.py", "import _XLAC", "a pure folder imports _XLAC"),
        ("transport/a.py", "dist.Backend._plugins", "private _plugins of torch.dist"),
        (
            "transport/a.py",
            "from torch._C._distributed_c10d import Store",
            "private torch._C._distributed_c10d of torch.distributed",
        ),
        ("compile/a.py", "from torch_xla_pp.mesh import rules", "does not export"),
        ("compile/a.py", "from torch_xla_pp.env import _hidden", "does not export"),
        ("runtime/a.py", "from torch_xla_pp import Pipe", "upward from __init__"),
        ("runtime/a.py", "import torch_xla_pp", "upward from __init__"),
        (
            "mesh/a.py",
            "if TYPE_CHECKING:\n    from torch_xla_pp.graph import X",
            "upward from graph",
        ),
        ("runtime/a.py", "from .stage import X", "relative import"),
        ("utils/a.py", "", "is in no layer"),
    ],
)
def test_a_violation_is_found(path: str, source: str, fault: str) -> None:
    assert any(fault in text for text in faults_of(path, source))


def test_a_cycle_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "compile"
    folder.mkdir()
    (tmp_path / "__init__.py").write_text(f"from {PACKAGE}.compile import y")
    (folder / "__init__.py").write_text("")
    (folder / "d.py").write_text(f"from {PACKAGE} import compile")
    (folder / "a.py").write_text(f"from {PACKAGE}.compile.b import x")
    (folder / "b.py").write_text(f"import {PACKAGE}.compile.a")
    (folder / "c.py").write_text(f"from {PACKAGE}.compile.a import y")
    assert cycles_in(tmp_path) == ["compile.a", "compile.b", "compile.c"]


def test_a_cycle_through_folders_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "compile" / "sums"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(f"from {PACKAGE}.compile.sums.a import X")
    (folder / "a.py").write_text(f"from {PACKAGE}.compile import b")
    (tmp_path / "compile" / "b.py").write_text("")
    assert cycles_in(tmp_path) == []
    (tmp_path / "compile" / "b.py").write_text(f"from {PACKAGE}.compile.sums import X")
    found = ["compile.b", "compile.sums.__init__", "compile.sums.a"]
    assert cycles_in(tmp_path) == found

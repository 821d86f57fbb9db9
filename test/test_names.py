"""A file's name and a public name mean one thing in the whole package."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parent.parent / "torch_xla_pp"
# Its names are thin ones for another package's, and always written `xla_compat.name`.
QUALIFIED = "xla_compat"
# Pairs that are there until one of them is renamed, each with the reason.
KNOWN: Mapping[str, str] = {
    "verify": "of an order in schedule/, of a pipeline's numbers in parity/",
}


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.stem != "__init__")


def public_names(source: str) -> Iterator[str]:
    """Yield classes, functions and types of a file that others may use."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if is_type(name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) if is_type(name):
                yield name


def is_type(name: str) -> bool:
    """Tell names such as `InputsFrom` from those of values, such as `KINDS`."""
    return name[:1].isupper() and not name.isupper()


def twice(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names that several files have, and these files."""
    found: dict[str, list[str]] = {}
    for name, path in named:
        if not name.startswith("_"):
            found.setdefault(name, []).append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_files_name_is_there_once() -> None:
    stems = twice((path.stem, str(path.relative_to(ROOT))) for path in files())
    assert {stem: paths for stem, paths in stems.items() if stem not in KNOWN} == {}


def test_a_public_name_is_there_once() -> None:
    names = twice(
        (name, str(path.relative_to(ROOT)))
        for path in files()
        if path.stem != QUALIFIED
        for name in public_names(path.read_text())
    )
    assert {name: paths for name, paths in names.items() if name not in KNOWN} == {}


def test_names_that_need_their_files_name_are_written_with_it() -> None:
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module != f"torch_xla_pp.{QUALIFIED}", path


def test_a_name_that_is_there_twice_is_found() -> None:
    source = "class A: ...\nIn = int\nOut: type = A\ndef f(): ...\nMANY = 1\n_g = 2\n"
    assert [*public_names(source)] == ["A", "In", "Out", "f"]
    assert twice([("A", "x.py"), ("B", "x.py"), ("A", "y.py")]) == {
        "A": ["x.py", "y.py"]
    }
    assert twice([("_A", "x.py"), ("_A", "y.py")]) == {}


Definition = ast.ClassDef | ast.FunctionDef


def definitions(body: Iterable[ast.stmt]) -> Iterator[Definition]:
    """Yield classes and functions, those within them included."""
    for node in body:
        if isinstance(node, Definition):
            yield node
            yield from definitions(node.body)


def first_lines(source: str) -> Iterator[tuple[bool, str, str]]:
    """Yield the first lines of docstrings, of whom, and whether that is a class."""
    for node in definitions(ast.parse(source).body):
        text = ast.get_docstring(node, clean=False)
        if text and not any("property" in ast.dump(d) for d in node.decorator_list):
            yield isinstance(node, ast.ClassDef), node.name, text.partition("\n")[0]


def is_command(line: str, verbs: Iterable[str]) -> bool:
    """Distinguish "Say how …" and "Says how …" from "A text of …" and "Sums over …"."""
    word, _, rest = line.partition(" ")
    if word in verbs:
        return True
    stems = {word.removesuffix("s"), word.removesuffix("es"), word[:-3] + "y"}
    is_plural = rest.startswith(("of ", "per ", "over ", "between ", "that ", "which "))
    return word.endswith("s") and not (is_plural or stems.isdisjoint(verbs))


def commands_of_classes(sources: Iterable[str]) -> dict[str, str]:
    """Return the classes whose docstrings begin as those of functions do."""
    lines = [line for source in sources for line in first_lines(source)]
    verbs = {line.split()[0] for is_class, _, line in lines if not is_class}
    return {
        name: line
        for is_class, name, line in lines
        if is_class and is_command(line, verbs)
    }


def test_docstrings_of_classes_are_nouns() -> None:
    assert commands_of_classes(path.read_text() for path in files()) == {}


def test_a_command_in_the_docstring_of_a_class_is_found() -> None:
    source = '''
class A:
    """{}"""
    @property
    def size(self): """Size of all."""
    def hold(self): """Hold one."""
    def copy(self): """Copy one."""
    def leave(self): """Pass on."""
'''
    for line in "Hold one.", "Holds one.", "Copies a value.", "Passes on a value.":
        assert commands_of_classes([source.format(line)]) == {"A": line}
    for line in "Copies of values.", "Size of one.", "A pass over a graph.":
        assert commands_of_classes([source.format(line)]) == {}

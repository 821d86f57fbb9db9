"""Names of values are made and taken apart in one file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_xla_pp.compile import names

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2] / "torch_xla_pp"
HOME = ROOT / "compile" / "names.py"
ROWS = [line for line in (names.__doc__ or "").splitlines() if line.startswith("`")]
NAMED = [row.split("`")[1] for row in ROWS if not row.startswith("`NAME`")]
KINDS = {name.split(":")[0] for name in NAMED if ":" in name}
# A whole name or the beginning of one: no text for people, which has spaces.
PIECE = re.compile(rf"({'|'.join(sorted(KINDS))}):[^\s]*")


def texts_of(source: str) -> Iterator[str]:
    """Yield the texts of a file without its docstrings."""
    tree = ast.parse(source)
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in docs:
            if isinstance(node.value, str):
                yield node.value


def pieces_in(source: str) -> list[str]:
    return [text for text in texts_of(source) if PIECE.fullmatch(text)]


def test_no_other_file_makes_a_name_or_takes_one_apart() -> None:
    files = [path for path in ROOT.rglob("*.py") if path != HOME]
    found = {str(path): pieces_in(path.read_text()) for path in files}
    assert {path: pieces for path, pieces in found.items() if pieces} == {}


@pytest.mark.parametrize(
    "source",
    [
        'f"param:{name}"',
        'x = role.removeprefix("input:")',
        'x = "tangent:0"',
        'x = f"route:in:{stage}"',
        'x = f"part:{name}@{stage}"',
    ],
)
def test_a_name_made_elsewhere_is_found(source: str) -> None:
    assert pieces_in(f"def f():\n    y = 1\n    return {source.removeprefix('x = ')}")


def test_a_message_for_people_is_no_name() -> None:
    assert not pieces_in('raise ValueError(f"input: expected {a}, got {b}")')


def test_the_table_lists_every_name_that_the_file_makes() -> None:
    made = [
        names.parameter_role("NAME"),
        names.buffer_role("NAME"),
        names.constant_role("KEY"),
        names.input_role("INDEX"),  # type: ignore[arg-type]
        names.tangent("INDEX"),  # type: ignore[arg-type]
        names.tangent_part("INDEX", "STAGE"),  # type: ignore[arg-type]
        names.accumulator("ROLE"),
        names.accumulated("ROLE"),
        names.given_grad("ROLE"),
        names.input_grad("INDEX"),  # type: ignore[arg-type]
        names.copied("ROLE"),
        names.shared_part("NAME", "STAGE"),  # type: ignore[arg-type]
        names.shared_total("NAME"),
        *(
            names.bucket_name(kind, "BUCKET", "REPLICA")  # type: ignore[arg-type]
            for kind in ("chunk", "part", "mean")
        ),
        names.route_in("STAGE"),  # type: ignore[arg-type]
        names.route_out("STAGE"),  # type: ignore[arg-type]
        names.MARK,
        names.SEED,
        names.storage_of("NAME"),
        names.bundle_name("MAKER", "DTYPE"),  # type: ignore[arg-type]
        names.flat_name("MAKER"),
        names.captured_scalar("SLOT"),  # type: ignore[arg-type]
        names.TOKEN,
        names.output_name("INDEX"),  # type: ignore[arg-type]
        names.of_loss("NAME"),
    ]
    assert sorted(NAMED) == sorted(made)


def test_a_role_names_what_it_was_made_of() -> None:
    roles = {
        names.parameter_role("a.param:b"): names.is_parameter,
        names.buffer_role("a.buffer:b"): names.is_buffer,
        names.input_role(12): names.is_input,
        names.tangent(12): names.is_tangent,
    }
    for role in roles:
        assert [is_one for is_one in roles.values() if is_one(role)] == [roles[role]]
    assert names.name_in_module(names.parameter_role("a.param:b")) == "a.param:b"
    assert names.name_in_module(names.buffer_role("a.buffer:b")) == "a.buffer:b"
    assert names.index_of_input(names.input_role(12)) == 12
    assert names.is_route(names.route_in(1)) and names.is_route(names.route_out(1))
    assert not names.is_route(names.parameter_role("route:in:1"))

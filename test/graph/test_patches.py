"""What was put in a place is gone afterwards, and what was there is back."""

import types
from pathlib import Path

import pytest

from torch_xla_pp.graph import replaced

pytestmark = pytest.mark.pure

PACKAGE = Path(__file__).parents[2] / "torch_xla_pp"


class Base:
    kept = "base"

    @staticmethod
    def plain() -> str:
        return "plain"


class Derived(Base):
    own = "own"


@pytest.mark.parametrize(
    ("owner", "name"), [(Derived, "own"), (Derived, "kept"), (Base, "plain")]
)
def test_a_class_has_another_attribute_for_a_while(owner: type, name: str) -> None:
    before = dict(vars(owner))
    with replaced(owner, name, "new"):
        assert getattr(owner, name) == "new"
    assert dict(vars(owner)) == before


def test_so_has_a_module_even_if_its_block_fails() -> None:
    module = types.ModuleType("module")
    module.x = 1  # type: ignore[attr-defined]
    with pytest.raises(KeyError), replaced(module, "x", 2), replaced(module, "x", 3):
        raise KeyError(module.x)
    assert module.x == 1


def test_what_is_not_there_is_not_replaced() -> None:
    with pytest.raises(AttributeError, match="gone"), replaced(Base, "gone", 1):
        pass
    assert not hasattr(Base, "gone")


def test_the_package_mocks_nothing() -> None:
    files = [*PACKAGE.rglob("*.py")]
    assert files
    assert [file for file in files if "unittest" in file.read_text()] == []

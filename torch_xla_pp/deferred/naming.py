"""The tensors whose random numbers recorded operations draw.

Each random operation belongs to the first named tensor of a model that needs it. The
first name that a tensor gets counts.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from torch_xla_pp.deferred.module_tensors import all_places_of
from torch_xla_pp.deferred.recipes import needed_for, record_of

# An attribute of modules that were built under deferred_init.
_MARK = "_torch_xla_pp_is_deferred"


def name_values(module: nn.Module) -> None:
    """Give names to recorded values of a module that have none."""
    _name(_named(module))


def name_built(modules: Sequence[nn.Module]) -> None:
    """Give names to what was recorded while modules were built.

    Args:
        modules: All modules, in the order in which they got their first part. Names
            begin at modules that are part of no other; later ones of equal names get a
            number.
    """
    inner = {child for module in modules for child in module.children()}
    counts: dict[str, int] = {}
    for root in [module for module in modules if module not in inner]:
        named = list(_named(root))
        _name((_numbered(name, counts.get(name, 0)), value) for name, value in named)
        for name in dict.fromkeys(name for name, _ in named):
            counts[name] = counts.get(name, 0) + 1
    for module in modules:
        setattr(module, _MARK, True)


def is_deferred(module: nn.Module) -> bool:
    """Return whether a module was built under deferred_init, or copied from one."""
    return hasattr(module, _MARK)


def _numbered(name: str, number: int) -> str:
    return f"{name}#{number}" if number else name


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((place.name, place.tensor) for place in all_places_of(module))


def _name(named: Iterable[tuple[str, Tensor]]) -> None:
    for name, value in named:
        record = record_of(value) if value.is_meta else None
        if record is None:
            continue
        drawn = [op for op in needed_for(record) if op.seed is not None]
        count = sum(op.owner is not None and op.owner[0] == name for op in drawn)
        for operation in drawn:
            if operation.owner is None:
                operation.owner = (name, count)
                count += 1
        if record.version is None:
            record.version = value._version

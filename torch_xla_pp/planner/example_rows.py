"""Examples of a microbatch with other rows, for tensors of any library."""

from collections.abc import Iterator, Mapping
from typing import Any


def with_rows(values: Any, rows: int) -> Any:
    """Return values whose batch tensors have another number of rows.

    Args:
        values: Tensors, or tuples, lists and mappings of them, arbitrarily nested. The
            first tensor with a dimension has the rows of the batch.
        rows: The new number: rows are left out, or repeated from the first one on.
    """
    found = next(_first_sizes(values), 0)
    return values if found in (0, rows) else _changed(values, found, rows)


def _first_sizes(values: Any) -> Iterator[int]:
    """Yield the first dimension of each tensor that has one."""
    if isinstance(values, Mapping):
        values = tuple(values.values())
    if isinstance(values, tuple | list):
        for value in values:
            yield from _first_sizes(value)
    elif getattr(values, "shape", None):
        yield values.shape[0]


def _changed(values: Any, found: int, rows: int) -> Any:
    if isinstance(values, Mapping):
        return {key: _changed(item, found, rows) for key, item in values.items()}
    if isinstance(values, tuple | list):
        items = [_changed(item, found, rows) for item in values]
        is_named = hasattr(values, "_fields")
        return type(values)(*items) if is_named else type(values)(items)
    if getattr(values, "shape", None) and values.shape[0] == found:
        return values[[place % found for place in range(rows)]]
    return values

"""Attributes of torch that are replaced for a while, where it has no switch.

Each use is a context manager whose docstring says what is replaced, why, and when the
patch can go.
"""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put a value in the place of an attribute of a module or class.

    Args:
        owner: The module or class.
        name: The attribute.
        value: Its value inside the context.

    Raises:
        AttributeError: There is no such attribute, e.g. in another version of torch.
    """
    getattr(owner, name)
    has_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if has_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)

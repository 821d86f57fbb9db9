"""What the package logs, for tests that look at it."""

import contextlib
import logging
from collections.abc import Iterator


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the texts that the package logs inside the context."""
    logger, kept = logging.getLogger("torch_xla_pp"), _Kept()
    logger.addHandler(kept)
    try:
        yield kept.texts
    finally:
        logger.removeHandler(kept)

"""Dumps of what a run has made, for inspection."""

import logging
from collections.abc import Callable

from torch_xla_pp import env

_logger = logging.getLogger(__name__)


def dump(name: str, text: Callable[[], str]) -> None:
    """Write a text into this rank's folder of `TORCH_XLA_PP_DUMP_DIR`, if that is set.

    The text is made only then, and replaces one of the same name. If it cannot be
    written, the run goes on.
    """
    folder = env.dump_dir()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text())
    except OSError as error:
        _logger.warning(
            "TORCH_XLA_PP_DUMP_DIR: %s was not written: %s. Name a folder that can be "
            "written to.",
            name,
            error,
        )

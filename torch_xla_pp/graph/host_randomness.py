"""Random numbers of Python, which a trace draws once and a program never.

Another thread may have drawn them at the same time, so there is a warning, not an
error. torch.export refuses models that draw them, but does not see stages made by hand.
"""

import contextlib
import logging
import random
from collections.abc import Iterator

import numpy as np

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def noting_host_randomness(what: str) -> Iterator[None]:
    """Warn of random numbers that Python or NumPy draw in the block.

    Args:
        what: What is traced in the block, for the text.
    """
    before = _generators()
    yield
    after = _generators()
    drawn = [name for name, state in before.items() if state != after[name]]
    if drawn:
        _logger.warning(
            "%s drew random numbers of %s while it was traced: every step has these "
            "same ones. Draw them by torch.rand and its like, or pass them as inputs.",
            what,
            " and ".join(drawn),
        )


def _generators() -> dict[str, object]:
    """Return the states of the generators that a module is likely to use."""
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    return {"random": random.getstate(), "numpy.random": repr(state)}

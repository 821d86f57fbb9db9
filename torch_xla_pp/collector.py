"""The garbage collector while models are traced and compiled.

To trace a model makes so many objects that Python's collector searches all of them for
cycles again and again, and with them those of every module that was imported: a tenth
of a small model's first step.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def sparing_old_objects() -> Iterator[None]:
    """Let the collector look only at objects that are made in the block.

    What is there before is left alone until the block ends, as by `gc.freeze`. Cycles
    among objects of the block are freed as ever. A block inside of another one, or of a
    program that has frozen objects itself, does nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

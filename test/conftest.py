"""Fixtures of the whole suite."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no fault of the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# For tests in this process; worlds choose their own. Read when torch_xla is loaded.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "2"
# Models are built from configurations.
os.environ["HF_HUB_OFFLINE"] = "1"

from torch_xla_pp.testing import Worlds  # noqa: E402


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The pool of worker processes."""
    with Worlds() as pool:
        yield pool


@pytest.fixture(scope="session")
def large_pages() -> None:
    """Skip tests of large pages where the system has none."""
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not pages.exists() or "[never]" in pages.read_text():
        pytest.skip("this system has no large pages")

"""One process with two virtual devices, in the place of those of a rank."""

from compile.conftest import mesh

__all__ = ["mesh"]

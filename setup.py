"""Build the package; all metadata is in pyproject.toml."""

from setuptools import setup

setup()

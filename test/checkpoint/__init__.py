"""Tests of checkpoints; a package, as there is a benchmark of that name."""

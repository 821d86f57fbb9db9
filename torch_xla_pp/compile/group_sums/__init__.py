"""Gradients summed per group of rows: reduced once a step, not per microbatch."""

"""Marks of the scores of attention, which say whose they are.

Which devices have a query is known only once a joint graph is there. Until then an
operator tells scores from other values; what becomes of it, see `compile.query_rows`.
"""

from typing import Any

import torch
from torch import Tensor

_NAME = "torch_xla_pp::scores_of"

torch.library.define(_NAME, "(Tensor scores, Tensor query) -> Tensor")


def _copy(scores: Tensor, query: Tensor) -> Tensor:
    """Return a copy: an operator must not return an alias of its operand."""
    return scores.clone()


def _fake(scores: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(scores)


torch.library.impl(_NAME, "CompositeExplicitAutograd", _copy)
torch.library.register_fake(_NAME, _fake)

SCORES_OF = torch.ops.torch_xla_pp.scores_of.default
"""Takes scores, `(batch, heads, length, length of keys)`, and their queries."""

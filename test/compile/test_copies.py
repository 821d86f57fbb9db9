"""Copies of views by calls of ours are those of eager PyTorch."""

import pytest
import torch
from compile.own_calls import check
from torch import Tensor

from torch_xla_pp import xla_compat
from torch_xla_pp.testing import Worlds

pytestmark = pytest.mark.worlds


def copied(x: Tensor) -> Tensor:
    """Return a copy in the order of rows, as attention makes it."""
    return x.clone(memory_format=torch.contiguous_format)


def joined(x: Tensor) -> Tensor:
    """Return a view in another order whose first dimension was two."""
    return x.view(-1, *x.shape[2:]).transpose(0, 1)


def copies() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, 33)
    check(lambda x: (copied(x.transpose(1, 2)),), x, num_calls=1)
    check(lambda x: (copied(x.transpose(-1, -2)),), x, num_calls=1)
    check(lambda x: (copied(x.permute(3, 2, 1, 0)),), x, num_calls=1)
    check(lambda x: (copied(x.transpose(1, 2)[..., 3:20]),), x, num_calls=1)
    check(lambda x: (copied(x[:, 1].t() if x.dim() == 2 else x[1]),), x, num_calls=0)
    check(lambda x: (copied(x[:, :, 2].transpose(0, 1) * 0.3),), x, num_calls=1)
    check(lambda x: (copied(torch.mul(x.mT, 0.5).mul(3).mT.mT),), x, num_calls=1)
    check(lambda x: (copied(x[:, :1].expand(3, 5, 4, 33)),), x, num_calls=1)
    check(lambda x: tuple(copied(y.mT) for y in x.split(3, 1)), x, num_calls=2)
    check(lambda x: tuple(copied(y.mT) for y in x.unbind(2)), x, num_calls=4)
    # A copy of a copy reads what the first one does, unless that shows no view of it.
    check(lambda x: (copied(copied(x.mT).transpose(0, 1)),), x, num_calls=1)
    check(lambda x: (copied(joined(copied(x.transpose(1, 2)))),), x, num_calls=2)
    large = torch.randn(700, 1100)
    check(lambda x: (copied(x.t()), copied(x[:, 7:].t() * 2.0)), large, num_calls=2)


def test_copies_of_views_are_those_of_eager(worlds: Worlds) -> None:
    worlds.run(copies, ranks=1, devices=1)


def others() -> None:
    xla_compat.enable_spmd()
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, 6)
    # What is in order is no copy; what is of other types is copied by XLA.
    check(lambda x: (copied(x), copied(x[1])), x, num_calls=0)
    check(lambda x: (copied(x.long().mT),), x, num_calls=0)
    check(lambda x: (copied(x.double().mT),), x, num_calls=0)
    check(lambda x: (copied(x[:0].mT),), x, num_calls=0)
    check(lambda x: (copied((x + 1)[:, :, :, 2].mT),), x, num_calls=0)
    # Four dimensions that do not lie one in the other, and five.
    check(lambda x: (copied(x[0].permute(3, 1, 2, 0)),), x, num_calls=1)
    check(lambda x: (copied(x.permute(4, 3, 2, 1, 0)),), x, num_calls=0)


def test_other_copies_are_left_to_xla(worlds: Worlds) -> None:
    worlds.run(others, ranks=1, devices=1)

"""Striped sequences are the same sequences, with even work under a causal mask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from torch_xla_pp.mesh import striped_positions

pytestmark = pytest.mark.pure


@given(st.integers(1, 8), st.integers(1, 5))
def test_shards_have_all_positions_and_equal_work(shards: int, chunk: int) -> None:
    length = 2 * shards * chunk
    positions = striped_positions(length, shards)
    assert sorted(positions.tolist()) == list(range(length))
    work = (positions + 1).reshape(shards, -1).sum(1)
    assert len(set(work.tolist())) == 1


def test_attention_in_this_order_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 8, 4)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    positions = striped_positions(8, 2)
    mask = positions[:, None] >= positions
    parts = (value[:, positions] for value in (q, k, v))
    striped = F.scaled_dot_product_attention(*parts, attn_mask=mask)
    torch.testing.assert_close(striped, expected[:, positions])


@pytest.mark.parametrize(("length", "shards"), [(6, 2), (8, 0)])
def test_a_length_that_cannot_be_cut_is_refused(length: int, shards: int) -> None:
    with pytest.raises(ValueError, match=f"for {shards} shards, got {length}"):
        striped_positions(length, shards)

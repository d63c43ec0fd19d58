"""Padding, trimming, splitting: zeros, any dim, nothing changed in place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import graph_parallel as gp
from unisono.comm import world
from unisono.compat import gp_utils
from unisono.errors import PartitionError
from unisono.graph_parallel.padding import split_tensor


@settings(deadline=None)
@given(size=st.integers(0, 50), parts=st.integers(1, 9))
def test_sizes_are_balanced_and_chunks_are_exactly_as_many_as_asked(size, parts):
    sizes = gp.size_list_fn(size, parts)
    assert sizes == [size // parts + (r < size % parts) for r in range(parts)]
    x = torch.arange(2.0 * size).view(2, size)
    for contiguous in (False, True):
        chunks = split_tensor(x, parts, contiguous_chunks=contiguous)
        assert [c.shape[1] for c in chunks] == sizes
        assert torch.equal(torch.cat(chunks, 1), x)
        assert all(c.is_contiguous() for c in chunks) or not contiguous


@pytest.mark.ranks(3)
def test_padding_and_trimming_to_the_ranks_of_the_row():
    gp.setup_gp({"gp_gpus": 3})
    x = torch.ones(4, 5)
    padded = gp.pad_tensor(x)
    assert padded.shape == (4, 6)
    assert torch.equal(padded[:, 5], torch.zeros(4))
    assert gp.pad_tensor(x, 0).shape == (6, 5)
    assert gp.pad_tensor(x, 0, 9).shape == (9, 5)
    assert gp.pad_tensor(padded) is padded
    assert gp.pad_input(x, 7).shape == (7, 5)
    with pytest.raises(PartitionError, match="3 < 5") as caught:
        gp.pad_tensor(x, -1, 3)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(TypeError, match="float, expected int"):
        gp.pad_tensor(x, 0, 4.5)
    sizes = torch.tensor([3, 1, 0])
    trimmed, after = gp.trim_tensor(x, sizes)
    assert trimmed.shape == (3, 5)
    assert after.tolist() == [3, 0, 0]
    assert sizes.tolist() == [3, 1, 0]
    assert gp.trim_tensor(x, dim=1)[0].shape == (4, 3)
    assert gp.trim_tensor(trimmed, sizes)[1] is not sizes
    trimmed, after = gp.trim_tensor(torch.ones(5), torch.tensor([4, 1, 0]))
    assert (trimmed.shape[0], after.tolist()) == (3, [3, 0, 0])
    gp.cleanup_gp()


@pytest.mark.ranks([1, 2, 3])
def test_bare_movements_leave_their_input_and_are_never_aliases():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size})
    x = torch.arange(10.0).view(2, 5)
    kept = x.clone()
    block = gp_utils.own_block(x)
    assert block.is_contiguous()
    block += 1
    total = gp_utils.summed(None, x)
    assert torch.equal(total, comm.size * x)
    total += 1
    assert torch.equal(x, kept)
    assert torch.equal(gp_utils.joined(gp_utils.own_block(x)), x)
    assert torch.equal(gp_utils.joined(gp_utils.own_block(x, 0), 0), x)
    gp.cleanup_gp()

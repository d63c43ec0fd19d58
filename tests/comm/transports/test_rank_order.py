"""Reductions of blocks in rank order, without any ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.comm.reductions import reduce_in_rank_order
from unisono.comm.transports.rank_order import OPS, reducer
from unisono.comm.transports.shm.sums import cut
from unisono.errors import UnisonoError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def defined(op, dtype):
    try:
        reducer(dtype, op)
    except UnisonoError:
        return False
    return True


@given(
    st.sampled_from(DTYPES),
    st.sampled_from(OPS),
    st.integers(2, 5),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_the_bits_are_those_of_the_reference(dtype, op, parts, n, seed):
    if not defined(op, dtype) or op == "mean":
        return
    generator = torch.Generator().manual_seed(seed)
    blocks = [(torch.randn(n, generator=generator) * 4).to(dtype) for _ in range(parts)]
    expected = torch.empty(n, dtype=dtype)
    reduce_in_rank_order(expected, [b.clone() for b in blocks], op)
    rule = reducer(dtype, op)
    for target in range(3):  # a place of its own, or that of one of the first two blocks
        work = [b.clone() for b in blocks]
        out = torch.empty(n, dtype=dtype) if target == 2 else work[target]
        rule.fill(rule.array(out), [rule.array(b) for b in work])
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


def test_means_are_rounded_once_and_do_not_overflow():
    blocks = [torch.full((3,), 60_000.0, dtype=torch.float16) for _ in range(4)]
    rule = reducer(torch.float16, "mean")
    out = torch.empty(3, dtype=torch.float16)
    rule.fill(rule.array(out), [rule.array(b) for b in blocks])
    assert out.tolist() == [60_000.0] * 3  # their sum is beyond float16


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.float32, "and"),
        (torch.int32, "mean"),
        (torch.complex64, "max"),
        (torch.float8_e4m3fn, "sum"),
        (torch.complex32, "sum"),
        (torch.float32, "average"),
    ],
)
def test_undefined_reductions_are_refused(dtype, op):
    with pytest.raises(UnisonoError, match=op):
        reducer(dtype, op)


@given(st.integers(0, 10**6), st.integers(1, 9))
def test_pieces_cover_everything_once_at_whole_cache_lines(nbytes, parts):
    cuts = cut(nbytes, parts)
    assert cuts[0] == 0
    assert cuts[-1] == nbytes
    assert cuts == sorted(cuts)
    assert all(c % 64 == 0 or c == nbytes for c in cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_overflow_and_infinities_add_up_in_silence(dtype):
    largest = torch.finfo(dtype).max
    first = torch.tensor([largest, torch.inf, 1.0], dtype=dtype)
    second = torch.tensor([largest, -torch.inf, 2.0], dtype=dtype)
    plan = reducer(dtype, "sum")
    out = torch.empty_like(first)
    plan.fill(plan.array(out), [plan.array(first), plan.array(second)])  # warnings are errors here
    assert out[0] == torch.inf
    assert out[1].isnan()
    assert out[2] == 3

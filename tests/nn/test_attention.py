"""Attention over a cut sequence: results, gradients and second derivatives of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import unisono
from unisono.comm import trace
from unisono.errors import CollectiveMismatch, PartitionError
from unisono.nn.functional import ring_attention, ulysses_attention
from unisono.operators import concat_replicated, slice_replicated
from unisono.topology.decompose import bounds

WAYS = [ring_attention, ulysses_attention]
UNEVEN = [5, 0, 7, 2]
"""Tokens of each rank; one has none."""


def drawn(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def own(x: Tensor, sizes: list[int], dim: int = -2) -> Tensor:
    start, stop = bounds(sizes)[unisono.world().rank :][:2]
    return x.narrow(dim, start, stop - start)


def plain(q, k, v, mask=None, **options):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, mask, **options)


def cases(ranks: int):
    """Yield a name, the sizes of queries and keys, whole tensors, a mask and options."""
    sizes = UNEVEN[:ranks]
    n = sum(sizes)
    q, k, v = (drawn(2, 4, n, 3, seed=i) for i in range(3))
    yield "plain", sizes, sizes, (q, k, v), None, {}
    yield "causal", sizes, sizes, (q, k, v), None, {"is_causal": True, "scale": 0.3}
    hidden = drawn(n, n, seed=3) > -0.5
    hidden[1] = False  # a query that sees nothing
    yield "hidden keys", sizes, sizes, (q, k, v), hidden, {}
    yield "bias", sizes, sizes, (q, k, v), drawn(2, 4, n, n, seed=4), {}
    yield "keys alone", sizes, sizes, (q, k, v), drawn(2, 1, 1, n, seed=6) > 0, {}
    few = (q, drawn(2, 4 // 2, n, 3, seed=7), drawn(2, 4 // 2, n, 5, seed=8))
    yield "grouped", sizes, sizes, few, None, {"enable_gqa": True, "is_causal": True}
    keys = [3, 4, 0, 6][:ranks]
    crossed = (q, drawn(2, 4, sum(keys), 3, seed=9), drawn(2, 4, sum(keys), 3, seed=10))
    yield "crossed", sizes, keys, crossed, None, {"is_causal": True}
    yield "no batch", sizes, sizes, (q[0], k[0], v[0]), None, {}
    # Rows of a rank with one query look like a mask for all of them.
    for single in ([1] * ranks, [1, 3, 2, 1][:ranks]):
        n = sum(single)
        few = tuple(x[:, :, :n] for x in (q, k, v))
        yield f"rows of {single}", single, single, few, drawn(n, n, seed=12), {}
        yield f"rows of {single} by heads", single, single, few, drawn(2, 4, n, n, seed=13), {}
        yield f"keys of {single}", single, single, few, drawn(2, 1, 1, n, seed=14) > -1, {}


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"])
def test_results_and_derivatives_are_those_of_one_process():
    comm = unisono.world()
    for way, case in itertools.product(WAYS, cases(comm.size)):
        name, sizes, keys, tensors, mask, options = case
        if way is ulysses_attention and any(x.shape[-3] % comm.size for x in tensors):
            continue
        whole = [x.clone().requires_grad_() for x in tensors]
        bias = None if mask is None else mask.clone().requires_grad_(mask.is_floating_point())
        up = drawn(*whole[0].shape[:-1], whole[2].shape[-1], seed=11)
        wanted = plain(*whole, bias, **options)
        inputs = [*whole, *([bias] if bias is not None and bias.requires_grad else [])]
        first = torch.autograd.grad((wanted.sin() * up).sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), inputs)

        cuts = [sizes, keys, keys, sizes]
        blocks = [
            own(x.detach(), cut).clone().requires_grad_()
            for x, cut in zip(inputs, cuts, strict=False)
        ]
        rows = bias if bias is None or bias.shape[-2] == 1 else own(bias, sizes)
        rows = blocks[3] if len(blocks) > 3 else rows
        sent = {} if name == "plain" else {"sizes": sizes, "key_sizes": keys}
        found = way(*blocks[:3], rows, **options, **sent)
        torch.testing.assert_close(found, own(wanted, sizes), msg=name, rtol=1e-9, atol=1e-11)
        loss = (found.sin() * own(up, sizes)).sum()
        grads = torch.autograd.grad(loss, blocks, retain_graph=True)
        again = torch.autograd.grad(loss, blocks, create_graph=True)
        twice = torch.autograd.grad(sum((g**2).sum() for g in again), blocks)
        for got, want in ((grads, first), (again, first), (twice, second)):
            for g, w, cut in zip(got, want, cuts, strict=False):
                torch.testing.assert_close(g, own(w, cut), msg=name, rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_numbers_agree_with_second_derivatives(way, is_causal):
    comm, sizes = unisono.world(), [3, 2]
    torch.manual_seed(0)  # what gradgradcheck draws is the same on all ranks

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own_part = [slice_replicated(x, 1, sizes, comm=comm) for x in (q, k, v)]
        options = {"is_causal": is_causal, "enable_gqa": True, "sizes": sizes}
        return concat_replicated(way(*own_part, **options), 1, sizes, comm=comm)

    # Two heads of keys for four of queries; values with other features than keys.
    whole = [drawn(4, 5, 2), drawn(2, 5, 2, seed=1), drawn(2, 5, 3, seed=2)]
    inputs = [x.requires_grad_() for x in whole]
    assert torch.autograd.gradcheck(attention, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, inputs, fast_mode=True)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_dropped_weights_are_dropped_in_the_gradients_too(way):
    comm = unisono.world()
    sizes, heads = [4, 3, 0][: comm.size], 6
    n = sum(sizes)
    q, k, v = (drawn(1, heads, n, n, seed=i) for i in range(3))
    mine = [own(x, sizes).clone().requires_grad_() for x in (q, k, v)]
    eye = torch.eye(n, dtype=torch.float64).expand(1, heads, n, n)
    torch.manual_seed(5)
    weights = way(mine[0], mine[1], own(eye, sizes), dropout_p=0.4)
    torch.manual_seed(5)
    found = way(*mine, dropout_p=0.4)
    kept = comm.all_gather((weights != 0).double(), 2)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = (whole[0] @ whole[1].mT / n**0.5).softmax(-1) * kept / 0.6
    torch.testing.assert_close(own(scores, sizes), weights)
    assert 0.4 < kept.mean() < 0.8
    assert not torch.equal(kept[:, 0], kept[:, heads // 2]), "heads drop weights of their own"
    wanted = scores @ whole[2]
    torch.testing.assert_close(found, own(wanted, sizes))
    want = torch.autograd.grad(wanted.square().sum(), whole, create_graph=True)
    got = torch.autograd.grad(found.square().sum(), mine, create_graph=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, own(w, sizes))
    found.square().sum().backward(inputs=mine)
    for x, w in zip(mine, want, strict=True):
        torch.testing.assert_close(x.grad, own(w, sizes))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_is_summed_in_float32_and_repeats_its_bits(way):
    q, k, v = (drawn(1, 2, 64, 16, seed=i, dtype=torch.float32).bfloat16() for i in range(3))
    sizes = [40, 24]
    mine = [own(x, sizes).clone().requires_grad_() for x in (q, k, v)]
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    wanted = plain(*whole, is_causal=True)
    first, again = (way(*mine, is_causal=True) for _ in range(2))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    torch.testing.assert_close(first.float(), own(wanted, sizes), rtol=2e-2, atol=1e-2)
    want = torch.autograd.grad(wanted.square().sum(), whole)
    got = torch.autograd.grad(first.float().square().sum(), mine)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.float(), own(w, sizes), rtol=5e-2, atol=5e-2)
    with torch.autocast("cpu"):
        cast = way(*[x.detach().float().requires_grad_() for x in mine], dropout_p=0.0)
    assert cast.dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_the_ring_keeps_and_sends_no_more_than_blocks():
    q, k, v = (torch.randn(1, 2, 32, 8, requires_grad=True) for _ in range(3))
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.untyped_storage().nbytes())
        return x

    with trace() as events, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = ring_attention(q, k, v, sizes=[32, 32])
    block = q.numel() * 4
    assert sum(kept) <= 4 * block + block // 4, "queries, keys, values, result, a number each"
    assert sum(event.sent for event in events.events) == 2 * block
    with trace() as events:
        y.sum().backward()
    assert sum(event.sent for event in events.events) == 6 * block, "and gradients, twice"


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_refused_on_all_ranks():
    comm = unisono.world()
    q = torch.zeros(1, 3, 4 + comm.rank, 8)
    with pytest.raises(PartitionError, match=r"3 % 2 = 1(.|\n)*HINT: ring_attention"):
        ulysses_attention(q, q, q)
    with pytest.raises(PartitionError, match="enable_gqa=True"):
        ring_attention(q, q[:, :1], q[:, :1])
    with pytest.raises(PartitionError, match=r"4 columns on rank 1(.|\n)*9 keys"):
        ring_attention(q, q, q, torch.zeros(q.shape[2], 9 if comm.rank == 0 else 4))
    with pytest.raises(PartitionError, match="mask that is causal itself"):
        ring_attention(q, q, q, torch.zeros(q.shape[2], 9), is_causal=True)
    for way in WAYS[: 1 + (q.shape[1] % comm.size == 0)]:
        with pytest.raises(PartitionError, match="True or False"):
            way(q, q, q, is_causal=1)
    with pytest.raises(PartitionError, match=r"sizes\[0\] = 3 != 4|sizes\[1\] = 3 != 5"):
        ring_attention(q, q, q, sizes=[3, 3])
    with pytest.raises(CollectiveMismatch, match="must be equal on all ranks"):
        ring_attention(q, q, q, is_causal=comm.rank == 0)
    with pytest.raises(PartitionError, match=r"refused|one floating-point dtype"):
        ring_attention(q, q.double() if comm.rank == 1 else q, q)
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(2)
def test_heads_that_go_around_in_groups_give_the_same(monkeypatch):
    from unisono.nn import attention

    monkeypatch.setattr(attention, "_UNDER_WAY", 600)
    sizes = [9, 5]
    bias = drawn(2, 4, 14, 14, seed=4)
    for groups, mask, causal in ((1, None, True), (2, None, False), (1, bias, False)):
        q = drawn(2, 4, 14, 8, seed=1)
        k, v = (drawn(2, 4 // groups, 14, 8, seed=i) for i in (2, 3))
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"is_causal": causal, "enable_gqa": groups > 1}
        wanted = plain(*whole, mask, **options)
        wanted.square().sum().backward()
        mine = [own(x.detach(), sizes).clone().requires_grad_() for x in whole]
        rows = None if mask is None else own(mask, sizes)
        found = ring_attention(*mine, rows, **options, sizes=sizes)
        found.square().sum().backward()
        torch.testing.assert_close(found, own(wanted, sizes))
        for x, w in zip(mine, whole, strict=True):
            torch.testing.assert_close(x.grad, own(w.grad, sizes))

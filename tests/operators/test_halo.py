"""Halo exchange on real ranks: equal to torch on the whole tensor, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.operators.checks import block_at, drawn

from unisono.comm import world
from unisono.errors import PartitionError
from unisono.operators import halo_add, halo_exchange
from unisono.testing import check_adjoint
from unisono.topology import Partition, decompose, halo


def own_share(y, plan):
    starts = (0, 0, *plan.output_start[2:])
    for dim in range(2, y.dim()):
        y = y.narrow(dim, starts[dim], plan.output_shape[dim])
    return y


SHARDS = {
    "even": [3, 3, 3, 3],
    "uneven": [7, 3, 1, 2],
    "empty": [10, 0, 1, 0],
    "fewer points than ranks": [1, 1, 0, 0],
}
KERNELS = [(3, 1, 1, 1, "zeros"), (2, 2, 0, 1, "zeros"), (5, 1, 1, 1, "replicate")]


@pytest.mark.ranks([1, 2, 3, 4])
@pytest.mark.parametrize("shards", SHARDS)
def test_conv_of_the_windows_has_the_values_and_gradients_of_torch(shards):
    comm = world()
    sizes = SHARDS[shards][: comm.size]
    total = sum(sizes)
    for k, s, p, d, mode in KERNELS:
        if total + 2 * p < k:
            continue
        x, weight = drawn(2, 3, total), drawn(4, 3, k, seed=1)
        cuts = [(0, 2), (0, 3), decompose.bounds(sizes)]
        index = (0, 0, comm.rank)
        plan = halo.plan(cuts, index, (k,), s, p, d, mode)
        whole = x.clone().requires_grad_()
        padded = F.pad(whole, [p, p], mode="constant" if mode == "zeros" else mode)
        expected = F.conv1d(padded, weight, stride=s, dilation=d)
        up = drawn(*expected.shape, seed=2)
        expected.backward(up)

        block = block_at(x, cuts, index).clone().requires_grad_()
        window = halo_exchange(block, plan, comm=comm)
        assert tuple(window.shape) == plan.window_shape
        if plan.output_shape[2]:
            y = F.conv1d(window, weight, stride=s, dilation=d)
            torch.testing.assert_close(y, own_share(expected, plan))
            y.backward(own_share(up, plan))
        else:
            window.sum().backward()
        torch.testing.assert_close(block.grad, block_at(whole.grad, cuts, index))


@pytest.mark.ranks([2, 3, 4])
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_wrapped_mirrored_and_repeated_points_go_home_in_the_adjoint(mode):
    comm = world()
    cuts = [decompose.bounds([2, 1, 3, 0][: comm.size]), (0, 2)]
    plan = halo.plan(cuts, (comm.rank, 0), (4, 2), padding=(2, 1), padding_mode=mode)
    for dtype in (torch.float64, torch.complex128):
        check_adjoint(
            lambda t: halo_exchange(t, plan, comm=comm),
            lambda t: halo_add(t, plan, comm=comm),
            drawn(*plan.block_shape, dtype=dtype, seed=comm.rank),
            drawn(*plan.window_shape, dtype=dtype, seed=10 + comm.rank),
            comm=comm,
            domain="S",
        )


@pytest.mark.ranks([1, 2])
def test_the_constant_of_the_padding_has_no_derivative_of_any_order():
    comm = world()
    cuts = [decompose.split_cuts(5, comm.size)]
    plan = halo.plan(cuts, (comm.rank,), 3, padding=2, fill=7.0)
    x = drawn(*plan.block_shape, seed=comm.rank)
    window, tangent = torch.func.jvp(lambda t: halo_exchange(t, plan, comm=comm), (x,), (x,))
    left, right = plan.fills[0]
    assert left + right > 0
    assert (window == 7.0).sum() == left + right
    assert (tangent == 0.0).sum() == left + right
    assert torch.equal(window[left : len(window) - right], tangent[left : len(window) - right])
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        (halo_exchange(x, plan, comm=comm) ** 2).sum(), x, create_graph=True
    )
    (second,) = torch.autograd.grad(grad.sum(), x)
    shown = halo_add(torch.ones(plan.window_shape, dtype=torch.float64), plan, comm=comm)
    torch.testing.assert_close(second, 2 * shown)


@pytest.mark.ranks(3)
def test_a_partition_of_some_ranks_leaves_the_others_alone():
    p = Partition([2], ranks=(2, 0))
    if not p.active:
        return
    plan = halo.plan(p.cuts([6]), p.index, 3, padding=1)
    x = torch.arange(6.0)[p.local_slices([6])].requires_grad_()
    window = halo_exchange(x, plan, ranks=p.ranks, comm=p.root)
    assert window.tolist() == (
        [0.0, 0.0, 1.0, 2.0, 3.0] if p.rank == 0 else [2.0, 3.0, 4.0, 5.0, 0]
    )
    window.sum().backward()
    assert x.grad.tolist() == ([1.0, 1.0, 2.0] if p.rank == 0 else [2.0, 1.0, 1.0])
    assert torch.equal(window.detach(), halo_exchange(x.detach(), plan, comm=p.comm))


@pytest.mark.ranks(4)
def test_sums_run_in_ascending_rank_order_whoever_arrives_first():
    """1e16 + 1 - 1e16 depends on the order: only ascending ranks give this number."""
    comm = world()
    plan = halo.plan([(0, 1, 2, 3, 4)], (comm.rank,), 7, padding=3)
    seen = torch.tensor([1.0, 1e16, -1e16, 1.0], dtype=torch.float64)[comm.rank]
    block = halo_add(torch.full(plan.window_shape, float(seen), dtype=torch.float64), plan)
    assert block.item() == ((1.0 + 1e16) - 1e16) + 1.0 == 1.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64], ids=str
)
def test_any_dtype_travels_and_stays_what_it_is(dtype):
    comm = world()
    x = torch.tensor([1, 0, 1, 1, 0, 1]).to(dtype)
    cuts = [(0, 4, 6)]
    plan = halo.plan(cuts, (comm.rank,), 3, padding=1, padding_mode="circular")
    window = halo_exchange(block_at(x, cuts, (comm.rank,)), plan, comm=comm)
    assert window.dtype == dtype
    around = torch.cat([x[-1:], x, x[:1]])
    assert torch.equal(window, around[3 * comm.rank : 3 * comm.rank + 5])


@pytest.mark.ranks(2)
def test_channels_last_blocks_give_channels_last_windows():
    comm = world()
    x = drawn(2, 3, 6, 4)
    cuts = [(0, 2), (0, 3), (0, 3, 6), (0, 4)]
    plan = halo.plan(cuts, (0, 0, comm.rank, 0), (3, 3), padding=1)
    block = block_at(x, cuts, (0, 0, comm.rank, 0))
    plain = halo_exchange(block.contiguous(), plan, comm=comm)
    last = halo_exchange(block.contiguous(memory_format=torch.channels_last), plan, comm=comm)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)
    expanded = halo_exchange(block[:1].expand(2, -1, -1, -1), plan, comm=comm)
    assert torch.equal(expanded[0], expanded[1])
    assert torch.equal(expanded[0], plain[0])


@pytest.mark.ranks([1, 2])
def test_a_kernel_that_needs_nothing_copies_nothing():
    comm = world()
    plan = halo.plan([decompose.split_cuts(4, comm.size)], (comm.rank,), 1)
    x = drawn(*plan.block_shape)
    assert halo_exchange(x, plan, comm=comm).data_ptr() == x.data_ptr()
    assert halo_add(x, plan, comm=comm).data_ptr() == x.data_ptr()


@pytest.mark.ranks(2)
def test_plans_of_another_rank_or_shape_are_refused():
    comm = world()
    plan = halo.plan([(0, 3, 6)], (1 - comm.rank,), 3, padding=1)
    with pytest.raises(PartitionError, match="the plan of partition rank"):
        halo_exchange(torch.ones(3), plan, comm=comm)
    mine = halo.plan([(0, 3, 6)], (comm.rank,), 3, padding=1)
    with pytest.raises(PartitionError, match=r"a plan for shape \[3\]"):
        halo_exchange(torch.ones(4), mine, comm=comm)
    with pytest.raises(PartitionError, match=r"halo_add of shape \[3\]"):
        halo_add(torch.ones(3), mine, comm=comm)

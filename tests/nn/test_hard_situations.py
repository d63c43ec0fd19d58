"""Situations in which split layers easily hang, lose gradients or give wrong numbers."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from tests.waiting import scaled_by_load
from torch import nn

import unisono
import unisono.nn as unn
from unisono.comm import groups, trace
from unisono.errors import RankFailed
from unisono.topology import Partition


def block(x, P):
    """Return the own block of a whole tensor; without elements outside of the partition."""
    if not P.active:
        return x.new_empty(x.shape[0], 0)
    return x[P.local_slices(x.shape)].clone()


@pytest.mark.ranks(2)
def test_a_scatter_notices_what_only_its_root_sees_and_flipping_gradients_sets_nothing_up():
    one, two = Partition([1, 1]), Partition([2, 1])
    layer = unn.Repartition(one, two)
    setups = 0
    for shape, dtype in (((4, 3), torch.float32), ((6, 3), torch.float32), ((6, 5), torch.float32),
                         ((6, 5), torch.float64), ((6, 5), torch.complex64), ((6, 5), torch.int32),
                         ((6, 5), torch.bool), ((6, 5), torch.uint8)):  # fmt: skip
        whole = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
        y = layer(whole if one.active else torch.empty(0))
        assert torch.equal(y, whole[two.local_slices(shape)])
        assert y.dtype == dtype
        setups += 1
        assert layer._setups == setups
    whole = torch.arange(30.0).reshape(6, 5)
    for needed in (False, True, False, True):
        x = whole.clone().requires_grad_(needed) if one.active else torch.empty(0)
        y = layer(x)
        assert y.requires_grad == needed
        if needed:
            (y**2).sum().backward()
            if one.active:
                assert torch.equal(x.grad, 2 * whole)
    assert layer._setups == setups + 1


@pytest.mark.ranks(2)
def test_any_memory_layout_of_inputs_and_gradients_gives_right_values(proof):
    P = Partition([1, 1, 2, 1])
    conv = nn.Conv2d(4, 8, 3, padding=1, dtype=torch.float64)
    plain = nn.Sequential(conv, nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 2, 1).double())
    net = nn.Sequential(
        first := unn.DistributedFeatureConv2d(P, 4, 8, 3, padding=1, dtype=torch.float64),
        unn.DistributedMaxPool2d(P, 3, 1, 1),
        unn.DistributedFeatureConv2d(P, 8, 2, 1, dtype=torch.float64),
    )
    net.load_state_dict(plain.state_dict())
    x = proof.drawn(2, 4, 6, 5)
    where = P.local_slices(x.shape)
    shapes = {
        "transposed": (x.transpose(2, 3).contiguous().transpose(2, 3), x),
        "expanded": (x[:1].expand(2, -1, -1, -1), x[:1].expand(2, -1, -1, -1)),
        "strided": (x.repeat_interleave(2, 3)[..., ::2], x),
        "channels last": (x.contiguous(memory_format=torch.channels_last), x),
    }
    for name, (given, whole) in shapes.items():
        own = given[where].detach().requires_grad_()
        z_in = whole.clone().requires_grad_()
        y, z = net(own), plain(z_in)
        torch.testing.assert_close(y, z[P.local_slices(z.shape)], msg=name)
        weights = proof.ramp(z).transpose(2, 3).contiguous().transpose(2, 3)
        y.backward(weights[P.local_slices(z.shape)])  # a gradient that is not contiguous
        z.backward(weights)
        torch.testing.assert_close(own.grad, z_in.grad[where], msg=name)
    last = block(x, P).contiguous(memory_format=torch.channels_last)
    for layer in (
        first,
        unn.DistributedMaxPool2d(P, 3, 1, 1),
        unn.DistributedAvgPool2d(P, 3, 1, 1),
        unn.HaloExchange(P, (3, 3)),
    ):
        y = layer(last)
        assert y.is_contiguous(memory_format=torch.channels_last), type(layer).__name__
    small = torch.ones(1, dtype=torch.float64).expand(3, 4)  # stride 0
    rows = Partition([2, 1])
    assert unn.AllGather(rows, 0)(small).shape == (6, 4)
    assert torch.equal(unn.Repartition(rows, Partition([1, 2]))(small), torch.ones(6, 2).double())


@pytest.mark.ranks(3)
def test_a_broadcast_and_its_sum_work_with_expanded_gradients():
    src, dest = Partition([1]), Partition([3])
    x = torch.ones(2, 3).requires_grad_() if src.active else torch.empty(0)
    unn.Broadcast(src, dest)(x).sum().backward()
    if src.active:
        assert torch.equal(x.grad, torch.full((2, 3), 3.0))


@pytest.mark.ranks(2)
def test_nothing_is_written_in_place_and_autograd_does_not_complain(proof):
    P = Partition([1, 1, 2])
    for kernel, padding in ((1, 0), (3, 1)):
        for before in (nn.Identity(), nn.ReLU(), nn.Sigmoid()):
            torch.manual_seed(0)
            conv = nn.Conv1d(2, 2, kernel, padding=padding, dtype=torch.float64)
            plain = nn.Sequential(before, conv, nn.ReLU(inplace=True), nn.MaxPool1d(1), before)
            net = unn.split(copy.deepcopy(plain), P, blocks=True)
            x = proof.drawn(2, 2, 7)
            own, whole = block(x, P).requires_grad_(), x.clone().requires_grad_()
            kept = own.detach().clone()
            proof.score(net(own)).backward()
            proof.score(plain(whole)).backward()
            assert torch.equal(own.detach(), kept)
            torch.testing.assert_close(own.grad, whole.grad[P.local_slices(x.shape)])
    leaf = torch.ones(1, 2, 4, requires_grad=True)
    same = unn.DistributedMaxPool1d(P, 1)(leaf)
    assert same is not leaf
    one = Partition([1, 1, 1], ranks=[unisono.world().rank], comm=unisono.world())
    for layer in (
        unn.Repartition(one, one),
        unn.HaloExchange(one, (1,)),
        unn.DistributedPad(one, (0, 0)),
    ):
        assert layer(leaf) is not leaf  # an in-place step on the result must not hit a leaf


@pytest.mark.ranks([2, 3])
def test_unbalanced_features_of_a_row_parallel_layer_equal_one_process(proof):
    size = unisono.world().size
    P, Q = Partition([1, 1, size]), Partition([1, size, 1])
    for where, weights in ((P, "replicated"), (Q, "root")):
        ours, theirs = proof.pair(
            lambda P_y=where, w=weights: unn.DistributedLinearReduceScatter(
                P, 7, 5, P_y=P_y, dtype=torch.float64, weights=w
            ),
            lambda: nn.Linear(7, 5, dtype=torch.float64),
        )
        for cut in (6, 3, 0):  # balanced cuts between others; one rank may see no change
            split = (0, cut, 7) if size == 2 else (0, 3, max(3, cut), 7)
            cuts = ((0, 2), (0, 3), split)
            proof.compare(ours, theirs, proof.drawn(2, 3, 7), P, where, cuts=cuts)
        proof.compare(ours, theirs, proof.drawn(2, 3, 7), P, where)


def _channel_norms(P, weights):
    kw = {"dtype": torch.float64, "weights": weights}
    plain = {"dtype": torch.float64}
    tracked = {"affine": True, "track_running_stats": True}
    return [
        (lambda: unn.DistributedBatchNorm(P, 6, **kw), lambda: nn.BatchNorm2d(6, **plain)),
        (lambda: unn.DistributedGroupNorm(P, 6, 6, **kw), lambda: nn.GroupNorm(6, 6, **plain)),
        (
            lambda: unn.DistributedInstanceNorm(P, 6, **tracked, **kw),
            lambda: nn.InstanceNorm2d(6, **tracked, **plain),
        ),
    ]


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("weights", ["replicated", "root"])
def test_unbalanced_channels_of_norms_equal_one_process(weights, proof):
    size = unisono.world().size
    P = Partition([1, 2, size // 2, 1])
    x = proof.drawn(3, 6, 5, 2)
    for make, plain in _channel_norms(P, weights):
        torch.manual_seed(11)
        ours, theirs = make(), plain()
        for cut in (5, 3, 0):
            cuts = ((0, 3), (0, cut, 6), (0, 5) if size == 2 else (0, 1, 5), (0, 2))
            proof.compare(ours, theirs, x, P, cuts=cuts)
        ours.eval(), theirs.eval()
        proof.compare(ours, theirs, x, P, cuts=((0, 3), (0, 1, 6), *cuts[2:]))
        for name, value in unn.full_state_dict(ours).items():
            torch.testing.assert_close(value, theirs.state_dict()[name])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
def test_halos_and_padding_wider_than_the_neighbours_block(mode, proof):
    P = Partition([1, 1, 3])
    for length, kernel, padding in ((6, 9, 4), (7, 11, 5), (3, 5, 2), (4, 4, 3)):
        case = {"kernel_size": kernel, "padding": padding, "padding_mode": mode}
        ours, theirs = proof.pair(
            lambda c=case: unn.DistributedFeatureConv1d(P, 2, 2, **c, dtype=torch.float64),
            lambda c=case: nn.Conv1d(2, 2, **c, dtype=torch.float64),
        )
        proof.compare(ours, theirs, proof.drawn(2, 2, length), P, P)
        proof.compare(ours, theirs, proof.drawn(2, 2, length), P, P, seed=5)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks", [(0,), (2,), (1, 3), (3, 0, 2)])
def test_ranks_outside_of_a_partition_get_nothing_and_disturb_nobody(ranks, proof):
    for case in proof.zoo(ranks):
        case.check()


@pytest.mark.ranks(4)
def test_partitions_may_be_disjoint_or_overlap(proof):
    x = proof.drawn(3, 4, 9)
    for before, after in (((0, 1), (2, 3)), ((0, 1), (1, 2)), ((3, 1), (0, 3)), ((2,), (0, 1))):
        P_x, P_y = (
            Partition([1, 1, len(before)], ranks=before),
            Partition([1, len(after), 1], ranks=after),
        )
        proof.compare(unn.Repartition(P_x, P_y), nn.Identity(), x, P_x, P_y)
    few, one = Partition([1, 2], ranks=[3, 1]), Partition([1, 1], ranks=[0])
    for grid in ((1, 2), (2, 3), (3, 1)):
        ours, theirs = proof.pair(
            lambda g=grid: unn.DistributedLinear(
                few, one, Partition([1, 2], ranks=g), 7, 5
            ).double(),
            lambda: nn.Linear(7, 5).double(),
        )
        proof.compare(ours, theirs, proof.drawn(4, 7), few, one)


@pytest.mark.ranks(3)
def test_results_without_elements_have_the_dtype_of_the_data():
    first, others = Partition([1, 1]), Partition([2, 1], ranks=[1, 2])
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int64):
        x = torch.ones(4, 3).to(dtype) if first.active else torch.empty(5, 0)
        y = unn.Repartition(first, others)(x)
        assert y.dtype == dtype
        assert y.shape == ((2, 3) if others.active else (4, 0))
        z = unn.Broadcast(first, others, preserve_batch=False)(x)
        assert z.dtype == dtype
        assert z.shape == ((4, 3) if others.active else (0,))
    P_w = Partition([2, 1, 1], ranks=[1, 2])
    layer = unn.DistributedGeneralConv1d(
        Partition([1, 1, 1]), Partition([1, 2, 1], ranks=[1, 2]), P_w, 2, 4, 3, groups=2
    ).double()
    y = layer(torch.ones(2, 2, 5).double() if first.active else torch.empty(0))
    assert y.dtype == torch.float64
    assert y.shape == ((2, 0) if first.active else (2, 2, 3))


@pytest.mark.ranks(2)
def test_each_backward_uses_the_plan_of_its_own_forward(proof):
    P = Partition([1, 1, 2])
    conv = nn.Conv1d(2, 3, 3, padding=1, dtype=torch.float64)
    layer = unn.DistributedFeatureConv1d(P, 2, 3, 3, padding=1, dtype=torch.float64)
    conv.load_state_dict(layer.state_dict())
    pairs = []
    for length in (9, 12, 5):
        x = proof.drawn(1, 2, length)
        own, whole = block(x, P).requires_grad_(), x.clone().requires_grad_()
        pairs.append((own, whole, proof.score(layer(own)), proof.score(conv(whole))))
    for own, whole, y, z in reversed(pairs):
        y.backward()
        z.backward()
        torch.testing.assert_close(own.grad, whole.grad[P.local_slices(whole.shape)])
    torch.testing.assert_close(layer.weight.grad, conv.weight.grad)


@pytest.mark.ranks(2)
def test_a_general_convolution_of_space_alone_sends_what_the_simple_one_sends(proof):
    P = Partition([1, 1, 2])
    x = block(proof.drawn(1, 2, 8), P)
    seen = []
    for layer in (
        unn.DistributedFeatureConv1d(P, 2, 3, 3, dtype=torch.float64),
        unn.DistributedGeneralConv1d(P, P, P, 2, 3, 3, dtype=torch.float64),
    ):
        layer(x)
        own = x.clone().requires_grad_()
        with trace() as t:
            layer(own).sum().backward()
        seen.append(sorted((event.op, event.sent) for event in t.events))
    assert seen[0] == seen[1]
    assert not {op for op, _ in seen[1]} & {"broadcast", "reduce"}


@pytest.mark.ranks(4)
def test_halo_bytes_grow_with_the_surface():
    P = Partition([1, 1, 2, 2])
    sent = []
    for size in (8, 16, 32):
        layer = unn.DistributedFeatureConv2d(P, 1, 1, 3, padding=1)
        x = torch.ones(P.local_shape((1, 1, size, size)))
        layer(x)
        with trace() as t, torch.no_grad():
            layer(x)
        sent.append(sum(e.sent for e in t.events if e.op == "exchange"))
    assert sent == [(2 * size // 2 + 1) * 4 for size in (8, 16, 32)]  # two sides and a corner


@pytest.mark.ranks(3)
def test_copies_and_pickles_of_every_layer_give_the_same(proof):
    for case in proof.zoo():
        layer = case.check()
        own = case.own_inputs()
        expected = layer(*own)
        twin = copy.deepcopy(layer)
        thawed = pickle.loads(pickle.dumps(layer))
        if case.name == "BatchNorm":
            twin.load_state_dict(layer.state_dict())
        for made in (twin, thawed):
            y = made(*own)
            torch.testing.assert_close(y, expected, msg=case.name)
            assert [n for n, _ in made.named_parameters()] == [
                n for n, _ in layer.named_parameters()
            ]
            assert all(
                a is not b for a, b in zip(made.parameters(), layer.parameters(), strict=True)
            )


def test_a_rank_that_raises_inside_a_forward_is_named_to_the_caller():
    def broken():
        P = Partition([1, 1, 2])
        layer = unn.DistributedFeatureConv1d(P, 1, 1, 3, padding=1)
        x = torch.ones(1, 1, 4)
        layer(x)
        if unisono.world().rank == 1:
            layer.register_forward_pre_hook(lambda *_: 1 / 0)
        layer(x)

    began = time.monotonic()
    with pytest.raises(RankFailed, match="ZeroDivisionError") as caught:
        unisono.run(broken, ranks=2, on="cpu")
    assert caught.value.rank == 1
    assert time.monotonic() - began < scaled_by_load(60)


@pytest.mark.ranks(2, backend="shm", timeout=60)
def test_ten_thousand_layers_make_no_new_group_thread_or_file_and_keep_no_memory(proof):
    P = Partition([1, 1, 2])
    x = torch.ones(1, 2, 4)
    for case in proof.zoo():
        case.check()

    def held():
        return (
            groups.count(),
            len(torch.distributed.distributed_c10d._world.pg_map),
            threading.active_count(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(list(Path("/proc/self/task").iterdir())),
        )

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, memory = held(), 0
    for i in range(10_000):
        if i % 10 == 0:
            layer = unn.DistributedFeatureConv1d(P, 2, 2, 3, padding=1)
            if i % 100 == 0:
                layer(x).sum().backward()
        else:
            layer = unn.DistributedMaxPool1d(P, 2)
        if i == 2000:  # caches and the allocator have what they need
            memory = resident()
    assert resident() - memory < 4 << 20  # 8000 layers more; 500 bytes of each would be seen
    for case in proof.zoo():
        case.check()
    assert held() == before
    unisono.world().barrier()


@pytest.mark.ranks(2)
def test_layers_that_are_dropped_leave_no_memory_behind():
    P = Partition([1, 1, 2])
    layer = unn.DistributedFeatureConv1d(P, 2, 2, 3, padding=1)
    layer(torch.ones(1, 2, 4, requires_grad=True)).sum().backward()
    seen = [weakref.ref(layer), weakref.ref(layer.weight)]
    del layer
    gc.collect()
    assert [ref() for ref in seen] == [None, None]

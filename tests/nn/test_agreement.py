"""How ranks agree on a call: changes that one rank sees, bad inputs, and what it costs."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from tests.waiting import scaled_by_load
from torch.nn import functional as F

import unisono
import unisono.nn as unn
from unisono.comm import Communicator, trace
from unisono.comm.lifecycle import say_returned
from unisono.errors import CollectiveMismatch, PartitionError, RankFailed, RankTimeout
from unisono.topology import Partition


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def cut(whole, P):
    return whole[P.local_slices(whole.shape)] if P.active else whole.new_empty(0)


def kinds(P):
    """Return layers by name, each with what it is for a whole tensor `(2, 3, n)`."""
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(3, 3, 3, padding=1)
    split = unn.DistributedFeatureConv1d(P, 3, 3, 3, padding=1)
    split.load_state_dict(conv.state_dict())
    general = unn.DistributedGeneralConv1d(P, P, P, 3, 3, 3, padding=1)
    general.load_state_dict(conv.state_dict())
    return {
        "conv": (split, conv),
        "general": (general, conv),
        "pool": (unn.DistributedMaxPool1d(P, 2), torch.nn.MaxPool1d(2)),
        "upsample": (unn.DistributedUpsample(P, scale_factor=2), torch.nn.Upsample(scale_factor=2)),
        "pad": (unn.DistributedPad(P, (2, 1), balance=True), lambda x: F.pad(x, (2, 1))),
        "repartition": (unn.Repartition(P, P), lambda x: x),
        "norm": (unn.DistributedBatchNorm(P, 3), torch.nn.BatchNorm1d(3)),
    }


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_a_change_that_some_ranks_see_is_planned_anew_on_all():
    size = unisono.world().size
    P = Partition([1, 1, size])
    for name, (layer, plain) in kinds(P).items():
        for step, n in enumerate((5 * size - 1, 5 * size, 5 * size, 5 * size - 1)):
            whole = drawn(2, 3, n).requires_grad_()
            own = cut(whole.detach(), P).clone().requires_grad_()
            # Shards are [5, 4] and [5, 5]: only the last rank sees a change.
            with torch.set_grad_enabled(step != 3):
                y, z = layer(own), plain(whole)
            torch.testing.assert_close(y, cut(z, P), msg=f"{name} at {n}")
            if step != 3:
                y.square().sum().backward()
                z.square().sum().backward()
                torch.testing.assert_close(own.grad, cut(whole.grad, P), msg=f"{name} at {n}")
        assert layer._setups == 3, name


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_sums_and_losses_are_planned_anew_too():
    P = Partition([2])
    loss, total = unn.DistributedMSELoss(P), unn.AllSumReduce(P, axes_reduce=0)
    for n in (9, 10, 10, 9):
        x, target = drawn(n), drawn(n, 1).squeeze(1)
        own = cut(x, P).clone().requires_grad_(P.root.rank == 0)
        value = loss(own, cut(target, P))
        torch.testing.assert_close(value, F.mse_loss(x, target))
        assert value.requires_grad
        value.backward()
        if own.requires_grad:
            torch.testing.assert_close(own.grad, cut(2 * (x - target) / n, P))
    assert loss._setups == 3
    for n in (3, 4, 4):
        x = torch.full((n,), 1.0 + P.root.rank, requires_grad=True)
        y = total(x)
        assert y.tolist() == [3.0] * n
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * n
    assert total._setups == 2
    assert total(torch.ones(3, dtype=torch.int8)).tolist() == [2, 2, 2]  # too small to count ranks


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_layer_meets_once_in_each_call_and_never_with_the_check_off(monkeypatch):
    met = []
    gather = Communicator.all_gather_ints

    def counted(comm, values, **options):
        met.append(len(values))
        return gather(comm, values, **options)

    monkeypatch.setattr(Communicator, "all_gather_ints", counted)
    P = Partition([1, 1, 2])
    layers = {name: layer for name, (layer, _) in kinds(P).items()}
    layers |= {"loss": unn.DistributedL1Loss(P), "sum": unn.AllSumReduce(P, axes_keep=())}
    sent = {"conv": "exchange", "general": "exchange", "norm": "all_gather"}
    sent |= {"loss": "all_reduce", "sum": "all_reduce"}
    x = torch.ones(2, 3, 4)
    for name, layer in layers.items():
        given = (x, x) if name == "loss" else (x,)
        with torch.no_grad():  # what is behind a number is exchanged once
            layer(*given)
        layer(*given)
        for mode, meetings in (("always", 1), ("off", 0)):
            met.clear()
            with unn.structure_check(mode), torch.no_grad(), trace() as seen:
                layer(*given)
            assert len(met) == meetings, (name, mode)
            expected = {sent[name]: 1} if name in sent else {}
            assert Counter(event.op for event in seen.events) == expected, (name, mode)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_bad_input_leaves_no_message_behind():
    P = Partition([1, 1, 2])
    for name, (layer, plain) in kinds(P).items():
        whole = drawn(2, 3, 8)
        layer(cut(whole, P))
        with pytest.raises(PartitionError, match="call it with tensors"):
            layer("text" if P.root.rank == 1 else cut(whole, P))
        mixed = pytest.raises(CollectiveMismatch, match="grad on: rank 0; off: rank 1")
        with mixed, torch.set_grad_enabled(P.root.rank == 0):
            layer(cut(whole, P))
        torch.testing.assert_close(layer(cut(whole, P)), cut(plain(whole), P), msg=name)


@pytest.mark.ranks(2, backend="shm", timeout=20)
@pytest.mark.parametrize("name", ["conv", "norm", "pool", "repartition"])
def test_with_the_check_off_a_change_on_one_rank_ends_in_a_result_or_an_error(name):
    P = Partition([1, 1, 2], comm=unisono.world(timeout_s=3))
    layer, plain = kinds(P)[name]
    before, after = drawn(2, 3, 9), drawn(2, 3, 10)
    with unn.structure_check("off"):
        layer(cut(before, P))
        if P.root.rank == 1:
            with pytest.raises(CollectiveMismatch, match="the first plan is final"):
                layer(cut(after, P))
            say_returned()
        elif name in ("conv", "norm"):  # whose first plan needs something of the other rank
            with pytest.raises((CollectiveMismatch, RankTimeout), match="rank 1"):
                layer(cut(after, P))
        else:
            assert layer(cut(after, P)).shape == cut(plain(before), P).shape


@pytest.mark.ranks(2, backend="shm", timeout=20)
def test_a_rank_that_has_returned_is_not_waited_for():
    P = Partition([1, 1, 2])
    layer = unn.DistributedMaxPool1d(P, 2)
    layer(torch.ones(2, 3, 4))
    if P.root.rank == 0:
        del layer  # as at the end of a function
        say_returned()
        return
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch, match="rank 0 will not come"):
        layer(torch.ones(2, 3, 5))
    assert time.monotonic() - began < scaled_by_load(5)


@pytest.mark.ranks(2)
def test_the_first_plan_is_final_with_the_check_off():
    P = Partition([1, 1, 2])
    layer = unn.DistributedMaxPool1d(P, 2)
    with unn.structure_check("off"):
        layer(torch.ones(2, 3, 4))
        with pytest.raises(CollectiveMismatch, match=r"\[2, 3, 4\] float32 -> \[2, 3, 5\] float32"):
            layer(torch.ones(2, 3, 5))
        assert layer(torch.ones(2, 3, 4)).shape == (2, 3, 2)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_rank_that_gives_no_tensor_is_named_on_all():
    me = unisono.world().rank
    P = Partition([1, 1, 2, 1])
    x = torch.ones(1, 1, 4, 4)
    conv = unn.DistributedConv2d(P, in_channels=1, out_channels=1, kernel_size=3, padding=1)
    for layer in (conv, unn.DistributedBatchNorm(P, 1), unn.DistributedMaxPool2d(P, 2)):
        for _ in range(2):  # before the first set-up, and after it
            with pytest.raises(PartitionError, match="found: None"):
                layer(x if me == 0 else None)
            assert layer(x).shape[0] == 1
        for hollow in (True, me == 0):
            with pytest.raises(PartitionError, match="a tensor on meta"):
                layer(x.to("meta") if hollow else x)
        with pytest.raises(PartitionError, match="found: nothing"):
            layer(*([x] if me == 0 else []))
        assert layer(x).shape[0] == 1
        with pytest.raises(PartitionError, match="2 tensors, 1 expected"):
            layer(*([x] if me == 0 else [x, x]))
        assert layer(x).shape[0] == 1
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 1 tensor\n *rank 1: 2 tensors"):
        unn.DistributedMaxPool2d(P, 2)(*([x] if me == 0 else [x, x]))


@pytest.mark.ranks(2)
def test_a_rank_outside_gets_a_tensor_without_elements_whatever_it_gives():
    P = Partition([1, 1, 1, 1])
    layers = [
        unn.DistributedConv2d(P, in_channels=1, out_channels=2, kernel_size=1),
        unn.DistributedMaxPool2d(P, 2),
        unn.DistributedBatchNorm(P, 1),
        unn.DistributedUpsample(P, scale_factor=2),
        unn.Repartition(P, P),
        unn.AllSumReduce(P, axes_reduce=(2,)),
    ]
    for layer in layers:
        x = torch.ones(3, 1, 4, 4, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        if not P.active:
            assert y.shape == (3, 0)
            assert x.grad is not None
            assert not x.grad.any()
            assert layer(torch.ones(0)).shape == (0,)
    whole = unn.Broadcast(P, P, preserve_batch=False)(torch.ones(3, 1, 4, 4))
    assert whole.shape == ((3, 1, 4, 4) if P.active else (0,))
    loss = unn.DistributedMSELoss(P)(torch.ones(3, 1, 4, 4), torch.zeros(3, 1, 4, 4))
    assert loss == (1.0 if P.active else 0.0)


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

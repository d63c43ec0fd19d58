"""How ranks agree on a call: changes that one rank sees, bad inputs, and what it costs."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from tests.waiting import scaled_by_load
from torch.nn import functional as F

import unisono
from unisono import nn
from unisono.comm import Communicator, trace
from unisono.comm.lifecycle import say_returned
from unisono.errors import CollectiveMismatch, PartitionError, RankTimeout
from unisono.topology import Partition


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def cut(whole, P):
    return whole[P.local_slices(whole.shape)] if P.active else whole.new_empty(0)


def kinds(P):
    """Return layers by name, each with what it is for a whole tensor `(2, 3, n)`."""
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(3, 3, 3, padding=1)
    split = nn.DistributedFeatureConv1d(P, 3, 3, 3, padding=1, overlap=True)
    split.load_state_dict(conv.state_dict())
    general = nn.DistributedGeneralConv1d(P, P, P, 3, 3, 3, padding=1)
    general.load_state_dict(conv.state_dict())
    return {
        "conv": (split, conv),
        "general": (general, conv),
        "pool": (nn.DistributedMaxPool1d(P, 2), torch.nn.MaxPool1d(2)),
        "upsample": (nn.DistributedUpsample(P, scale_factor=2), torch.nn.Upsample(scale_factor=2)),
        "pad": (nn.DistributedPad(P, (2, 1), balance=True), lambda x: F.pad(x, (2, 1))),
        "repartition": (nn.Repartition(P, P), lambda x: x),
        "norm": (nn.DistributedBatchNorm(P, 3), torch.nn.BatchNorm1d(3)),
    }


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
@pytest.mark.parametrize("mode", ["always", "on_change"])
def test_a_change_that_some_ranks_see_is_planned_anew_on_all(mode, monkeypatch):
    monkeypatch.setenv("UNISONO_STRUCTURE_CHECK", mode)
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
    loss, total = nn.DistributedMSELoss(P), nn.AllSumReduce(P, axes_reduce=0)
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
    layers |= {"loss": nn.DistributedL1Loss(P), "sum": nn.AllSumReduce(P, axes_keep=())}
    sent = {"conv": "exchange", "general": "exchange", "norm": "all_gather"}
    sent |= {"loss": "all_reduce", "sum": "all_reduce"}
    x = torch.ones(2, 3, 4)
    for name, layer in layers.items():
        given = (x, x) if name == "loss" else (x,)
        layer(*given)
        for mode, meetings in (("always", 1), ("on_change", 1), ("off", 0)):
            met.clear()
            with nn.structure_check(mode), torch.no_grad(), trace() as seen:
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
    with nn.structure_check("off"):
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
    layer = nn.DistributedMaxPool1d(P, 2)
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
    layer = nn.DistributedMaxPool1d(P, 2)
    with nn.structure_check("off"):
        layer(torch.ones(2, 3, 4))
        with pytest.raises(CollectiveMismatch, match=r"\[2, 3, 4\] float32 -> \[2, 3, 5\] float32"):
            layer(torch.ones(2, 3, 5))
        assert layer(torch.ones(2, 3, 4)).shape == (2, 3, 2)

"""Every kind of layer: over any transport, on any ranks, copied, differentiated twice."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
from pathlib import Path

import pytest
import torch

import unisono
import unisono.nn as unn
from unisono.topology import Partition


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_every_layer_equals_torch_over_every_transport(proof):
    for case in proof.zoo():
        case.check()


HERE = Path(__file__).parent


@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_every_layer_equals_torch_over_mpi(mpiexec, warm_python):
    done = subprocess.run(
        [mpiexec, "-n", "2", warm_python, "-W", "ignore", str(HERE / "mpi_layers.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "UNISONO_TIMEOUT_S": "60"},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    (names,) = re.findall(r"PASSED (.*)", done.stdout)
    assert len(json.loads(names)) >= 20


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks", [(0,), (2,), (1, 3), (3, 0, 2)])
def test_ranks_outside_of_a_partition_get_nothing_and_disturb_nobody(ranks, proof):
    for case in proof.zoo(ranks):
        case.check()


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


def differentiated_twice(net, inputs, weigh):
    """Leave in inputs and parameters the gradients of the squared gradient of a weighted result."""
    y = net(*inputs)
    grown = y if y.dim() == 0 else y**3  # losses are curved themselves
    leaf = next(x for x in [*inputs, *net.parameters()] if x.requires_grad)
    (grad,) = torch.autograd.grad(weigh(grown), leaf, create_graph=True)
    grad.square().sum().backward()


def whole_or_own(part, x):
    """Return where the own block is; everything for what is no tensor of blocks."""
    return part.local_slices(x.shape[: part.dim]) if part.active and x.dim() else ...


@pytest.mark.ranks(3)
def test_second_derivatives_of_every_layer_equal_torch(proof):
    for case in proof.zoo():
        ours, theirs = proof.pair(case.build, case.plain)
        own = [x.requires_grad_(x.is_floating_point()) for x in case.own_inputs()]
        whole = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
        weights = proof.ramp(theirs(*whole).detach())
        mine = weights[whole_or_own(case.P_y, weights)] if case.P_y.active else None
        # Statistics of norms have moved once more on the whole tensor: they do not matter here.
        differentiated_twice(ours, own, lambda y, w=mine: proof.score(y, w))
        differentiated_twice(theirs, whole, lambda y, w=weights: proof.score(y, w))
        for x, z, part in zip(own, whole, case.parts, strict=True):
            if z.grad is not None and part.active:
                torch.testing.assert_close(x.grad, z.grad[whole_or_own(part, z)], msg=case.name)
        expected = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            holding, grad = ours._holdings[name], expected[name].grad
            if grad is not None and 0 not in holding.shape:
                found = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(found, grad[holding.slices], msg=case.name)


LOOSE = {torch.bfloat16: (3e-2, 6e-2), torch.float16: (4e-3, 1e-2), torch.float32: (1e-5, 1e-5)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_layer_keeps_the_dtype_and_equals_torch(dtype, proof):
    rtol, atol = LOOSE[dtype]
    for case in proof.zoo(dtype=dtype):
        ours, theirs = proof.pair(case.build, case.plain)
        own = [t.requires_grad_(t.is_floating_point()) for t in case.own_inputs()]
        whole = [t.clone().requires_grad_(t.is_floating_point()) for t in case.inputs]
        y, z = ours(*own), theirs(*whole)
        assert y.dtype == z.dtype == dtype, case.name
        y.float().square().mean().backward()
        if case.P_y.active and z.dim():
            z = z[case.P_y.local_slices(z.shape)]
        if case.P_y.active:
            torch.testing.assert_close(
                y, z, rtol=rtol, atol=atol, msg=lambda m, c=case: f"{c.name}: {m}"
            )
        for t in own:
            if t.requires_grad:
                assert t.grad.dtype == dtype, case.name
                assert t.grad.isfinite().all(), case.name
        for p in ours.parameters():
            assert p.grad is None or p.grad.dtype == dtype


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0)])
def test_autocast_gives_what_torch_gives(ranks, proof):
    for case in proof.zoo(ranks, dtype=torch.float32):
        ours, theirs = proof.pair(case.build, case.plain)
        own = [t.requires_grad_(t.is_floating_point()) for t in case.own_inputs()]
        with torch.autocast("cpu", torch.bfloat16):
            y, z = ours(*own), theirs(*case.inputs)
        if case.P_y.active:
            assert y.dtype == z.dtype, case.name
            cut = z[case.P_y.local_slices(z.shape)] if z.dim() else z
            torch.testing.assert_close(
                y, cut, rtol=3e-2, atol=6e-2, msg=lambda m, c=case: f"{c.name}: {m}"
            )
        y.float().square().sum().backward()
        for t in own:
            assert t.grad is None or t.grad.dtype == torch.float32
        for p in ours.parameters():
            assert p.grad is None or p.grad.dtype == torch.float32


@pytest.mark.ranks([2, 3])
def test_ten_equal_calls_set_every_layer_up_once(proof):
    P = Partition([unisono.world().size, 1])
    first = Partition([1, 1])
    movements = [
        (unn.Broadcast(first, P), torch.ones(2, 2)),
        (unn.SumReduce(P, first), torch.ones(2, 2)),
        (unn.AllSumReduce(P, axes_reduce=0), torch.ones(2, 2)),
        (unn.AllGather(P, axes_all_gather=0), torch.ones(2, 2)),
        (unn.ReduceScatter(P, axes_reduce_scatter=0), torch.ones(2, 2)),
    ]
    cases = [(layer, [x]) for layer, x in movements]
    cases += [(case.build(), case.own_inputs()) for case in proof.zoo()]
    for layer, inputs in cases:
        for call in range(10):
            layer.train(call % 4 < 2)
            needed = call % 3 == 0
            given = [x.clone().requires_grad_(needed and x.is_floating_point()) for x in inputs]
            with torch.set_grad_enabled(call % 5 != 4):
                y = layer(*given)
            if y.requires_grad:
                proof.score(y).backward()
        assert layer._setups == int(layer._takes_part), type(layer).__name__


@pytest.mark.ranks([1, 2, 3, 4])
def test_one_seed_gives_the_weights_of_torch_at_any_rank_count(proof):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for case in proof.zoo(dtype=dtype):
            torch.manual_seed(42)
            expected = case.plain().state_dict()
            after = torch.get_rng_state()
            torch.manual_seed(42)
            state = case.build().state_dict()
            assert torch.equal(torch.get_rng_state(), after), case.name
            assert list(state) == list(expected)
            for key, value in expected.items():
                assert torch.equal(state[key], value), (case.name, key, dtype)


@pytest.mark.ranks(3)
def test_other_generators_are_left_alone(proof):
    rank = unisono.world().rank
    for case in proof.zoo():
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        layer = case.build()
        moved = not torch.equal(torch.get_rng_state(), before)
        assert not (moved and rank), case.name  # rank 0's is the one that is drawn from
        torch.manual_seed(0)
        expected = case.plain().state_dict()
        for key, value in layer.state_dict().items():
            assert torch.equal(value, expected[key]), (case.name, key)

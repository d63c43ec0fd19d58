"""Regions against one-process formulas: values, gradients, second derivatives, good manners."""

from __future__ import annotations

import inspect
import itertools
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.operators.checks import check_derivatives, check_nothing_is_changed, drawn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

from unisono import graph_parallel as gp
from unisono.comm import check, trace, world
from unisono.compat import gp_utils
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.testing import check_adjoint

CLASSES = (
    gp_utils.CopyToModelParallelRegion,
    gp_utils.ReduceFromModelParallelRegion,
    gp_utils.ScatterToModelParallelRegion,
    gp_utils.GatherFromModelParallelRegion,
    gp_utils.GatherFromModelParallelRegionSumGrad,
    gp_utils.ScaleBackwardGrad,
    gp_utils.ReduceScatterToModelParallelRegion,
)


def sizes_of(n, ranks):
    return [n // ranks + (r < n % ranks) for r in range(ranks)]


def block(x, dim, sizes, rank):
    return x.split(list(sizes), dim)[rank]


def cases(comm):
    """Shapes, dims and block lengths: fewer rows than ranks, none, one more, and given ones."""
    ranks = comm.size
    for n, dim in itertools.product((0, 1, ranks - 1, ranks, ranks + 1, 10), (0, 1, -1)):
        shape = [3, 2, 2]
        shape[dim] = n
        yield shape, dim, sizes_of(n, ranks), None
    for given in ([0, 5, 1, 2][:ranks], [3, 0, 0, 0][:ranks]):
        yield [2, sum(given)], 1, given, given


@pytest.mark.ranks([1, 2, 3, 4], timeout=60, backend=["gloo", "shm"])
def test_both_conventions_have_the_derivatives_of_one_process():
    """R: f(whole) on all ranks. P: rank q uses w_q * f(whole); the truth is the sum of both."""
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    for shape, dim, sizes, given in cases(comm):
        x = drawn(*shape)
        weights = [drawn(*shape, seed=10 + q) for q in range(comm.size)]
        direction = drawn(*shape, seed=5)

        def truth(weight, x=x, direction=direction):
            at = x.clone().requires_grad_()
            (first,) = torch.autograd.grad((weight * at**3).sum(), at, create_graph=True)
            (second,) = torch.autograd.grad(first, at, direction)
            return first.detach(), second

        of_one, of_all = truth(weights[0]), truth(sum(weights))
        for kind, (wanted, wanted_second) in (("slice", of_one), ("sum", of_all)):
            mine = block(x, dim, sizes, comm.rank).clone().requires_grad_()
            known = given if given is not None else (sizes if shape[dim] % 2 else None)
            whole = gp.gather(mine, dim, grad=kind, sizes=known)
            assert torch.equal(whole.detach(), x)
            assert whole.is_contiguous()
            own = weights[0] if kind == "slice" else weights[comm.rank]
            (first,) = torch.autograd.grad((own * whole**3).sum(), mine, create_graph=True)
            torch.testing.assert_close(first.detach(), block(wanted, dim, sizes, comm.rank))
            along = block(direction, dim, sizes, comm.rank)
            (second,) = torch.autograd.grad(first, mine, along)
            torch.testing.assert_close(second, block(wanted_second, dim, sizes, comm.rank))

        # scatter (R -> S), work on the own block, gather for everybody (S -> R)
        at = x.clone().requires_grad_()
        part = gp.scatter(at, dim, sizes=given)
        assert torch.equal(part.detach(), block(x, dim, sizes, comm.rank))
        back = gp.gather(part**3, dim, grad="slice", sizes=sizes)
        (first,) = torch.autograd.grad((weights[0] * back).sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first, at, direction)
        wanted, wanted_second = of_one
        torch.testing.assert_close(first.detach(), wanted)
        torch.testing.assert_close(second, wanted_second)

        # copy (R -> I) into work of each rank, reduce (I -> R) out of it
        at = x.clone().requires_grad_()
        energy = gp.reduce((weights[comm.rank] * gp.copy(at) ** 3).sum(), grad="identity")
        (first,) = torch.autograd.grad(energy, at, create_graph=True)
        (second,) = torch.autograd.grad(first, at, direction)
        wanted, wanted_second = of_all
        torch.testing.assert_close(first.detach(), wanted)
        torch.testing.assert_close(second, wanted_second)

        # reduce_scatter (I -> S): the own block of the sum
        at = (weights[comm.rank]).clone().requires_grad_()
        part = gp.reduce_scatter(at, dim, sizes=given)
        torch.testing.assert_close(part.detach(), block(sum(weights), dim, sizes, comm.rank))
        (first,) = torch.autograd.grad((part**3).sum(), at, create_graph=True)
        torch.testing.assert_close(first.detach(), 3 * sum(weights) ** 2)
        (second,) = torch.autograd.grad(first, at, direction)
        # the Hessian of sum over all ranks couples every rank's input to every other's
        torch.testing.assert_close(second, 6 * comm.size * sum(weights) * direction)
    gp.cleanup_gp()


def pairs(comm):
    """Each region beside its adjoint, with the spaces of both, and a point of each."""
    ranks, rank = comm.size, comm.rank
    sizes = [3, 1, 0, 2][:ranks]
    n, mine = sum(sizes), sizes[rank]
    same, own = drawn(2, n), drawn(2, n, seed=20 + rank)
    part = drawn(2, mine, seed=40 + rank)
    kw = {"sizes": sizes, "comm": comm}

    copy = partial(gp.copy, comm=comm)
    reduce = partial(gp.reduce, grad="identity", comm=comm)
    both = partial(gp.reduce, grad="sum", comm=comm)
    scatter = partial(gp.scatter, dim=-1, **kw)
    gather_slice = partial(gp.gather, dim=-1, grad="slice", **kw)
    gather_sum = partial(gp.gather, dim=-1, grad="sum", **kw)
    reduce_scatter = partial(gp.reduce_scatter, dim=-1, **kw)
    return [
        (copy, reduce, "R", "I", same, own),
        (reduce, copy, "I", "R", own, same),
        (both, both, "I", "I", own, own.flip(0)),
        (scatter, gather_slice, "R", "S", same, part),
        (gather_slice, scatter, "S", "R", part, same),
        (gather_sum, reduce_scatter, "S", "I", part, own),
        (reduce_scatter, gather_sum, "I", "S", own, part),
    ]


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"])
def test_each_region_is_the_adjoint_of_its_backward():
    for forward, adjoint, domain, range_, x, y in pairs(world()):
        check_adjoint(forward, adjoint, x, y, domain=domain, range=range_)


@pytest.mark.ranks([2, 3], timeout=60)
def test_two_derivatives_of_every_region_equal_finite_differences():
    for forward, _, domain, range_, x, y in pairs(world()):
        check_derivatives(forward, x, y, domain, range_)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=str)
def test_inputs_and_incoming_gradients_stay_and_any_layout_is_right(dtype):
    for forward, adjoint, _, _, x, y in pairs(world()):
        check_nothing_is_changed(forward, adjoint, x.to(dtype), y.to(dtype))


@pytest.mark.ranks([1, 2, 3])
def test_function_classes_do_what_the_functions_do():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    for function in CLASSES:
        takes_dim = "dim" in inspect.signature(function.forward).parameters
        for arguments in [(), (0,), (1,)] if takes_dim else [()]:
            x = drawn(2, 5).requires_grad_()
            y = function.region(x, *arguments)
            (wanted,) = torch.autograd.grad((y**3).sum(), x)
            again = function.apply(x, *arguments)
            (found,) = torch.autograd.grad((again**3).sum(), x)
            ctx = SimpleNamespace()  # for code that calls the two halves itself
            by_hand = function.forward(ctx, x.detach(), *arguments)
            back = function.backward(ctx, 3 * y.detach() ** 2)
            for ours in (again.detach(), by_hand):
                assert torch.equal(ours, y.detach())
            for ours in (found, back[0] if takes_dim else back):
                assert torch.equal(ours, wanted)
    x = torch.ones(2, requires_grad=True)
    gp.scale_backward_grad(x).sum().backward()
    assert x.grad.tolist() == [comm.size] * 2
    gp.cleanup_gp()


@pytest.mark.ranks([2, 3], backend=["gloo", "shm"])
def test_number_of_collectives_of_a_gather_with_known_sizes():
    comm = world()
    sizes = sizes_of(7, comm.size)
    x = drawn(sizes[comm.rank], 2).requires_grad_()
    for kwargs in ({"sizes": sizes}, {"natoms": 7}):
        for kind, backward in (("slice", 0), ("sum", 1)):
            with trace() as forward_trace:
                y = gp.gather(x, grad=kind, comm=comm, **kwargs)
            with trace() as backward_trace:
                y.sum().backward()
            assert len(forward_trace.events) == 1
            assert len(backward_trace.events) == backward


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, timeout=110)
def test_regions_compile_into_one_graph():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    sizes = sizes_of(5, comm.size)
    mine = sizes[comm.rank]
    edges = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 3]])
    plan = gp.GraphPlan(gp.GraphPartition.contiguous(5, comm.size), edges)

    def everything(x):
        y = gp.gather(x, grad="sum", sizes=sizes) ** 2
        y = gp.gather(gp.reduce_scatter(y), grad="slice", natoms=5)
        y = gp.scatter(gp.copy_to_model_parallel_region(y) * gp.scale_backward_grad(y))
        y = plan.extend(y)[plan.edge_index[0]]
        return gp.reduce(y.sum(), grad="identity")

    found = []
    for function in (everything, torch.compile(everything, fullgraph=True, backend="aot_eager")):
        x = drawn(mine, 2, seed=comm.rank).requires_grad_()
        y = function(x)
        y.backward()
        found.append((y.detach(), x.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    gp.cleanup_gp()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2, timeout=110)
def test_a_gather_that_must_learn_its_sizes_says_what_a_graph_needs():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    x = drawn(1 + comm.rank, 2, seed=comm.rank)
    for gather in (
        lambda t: gp.gather(t, grad="sum") * 2,
        lambda t: gp.gather_from_model_parallel_region(t, 0) * 2,
        lambda t: gp_utils.GatherFromModelParallelRegion.apply(t, 0) * 2,
    ):
        with pytest.raises(Unsupported, match=r"without sizes(.|\n)*HINT: sizes=(.|\n)*natoms=N"):
            torch.compile(gather, fullgraph=True, backend="aot_eager")(x)
    torch._dynamo.reset()
    gp.cleanup_gp()


@pytest.mark.ranks(2)
def test_vmap_is_refused_and_func_grad_jvp_and_checkpoint_work():
    comm = world()
    sizes = [1, 2]
    x = drawn(sizes[comm.rank], 3, seed=comm.rank)

    def gather(t):
        return gp.gather(t, grad="sum", sizes=sizes, comm=comm)

    with pytest.raises(UnisonoError, match="a collective cannot be vmapped"):
        torch.func.vmap(gather)(torch.stack([x, x]))
    assert torch.allclose(torch.func.grad(lambda t: (gather(t) ** 2).sum())(x), 4 * x)
    _, tangent = torch.func.jvp(gather, (x,), (2 * x,))
    assert torch.allclose(tangent, 2 * gather(x))
    results = []
    for wrap in (lambda f, t: f(t), lambda f, t: checkpoint(f, t, use_reentrant=False)):
        at = x.clone().requires_grad_()
        (wrap(lambda t: gather(t).sin(), at) ** 2).sum().backward()
        results.append(at.grad)
    assert torch.equal(*results)


@pytest.mark.ranks(2)
def test_function_classes_work_in_torch_func_and_refuse_vmap():
    comm = world()
    gp.setup_gp({"gp_gpus": comm.size, "distributed_backend": None})
    shared, own = drawn(4, 4, seed=0), drawn(4, 4, seed=1 + comm.rank)
    for region in CLASSES:
        takes_replicated = region.region in (
            gp.copy_to_model_parallel_region,
            gp.scatter_to_model_parallel_region,
        )
        x = shared if takes_replicated else own
        with pytest.raises(UnisonoError, match="a collective cannot be vmapped"):
            torch.func.vmap(region.apply)(torch.stack([x, x]))
        at = x.clone().requires_grad_()
        y = region.apply(at)
        (y**3).sum().backward()
        found = torch.func.grad(lambda t, f=region: (f.apply(t) ** 3).sum())(x)
        torch.testing.assert_close(found, at.grad)
        _, tangent = torch.func.jvp(region.apply, (x,), (2 * x,))
        torch.testing.assert_close(tangent, 2 * y.detach())
    gp.cleanup_gp()


@pytest.mark.parametrize("n", [4, 400])  # a small sum, and one that passes in pieces
@pytest.mark.parametrize("case", ["gather", "dim of a sum", "shape of a sum"])
@pytest.mark.ranks(2, backend="shm")
def test_another_dim_on_each_rank_is_told_on_shared_memory(case, n):
    comm = world()
    square, half = drawn(n, n), [n // 2, n // 2]
    block = square[: n // 2, : n // 2].contiguous()
    for dim in (0, 1):
        summed = gp.reduce_scatter(square, dim, comm=comm)
        assert torch.equal(summed, 2 * square.split(half, dim)[comm.rank])
        joined = gp.gather(block, dim - 2, grad="sum", sizes=half, comm=comm)
        assert torch.equal(joined, torch.cat([block, block], dim))
    oblong = square.reshape((2 * n, n // 2) if comm.rank else (n // 2, 2 * n))
    mistakes = {
        "gather": lambda: gp.gather(block, comm.rank, grad="sum", sizes=half, comm=comm),
        "dim of a sum": lambda: gp.reduce_scatter(square, comm.rank, comm=comm),
        "shape of a sum": lambda: gp.reduce_scatter(oblong, comm=comm),
    }
    with pytest.raises(CollectiveMismatch, match="different sizes, dims or shapes"):
        mistakes[case]()


@pytest.mark.ranks(2)
def test_bad_arguments_are_refused_before_anything_is_sent():
    comm = world()
    x = torch.ones(2, 3)
    with trace() as t:
        for call in (lambda: gp.gather(x, comm=comm), lambda: gp.gather(x, grad="x", comm=comm)):
            with pytest.raises(PartitionError, match="R: all ranks use") as caught:
                call()
            assert re.search('P: each rank uses it for its own .*grad="sum"', str(caught.value))
        with pytest.raises(PartitionError, match='grad="identity"'):
            gp.reduce(x, comm=comm)
        with pytest.raises(PartitionError, match="two answers"):
            gp.gather(x, grad="sum", sizes=[2, 2], natoms=4, comm=comm)
        for sizes in ([2], [2, 2, 2], [3, 3], [2, -1], [2.0, 2.0], 2):
            with pytest.raises(PartitionError, match=r"sizes"):
                gp.gather(x, grad="sum", sizes=sizes, comm=comm)
        with pytest.raises(PartitionError, match=r"1 \+ 2 = 3 != 2"):
            gp.scatter(x, sizes=[1, 2], comm=comm)
        for natoms in (0, 7):
            with pytest.raises(PartitionError, match="!= 2"):
                gp.gather(x, grad="slice", natoms=natoms, comm=comm)
        with pytest.raises(PartitionError, match="a float, no number of rows"):
            gp.gather(x, grad="slice", natoms=4.0, comm=comm)
        for dim in (2, -3):
            with pytest.raises(PartitionError, match=r"shape \[2, 3\]"):
                gp.scatter(x, dim, comm=comm)
            with pytest.raises(PartitionError, match=r"shape \[2, 3\]"):
                gp.gather(x, dim, grad="sum", comm=comm)
        with pytest.raises(PartitionError, match="without dims"):
            gp.scatter(torch.tensor(1.0), comm=comm)
        with pytest.raises(PartitionError, match="without dims"):
            gp.gather(torch.tensor(1.0), grad="sum", comm=comm)
    assert t.events == []


@pytest.mark.ranks(2)
def test_what_one_rank_gets_wrong_is_an_error_on_all_of_them():
    comm = world()
    x = torch.ones(2 + comm.rank, 3)
    with pytest.raises(PartitionError, match="joined along"):
        gp.gather(torch.ones(2, 2), comm.rank, grad="sum", comm=comm)  # another dim on each rank
    with check():
        with pytest.raises(PartitionError, match=r"rank 1 of 2 brings 3 rows"):
            gp.gather(x, grad="sum", sizes=[2, 2], comm=comm)
        with pytest.raises(CollectiveMismatch, match="different dims"):
            gp.gather(torch.ones(2, 2), comm.rank, grad="sum", sizes=[2, 2], comm=comm)
        dtype = (torch.float32, torch.float64)[comm.rank]
        with pytest.raises(CollectiveMismatch, match="different dtypes"):
            gp.gather(torch.ones(2, 2, dtype=dtype), grad="sum", sizes=[2, 2], comm=comm)
    assert gp.gather(x, grad="sum", sizes=[2, 3], comm=comm).shape == (5, 3)

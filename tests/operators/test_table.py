"""Every pair of the adjoint table: dot product, first and second derivative, and good manners."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import example as tried
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operators.checks import check_derivatives, check_nothing_is_changed
from tests.operators.examples import example

from unisono.comm import world
from unisono.errors import UnisonoError
from unisono.operators import TABLE, all_gather, copy, table_text
from unisono.testing import check_adjoint

RANKS = [1, 2, 3, 4]
LENGTHS = st.lists(st.integers(0, 3), min_size=4, max_size=4)
UNEVEN = [2, 0, 3, 1]
"""Tried on any number of ranks: blocks of different lengths, one of them empty."""


def make_for(comm, dtype=torch.float64, seed=0):
    """Return a maker of tensors: different on each rank, or the same on all."""
    own = torch.Generator().manual_seed(1000 * seed + comm.rank)
    shared = torch.Generator().manual_seed(7777 + seed)

    def make(*shape, same=False):
        generator = shared if same else own
        x = torch.randn(*shape, dtype=dtype, generator=generator, device="cpu")
        return x.to(torch.get_default_device())

    return make


@pytest.mark.ranks(RANKS, timeout=60, backend=["gloo", "shm"])
@settings(max_examples=2, deadline=None)
@given(lengths=LENGTHS)
@tried(lengths=UNEVEN)
def test_dot_product_of_each_operator_and_its_adjoint(lengths):
    comm = world()
    # What holds for complex numbers holds for real ones; their kernels have one turn.
    dtypes = [torch.float64] * (lengths == UNEVEN) + [torch.complex128]
    for pair, dtype in itertools.product(TABLE, dtypes):
        case = example(pair, comm, lengths[: comm.size], make_for(comm, dtype))
        check_adjoint(
            case.forward,
            case.adjoint,
            case.x,
            case.y,
            comm=comm,
            domain=pair.domain,
            range=pair.range,
        )


@pytest.mark.ranks(RANKS, timeout=60, backend=["gloo", "shm"])
@settings(max_examples=2, deadline=None)
@given(lengths=LENGTHS)
@tried(lengths=UNEVEN)
def test_second_derivative_of_each_operator_is_that_of_the_linear_map(lengths):
    """For L(x) = <F(x)^2, w> over all ranks: grad = F*(2 w F x), and its derivative along v is
    F*(2 w F v). A backward that is not itself differentiable gives zero or raises."""
    for pair in TABLE:
        check_second_derivative(pair, lengths)


def check_second_derivative(pair, lengths):
    comm = world()
    make = make_for(comm)
    case = example(pair, comm, lengths[: comm.size], make)
    x = case.x.clone().requires_grad_()
    replicated = pair.range == "R"
    w = make(*case.y.shape, same=replicated)
    v = make(*case.x.shape, same=pair.domain == "R")
    y = case.forward(x)
    assert y.shape == case.y.shape
    (grad,) = torch.autograd.grad(y, x, 2 * w * y, create_graph=True)
    expected_grad = case.adjoint(2 * w * case.forward(case.x))
    assert torch.allclose(grad, expected_grad, atol=1e-12)
    (second,) = torch.autograd.grad(grad, x, v)
    # grad = F*(2 w F x) is linear in x with a symmetric matrix, so its adjoint acts as itself.
    expected = case.adjoint(2 * w * case.forward(v))
    assert torch.allclose(second, expected, atol=1e-12)


@pytest.mark.ranks([2, 3], timeout=60)
def test_gradients_of_each_operator_equal_finite_differences_of_the_global_function():
    comm = world()
    for pair in TABLE:
        make = make_for(comm)
        case = example(pair, comm, [2, 1, 0, 3][: comm.size], make)
        weights = make(*case.y.shape, same=pair.range == "R")
        check_derivatives(case.forward, case.x, weights, pair.domain, pair.range)


@pytest.mark.ranks([2, 3], timeout=60)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_operators_leave_inputs_and_incoming_gradients_alone(dtype):
    comm = world()
    for pair in TABLE:
        case = example(pair, comm, [3, 2, 0][: comm.size], make_for(comm, dtype))
        found, given = check_nothing_is_changed(case.forward, case.adjoint, case.x, case.y)
        if found.numel() and pair.adjoint_name != "copy":  # whose kernel is an alias
            assert found.data_ptr() != given.data_ptr()


@pytest.mark.ranks(2)
def test_vmap_is_refused_before_anything_is_sent():
    comm = world()
    for pair in TABLE:
        case = example(pair, comm, [2, 1], make_for(comm))
        batch = torch.stack([case.x, case.x])
        with pytest.raises(UnisonoError, match="a collective cannot be vmapped"):
            torch.func.vmap(case.forward)(batch)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnisonoError, match="a collective cannot be vmapped"):
        torch.autograd.grad(copy(x, comm=comm), x, torch.ones(2, 3), is_grads_batched=True)
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks([1, 2, 3], backend=["gloo", "shm"])
def test_func_grad_and_jvp_go_through_operators_with_sizes_given_or_learned():
    comm = world()
    known = [r + 1 for r in range(comm.size)]
    x = torch.arange(1.0, known[comm.rank] + 1).double()
    for sizes in (known, None):
        gathered = partial(all_gather, sizes=sizes, comm=comm)
        grad = torch.func.grad(lambda t, gathered=gathered: (gathered(t) ** 2).sum())(x)
        assert torch.allclose(grad, 2 * x * comm.size)
        _, tangent = torch.func.jvp(gathered, (x,), (2 * x,))
        assert torch.allclose(tangent, 2 * comm.all_gather(x))


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_verbs_under_a_derivative_name_the_operators_and_leave_the_group_intact():
    comm = world()
    verbs = [
        comm.all_reduce,
        comm.all_gather,
        comm.broadcast,
        lambda x: comm.send(x, 1 - comm.rank),
    ]
    for verb in verbs:
        with pytest.raises(UnisonoError, match=r"HINT: the operator that has one"):
            torch.func.grad(lambda t, verb=verb: verb(t).sum())(torch.ones(3))
    assert comm.all_reduce(torch.ones(1)).item() == 2


def test_the_table_names_each_operator_and_its_adjoint_both_ways():
    names = {pair.name for pair in TABLE}
    assert {pair.adjoint_name for pair in TABLE} == names
    for pair in TABLE:
        assert pair.forward.adjoint is pair.adjoint
        assert pair.adjoint.adjoint is pair.forward


def test_the_documentation_prints_the_table():
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    assert table_text() in page.read_text(encoding="utf-8")

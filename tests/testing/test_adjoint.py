"""`check_adjoint` accepts true pairs at every number of ranks and tells wrong ones by numbers."""

from __future__ import annotations

import pytest
import torch

from unisono.comm import world
from unisono.errors import LayoutError
from unisono.testing import check_adjoint

RANKS = [1, 2, 3]


class SumToReplicated(torch.autograd.Function):
    """I -> R: the sum over ranks; its adjoint hands the value to every rank."""

    @staticmethod
    def forward(ctx, x):
        return world().all_reduce(x)

    @staticmethod
    def backward(ctx, g):
        return Copy.apply(g)


class Copy(torch.autograd.Function):
    """R -> I: the adjoint of the above."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return SumToReplicated.apply(g)


class WrongBackward(SumToReplicated):
    @staticmethod
    def backward(ctx, g):
        return 2 * g


class OnceOnly(SumToReplicated):
    @staticmethod
    def backward(ctx, g):
        return g.detach().clone()


def own(*shape, dtype=torch.float64):
    """Numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(world().rank)
    return torch.randn(shape, dtype=dtype, generator=generator)


def shared(*shape, dtype=torch.float64):
    """Numbers that are the same on all ranks."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(99))


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128], ids=str)
def test_sum_to_replicated_and_copy_are_adjoint(dtype):
    x, y = own(3, 2, dtype=dtype), shared(3, 2, dtype=dtype)
    total, copy = SumToReplicated.apply, Copy.apply
    assert check_adjoint(total, copy, x, y, domain="I", range="R") < 1e-5
    assert check_adjoint(copy, total, y, x, domain="R", range="I") < 1e-5


@pytest.mark.ranks(RANKS)
def test_empty_tensors_are_fine():
    assert check_adjoint(SumToReplicated.apply, Copy.apply, own(0, 2), shared(0, 2), range="R") == 0


@pytest.mark.ranks(2)
def test_wrong_space_shows_as_a_factor():
    with pytest.raises(AssertionError) as caught:
        check_adjoint(SumToReplicated.apply, Copy.apply, own(4), own(4), range="I")
    told = ("all ranks: <Fx, y>  = ", "<x, F*y> = ", "relative difference")
    assert all(part in str(caught.value) for part in told)


@pytest.mark.ranks(2)
def test_complex_operator_without_conjugation_is_found():
    def turn(x):
        return 1j * x

    x, y = own(4, dtype=torch.complex128), own(4, dtype=torch.complex128)
    check_adjoint(turn, lambda y: -1j * y, x, y)
    with pytest.raises(AssertionError, match="relative difference"):
        check_adjoint(turn, turn, x, y)


def detached_on_rank_1(x):
    y = SumToReplicated.apply(x)
    return y.detach() if world().rank == 1 else y


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("forward", "adjoint", "told", "unseen_with"),
    [
        (SumToReplicated.apply, lambda y: world().all_reduce(y), r"ratio 0\.5$", None),
        # The inner products agree in the next three, but autograd does not.
        (
            WrongBackward.apply,
            Copy.apply,
            r"gradient that autograd computes is not adjoint\(y\)",
            "backward",
        ),
        (OnceOnly.apply, Copy.apply, "cannot be differentiated again", "twice"),
        (detached_on_rank_1, Copy.apply, r"rank 1: forward\(x\) has no gradient", "backward"),
    ],
)
def test_wrong_pair_is_found_before_anyone_waits(forward, adjoint, told, unseen_with):
    with pytest.raises(AssertionError, match=told):
        check_adjoint(forward, adjoint, own(4), shared(4), range="R")
    if unseen_with is not None:
        check_adjoint(forward, adjoint, own(4), shared(4), range="R", **{unseen_with: False})


@pytest.mark.ranks(3)
def test_replicated_tensor_that_differs_is_named_with_its_rank():
    y = shared(4)
    if world().rank == 2:
        y[0] += 1
    with pytest.raises(AssertionError, match="rank 2: y is in a replicated space"):
        check_adjoint(SumToReplicated.apply, Copy.apply, own(4), y, range="R")


def changes_input_on_rank_1(x):
    if world().rank == 1:
        x.data.mul_(2)
    return 2 * x


def short_on_rank_0(x):
    return x[:2] if world().rank == 0 else x


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (changes_input_on_rank_1, "rank 1: an input was changed in place"),
        (short_on_rank_0, r"rank 0: forward\(x\) has shape \[2\], but y has \[3"),
    ],
)
def test_what_one_rank_does_is_found_on_all(forward, told):
    with pytest.raises(AssertionError, match=told):
        check_adjoint(forward, lambda y: 2 * y, own(3), own(3))


def test_works_in_a_plain_process():
    assert check_adjoint(lambda x: 3 * x, lambda y: 3 * y, torch.ones(2), torch.ones(2)) == 0


def test_unknown_space_is_refused():
    with pytest.raises(LayoutError, match="HINT: one of 'R', 'S', 'I'"):
        check_adjoint(lambda x: x, lambda y: y, torch.ones(2), torch.ones(2), domain="Q")

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
    text = str(caught.value)
    assert "all ranks: <Fx, y>  = " in text
    assert "<x, F*y> = " in text
    assert "relative difference" in text


@pytest.mark.ranks(2)
def test_sum_that_is_counted_twice_has_ratio_two():
    def doubled(y):
        return world().all_reduce(y)

    with pytest.raises(AssertionError, match=r"ratio 0\.5$"):
        check_adjoint(SumToReplicated.apply, doubled, own(4), shared(4), range="R")


@pytest.mark.ranks(2)
def test_complex_operator_without_conjugation_is_found():
    def turn(x):
        return 1j * x

    x, y = own(4, dtype=torch.complex128), own(4, dtype=torch.complex128)
    check_adjoint(turn, lambda y: -1j * y, x, y)
    with pytest.raises(AssertionError, match="relative difference"):
        check_adjoint(turn, turn, x, y)


@pytest.mark.ranks(2)
def test_wrong_autograd_is_found_although_the_inner_products_agree():
    class WrongBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return world().all_reduce(x)

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    with pytest.raises(
        AssertionError, match=r"gradient that autograd computes is not adjoint\(y\)"
    ):
        check_adjoint(WrongBackward.apply, Copy.apply, own(4), shared(4), range="R")
    check_adjoint(WrongBackward.apply, Copy.apply, own(4), shared(4), range="R", backward=False)


@pytest.mark.ranks(2)
def test_gradient_that_cannot_be_differentiated_again_is_found():
    with pytest.raises(AssertionError, match="cannot be differentiated again"):
        check_adjoint(OnceOnly.apply, Copy.apply, own(4), shared(4), range="R")
    check_adjoint(OnceOnly.apply, Copy.apply, own(4), shared(4), range="R", twice=False)


@pytest.mark.ranks(2)
def test_lost_gradient_is_found_before_anyone_waits():
    def forward(x):
        y = SumToReplicated.apply(x)
        return y.detach() if world().rank == 1 else y

    with pytest.raises(AssertionError, match=r"rank 1: forward\(x\) has no gradient"):
        check_adjoint(forward, Copy.apply, own(4), shared(4), range="R")


@pytest.mark.ranks(3)
def test_replicated_tensor_that_differs_is_named_with_its_rank():
    y = shared(4)
    if world().rank == 2:
        y[0] += 1
    with pytest.raises(AssertionError, match="rank 2: y is in a replicated space"):
        check_adjoint(SumToReplicated.apply, Copy.apply, own(4), y, range="R")


@pytest.mark.ranks(2)
def test_input_changed_on_one_rank_is_found_on_all():
    def careless(x):
        if world().rank == 1:
            x.data.mul_(2)
        return 2 * x

    with pytest.raises(AssertionError, match="rank 1: an input was changed in place"):
        check_adjoint(careless, lambda y: 2 * y, own(3), own(3))


@pytest.mark.ranks(2)
def test_wrong_shape_on_one_rank_is_found_on_all():
    def short(x):
        return x[:2] if world().rank == 0 else x

    with pytest.raises(
        AssertionError, match=r"rank 0: forward\(x\) has shape \[2\], but y has \[3"
    ):
        check_adjoint(short, lambda y: y, own(3), own(3))


def test_works_in_a_plain_process():
    assert check_adjoint(lambda x: 3 * x, lambda y: 3 * y, torch.ones(2), torch.ones(2)) == 0


def test_unknown_space_is_refused():
    with pytest.raises(LayoutError, match="HINT: check_adjoint"):
        check_adjoint(lambda x: x, lambda y: y, torch.ones(2), torch.ones(2), domain="Q")

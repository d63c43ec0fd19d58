"""`check_parity` accepts layers that equal one process and tells what differs in others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.comm import world
from unisono.errors import PartitionError
from unisono.testing import Layout, check_parity
from unisono.topology import Partition

RANKS = [1, 2, 3]


class Total(torch.autograd.Function):
    """Sum over ranks of something that each rank then uses alike."""

    @staticmethod
    def forward(ctx, x):
        return world().all_reduce(x)

    @staticmethod
    def backward(ctx, g):
        return g.clone()


class Shared(torch.autograd.Function):
    """A value that all ranks hold and each uses for its own part."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return world().all_reduce(g)


class RowsLinear(nn.Module):
    """A linear layer whose input rows are split; weights are everywhere."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().clone())
        self.bias = nn.Parameter(like.bias.detach().clone())

    def forward(self, x):
        return nn.functional.linear(x, Shared.apply(self.weight), Shared.apply(self.bias))


class ForgetfulLinear(RowsLinear):
    """Forgets that other ranks use the weights too."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, Shared.apply(self.bias))


def linear():
    torch.manual_seed(1)
    return nn.Linear(4, 2).double()


def rows():
    return Partition([world().size, 1])


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("n", [7, 2, 1])
def test_split_rows_equal_one_process(n):
    check_parity(RowsLinear(linear()), linear(), [n, 4], rows())


@pytest.mark.ranks(RANKS)
def test_split_columns_summed_to_a_replicated_output():
    weight = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    columns = Partition([1, world().size])
    own = weight[:, columns.local_slices([1, 5])[1]]
    check_parity(
        lambda x: Total.apply(x @ own.T),
        lambda x: x @ weight.T,
        [2, 5],
        columns,
        out_partition=None,
    )


@pytest.mark.ranks(2)
def test_wrong_parameter_gradient_is_named():
    with pytest.raises(AssertionError) as caught:
        check_parity(ForgetfulLinear(linear()), linear(), [4, 4], rows())
    text = str(caught.value)
    assert text.startswith("ForgetfulLinear on 2 ranks differs from Linear on one")
    assert "gradient of weight: Tensor-likes are not close!" in text
    assert "gradient of bias" not in text


def off_on_one_rank(x):
    return x + (1e-3 if world().rank == 1 else 0.0)


def careless(x):
    x.data.mul_(2)
    return x / 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (off_on_one_rank, "all ranks: output 0: Tensor-likes are not close"),
        (lambda x: x.detach() + 0 * x, "gradient of input 0"),
        (careless, "input 0 after the call"),
    ],
)
def test_what_is_wrong_on_any_rank_is_told_on_all(parallel, told):
    with pytest.raises(AssertionError, match=told):
        check_parity(parallel, lambda x: x + 0, [4, 4], rows())
    check_parity(off_on_one_rank, lambda x: x + 0, [4, 4], rows(), rtol=0.1, atol=0.1)


@pytest.mark.ranks(3)
def test_several_inputs_each_with_its_layout():
    everything = Layout(split=lambda whole: whole, join=lambda part: part)
    x, scale = torch.arange(12.0).reshape(6, 2), torch.tensor(3.0)
    check_parity(
        lambda x, s: (x * Shared.apply(s), x + 1),
        lambda x, s: (x * s, x + 1),
        [x, scale],
        [rows(), everything],
    )


@pytest.mark.ranks(3)
def test_ranks_outside_the_partition_hold_nothing():
    two = Partition([2, 1])
    check_parity(torch.tanh, torch.tanh, [5, 3], two)


@pytest.mark.ranks(2)
def test_outputs_may_have_uneven_blocks():
    def first_rank_gives_one_row_less(x):
        return x[: x.shape[0] - 1] if world().rank == 0 else x

    check_parity(first_rank_gives_one_row_less, lambda x: x[[0, 2, 3]], [4, 2], rows())


@pytest.mark.ranks(2)
def test_own_gradients_of_the_modules_are_left_alone():
    layer, whole = RowsLinear(linear()), linear()
    layer.weight.grad = torch.full_like(layer.weight, 5.0)
    check_parity(layer, whole, [4, 4], rows())
    assert layer.weight.grad.eq(5.0).all()
    assert whole.weight.grad is None


def test_works_in_a_plain_process():
    check_parity(nn.Tanh(), torch.tanh, torch.ones(3))


@pytest.mark.ranks(2)
def test_outputs_may_be_integers():
    def scaled_and_signs(x):
        return 2 * x, (x > 0).long()

    check_parity(scaled_and_signs, scaled_and_signs, [4, 2], rows())
    with pytest.raises(AssertionError, match="output 1"):
        check_parity(scaled_and_signs, lambda x: (2 * x, (x < 0).long()), [4, 2], rows())


@pytest.mark.parametrize(
    ("inputs", "partition", "said"),
    [
        ([2, "x"], None, "a sequence of"),
        ([2, 2], [None, None], "2 layouts for 1 tensors"),
        ([2, 2], 4, "an int"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(inputs, partition, said):
    with pytest.raises(PartitionError, match=said):
        check_parity(torch.tanh, torch.tanh, inputs, partition)

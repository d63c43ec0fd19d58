"""Split tensors refuse what torch refuses, and show each other's changes where torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono import Partition
from unisono.errors import UnisonoError
from unisono.nn import Split, split

X = torch.arange(1.0, 17.0).view(2, 8)


def cut(x: Tensor, dim: int = 1) -> Tensor:
    parts = [unisono.world().size if d == dim else 1 for d in range(x.ndim)]
    return Split.cut(x.clone(), Partition(parts))


def whole(x: object) -> object:
    return x.whole() if isinstance(x, Split) else x


def outcome(program: Callable[[], object]) -> object:
    """Return what a program returns, or the class and text of its error."""
    try:
        return whole(program())
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return type(error), str(error)


UNLIKE_LENGTHS = {
    "mul": lambda x: x * x[:, :6],
    "where": lambda x: torch.where(x > 0, x, x[:, :6]),
    "maximum": lambda x: torch.maximum(x, x[:, :6]),
    "lerp": lambda x: torch.lerp(x, x[:, :6], 0.5),
    "masked_fill": lambda x: x.masked_fill(x[:, :6] > 0, 0.0),
    "add_": lambda x: x.add_(x[:, :6]),
    "copy_": lambda x: x.copy_(x[:, :6]),
    "stack": lambda x: torch.stack([x, x[:, :6]]),
    "cat": lambda x: torch.cat([x, x[:, :6]]),
    "matmul": lambda x: x @ x[:, :6].T,
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x[:, :6]),
    "layer_norm": lambda x: F.layer_norm(x, (8,), x[0, :6]),
    "cross_entropy": lambda x: F.cross_entropy(x.T, x[0, :6].long()),
}
BEYOND_THE_DIMS = {
    "sum": lambda x: x.sum(7),
    "softmax": lambda x: x.softmax(-9),
    "unsqueeze": lambda x: x.unsqueeze(9),
    "transpose": lambda x: x.transpose(0, 5),
    "dims twice": lambda x: x.sum((0, 0)),
    "flatten backwards": lambda x: x.flatten(1, 0),
    "view of a transposed": lambda x: x.T.view(16),
    "tensor_split": lambda x: torch.tensor_split(x, x, 1),
    "complex padding": lambda x: F.pad(x, (0, 1), value=1j),
}


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("name", [*UNLIKE_LENGTHS, *BEYOND_THE_DIMS])
def test_what_torch_refuses_is_refused_in_its_words(name):
    program = {**UNLIKE_LENGTHS, **BEYOND_THE_DIMS}[name]
    expected = outcome(lambda: program(X.clone()))
    assert isinstance(expected, tuple)
    assert outcome(lambda: program(cut(X))) == expected


@pytest.mark.ranks(2)
def test_attention_needs_as_many_values_as_keys():
    q = cut(torch.randn(1, 2, 8, 4), 2)
    with pytest.raises(RuntimeError, match=r"\[2, 8\] but got: \[2, 6\]"):
        F.scaled_dot_product_attention(q, q, q[:, :, :6])


VIEWS = {
    "unfold": lambda x: x.unfold(1, 2, 2),
    "atleast_1d": torch.atleast_1d,
    "atleast_3d": torch.atleast_3d,
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, torch.zeros(2, 1))[0],
    "linalg.diagonal": torch.linalg.diagonal,
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 2, 1)[0],
    "unsafe_split": lambda x: torch.unsafe_split(x, 3, 1)[0],
    "resolve_conj": torch.resolve_conj,
    "conj_physical": torch.conj_physical,
    "sum_to_size": lambda x: x.sum_to_size(2, 8),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "aten.slice": lambda x: torch.ops.aten.slice(x, 1, 0, 3),
    "a row": lambda x: x[0],
    "a column": lambda x: x[:, 0],
    "all but one": lambda x: x[:, 1:],
    "few": lambda x: x[:, 2:4],
    "data": lambda x: x.data,
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "transposed": lambda x: x.T,
    "other rows": lambda x: x.view(4, 4),
    "one row": lambda x: x.view(16),
    "iterated": lambda x: next(iter(x)),
    "moved, parted, turned": lambda x: x.view(4, 4)[:2].T,
    "reshaped by a copy": lambda x: x.T.reshape(16),
    "contiguous": lambda x: x.contiguous(),
    "contiguous by a copy": lambda x: x.T.contiguous(),
    "padded by nothing": lambda x: F.pad(x, (0, 0)),
    "rolled by nothing": lambda x: x.roll(0, 1),
}


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("name", VIEWS)
def test_a_change_of_a_view_is_seen_or_refused_on_all_ranks_alike(name):
    expected, x = X.clone(), cut(X)
    VIEWS[name](expected).mul_(5)
    view = VIEWS[name](x)
    try:
        view.mul_(5)
        found = x.whole()
    except UnisonoError:
        found = None
    assert len(set(unisono.world().all_gather_object(found is None))) == 1
    if found is None:
        assert torch.equal(x.whole(), X)  # nothing was changed
        with pytest.raises(UnisonoError, match="in-place"):
            x.mul_(2)
        del view
        assert torch.equal(x.mul_(2).whole(), X * 2)
    else:
        assert torch.equal(found, expected)


@pytest.mark.ranks([2, 3])
def test_ranks_whose_blocks_do_not_move_change_nothing_else():
    class Net(nn.Module):
        def __init__(self, moved: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.moved = moved

        def forward(self, x: Tensor) -> Tensor:
            y = x * -1
            self.moved(y).relu_()
            return y

    partition = Partition([1, unisono.world().size])
    for moved in (lambda y: F.pad(y, (0, 1)), lambda y: y.roll(0, 1), lambda y: y.roll(8, 1)):
        assert torch.equal(split(Net(moved), partition)(cut(X).local).whole(), -X)


@pytest.mark.ranks(2)
def test_contiguity_is_that_of_the_whole():
    x = cut(torch.arange(3.0).view(1, 3))
    assert x.is_contiguous()
    assert cut(X).T.is_contiguous() is False
    assert cut(X).T.stride() == X.T.stride()


@pytest.mark.ranks(2)
def test_changes_of_other_arguments_are_seen_or_refused():
    x = cut(X)
    torch._foreach_mul_([x], 2.0)
    assert torch.equal(x.whole(), X * 2)
    expected, table = X.clone(), cut(X)
    indices = torch.tensor([1])
    F.embedding(indices, expected, max_norm=1.0)
    F.embedding(indices, table, max_norm=1.0)
    assert torch.equal(table.whole(), expected)
    statistics = cut(torch.zeros(8), 0), cut(torch.ones(8), 0)
    for value in (X, cut(X, 0)):
        with pytest.raises(UnisonoError, match="running statistics"):
            F.batch_norm(value, *statistics, training=True)
    whole = torch.zeros(8), torch.ones(8)
    y = F.batch_norm(cut(X), *statistics, training=True)  # own channels, own statistics
    torch.testing.assert_close(y.whole(), F.batch_norm(X, *whole, training=True))
    for block, expected in zip(statistics, whole, strict=True):
        torch.testing.assert_close(block.whole(), expected)
    with pytest.raises(ValueError, match="read-only"):
        cut(X).numpy()[0] = 0
    with pytest.raises(UnisonoError, match="memory"):
        cut(X).untyped_storage()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "amax", "amin", "logsumexp", "sort", "max"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_plain_tensor_for_the_result_gets_all_of_it(name, dim):
    function = getattr(torch, name)
    outs = torch.empty(0), torch.empty(0, dtype=torch.int64)
    out = outs if name in ("sort", "max") else outs[0]
    function(cut(X), dim, out=out)
    values = function(X, dim)
    assert torch.equal(outs[0], values[0] if isinstance(values, tuple) else values)
    with pytest.raises(UnisonoError, match="out="):
        torch.add(X, 1, out=cut(X))


@pytest.mark.ranks(2)
def test_unusual_arguments_do_not_crash():
    x = torch.randn(1, 1, 8, 8)
    assert torch.equal(F.avg_pool2d(cut(x, 2), 2, ()).whole(), F.avg_pool2d(x, 2, ()))
    parts = torch.tensor_split(cut(X), cut(torch.tensor([1, 2, 3]), 0), 1)
    assert [p.shape[1] for p in parts] == [1, 1, 1, 5]
    with pytest.raises(UnisonoError, match=r"0\.weight, of a lazy module"):
        split(nn.Sequential(nn.LazyConv1d(2, 3)), Partition([1, 1, 2]))(torch.randn(1, 3, 6))
    y = cut(X)
    with pytest.raises(UnisonoError, match="in-place"):
        y[..., 0] *= 2
    y[..., 0] = 7
    assert y.whole()[:, 0].tolist() == [7.0, 7.0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.ranks(2)
def test_a_function_of_what_got_its_gradient_in_place_is_refused():
    weight = torch.ones(1, requires_grad=True)
    x = cut(X)
    y, other = torch.zeros_like(x), torch.zeros_like(x)
    view = other.view(2, 1, 8)
    y += weight * x
    other += weight * x
    for value in (y, view):
        with pytest.raises(UnisonoError, match="autograd"):
            Twice.apply(value) + 1


@pytest.mark.ranks(2)
def test_a_function_of_a_view_that_moved_has_its_gradient():
    leaf = X.clone().requires_grad_()
    column = Split.cut(leaf, Partition([1, 2]))[:, 3]
    (Twice.apply(column) + column).sum().backward()
    assert torch.equal(leaf.grad, F.one_hot(torch.tensor(3), 8).expand(2, 8) * 3.0)


GRID = torch.linspace(-1, 1, 48).view(2, 3, 4, 2)
INDEX = torch.tensor([3, 0, 2, 1])
ALONG: dict[str, Callable[..., Tensor]] = {
    "sort": lambda x, _: torch.sort(x, 1)[0],
    "grid_sample": lambda x, _: F.grid_sample(x.view(2, 1, 2, 4), GRID, align_corners=True),
    "a crop": lambda x, _: F.pad(x, (-1, 2)),
    "right sides": lambda x, _: torch.cholesky_solve(x, torch.eye(2)),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ALONG)
def test_along_a_cut_dim_the_cut_moves_and_nothing_is_gathered(name):
    parts = cut(X), cut(INDEX, 0)
    y = ALONG[name](*parts)
    assert isinstance(y, Split)
    gathered = [of for x in parts for of in x.run.gathered]
    assert all("smaller argument" in of.reason for of in gathered), gathered
    torch.testing.assert_close(y.whole(), ALONG[name](X, INDEX))


NUMBERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "place of the largest": lambda x, _: x.argmax(),
    "place of the smallest of equal ones": lambda x, _: (x * 0).argmin(keepdim=True),
    "histogram": lambda x, _: torch.histc(x, 5),
    "counts": lambda x, i: torch.bincount(i, minlength=3),
    "places in a sorted row": lambda x, i: torch.searchsorted(i, torch.arange(5)),
    "trace": lambda x, _: (x.mT * x.sum()).repeat(1, 4).trace(),
}


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_one_small_sum_over_ranks_gathers_nothing(name):
    ranks = unisono.world().size
    x = Split.cut(X, Partition([1, ranks]))
    row = Split.cut(torch.tensor([0, 0, 1, 1, 1, 3, 3, 4]), Partition([ranks]))
    y = NUMBERS[name](x, row)
    assert not x.run.gathered
    assert not row.run.gathered
    assert torch.equal(y, NUMBERS[name](X, row.whole()))

"""Check mode: values that must be equal over ranks are compared, and right programs pass."""

from __future__ import annotations

import pytest
import torch

from unisono import graph_parallel as gp
from unisono.comm import check, world
from unisono.errors import LayoutError
from unisono.graph_parallel.regions import difference_over_ranks


@pytest.mark.ranks(2)
def test_values_that_must_be_equal_on_all_ranks_are_compared():
    comm = world()
    different = torch.full((2, 2), 1.0 + comm.rank)
    x = torch.ones(2, requires_grad=True)
    with check():
        for region in (gp.copy, gp.scatter):
            with pytest.raises(LayoutError, match="values differ by 1, the largest is 2"):
                region(different, comm=comm)
        y = gp.gather(x, grad="slice", comm=comm)
        with pytest.raises(LayoutError, match=r'test_regions_in_check[\s\S]*HINT: grad="sum"'):
            (y * (1 + comm.rank)).sum().backward()  # each rank uses it in its own way
        gp.gather(x, grad="slice", comm=comm).sum().backward()
    gp.copy(different, comm=comm)  # outside, nothing is compared


@pytest.mark.ranks([2, 3])
def test_the_gradient_of_a_sum_that_every_rank_counts_is_named():
    comm = world()
    x = torch.ones(3, requires_grad=True)
    with check():
        loss = gp.reduce((x * (1 + comm.rank)).sum(), grad="sum", comm=comm)
        with pytest.raises(LayoutError, match=r"test_regions_in_check(.|\n)*times too large"):
            (2 * loss).backward()
        gp.reduce((x * (1 + comm.rank)).sum(), grad="identity", comm=comm).backward()
        # right where each rank uses the sum for its own share
        shared = gp.reduce(x.sum(), grad="sum", comm=comm)
        (shared * (1 + comm.rank)).backward()
    factors = comm.size * (comm.size + 1) / 2
    torch.testing.assert_close(x.grad, torch.full((3,), 1.0 + comm.rank + factors))


@pytest.mark.ranks(2)
def test_infinite_and_missing_values_are_equal_where_all_ranks_have_them():
    comm = world()
    inf, nan = float("inf"), float("nan")
    for values in ([0.0, -inf], [inf, -inf, nan, 1.0], [nan], [1e308, -1e308]):
        x = torch.tensor(values, dtype=torch.float64)
        assert difference_over_ranks(x, comm) is None
        assert difference_over_ranks(torch.complex(x, x), comm) is None
    for odd in (inf, -inf, nan):
        x = torch.tensor([1.0, odd if comm.rank else 0.0, nan, -inf])
        assert "1 of 4 values are nan or infinite" in str(difference_over_ranks(x, comm))
    signs = torch.tensor([inf if comm.rank else -inf])
    assert "1 of 1 values" in str(difference_over_ranks(signs, comm))
    mixed = torch.tensor([inf, float(comm.rank)])
    assert "values differ by 1, the largest is 1" in str(difference_over_ranks(mixed, comm))

"""The operators between partitions: adjoint pairs, and who gets what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.operators.examples import PARTITION_CASES, example

from unisono.comm import world
from unisono.errors import PartitionError
from unisono.nn import functional
from unisono.operators import partitioned as op
from unisono.operators import table_text
from unisono.testing import check_adjoint
from unisono.topology import Partition


@pytest.mark.ranks(4)
def test_replicated_values_count_once():
    grid = Partition([2, 2])
    x = torch.full((3,), float(world().rank), requires_grad=True)
    total = op.sum_to_replicated(x, grid, (0, 1))
    assert total.tolist() == [6.0] * 3
    total.sum().backward()
    assert x.grad.tolist() == [1.0] * 3
    w = torch.ones(2, requires_grad=True)
    op.replicate(w, grid, 1).sum().backward()
    assert w.grad.tolist() == [2.0, 2.0]
    part = torch.full((1, 1 + grid.index[1]), 1.0, requires_grad=True)
    joined = op.gather_to_replicated(part, grid, 1)
    assert joined.shape == (1, 3)
    (joined * torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
    assert part.grad.tolist() == ([[1.0]], [[2.0, 3.0]])[grid.index[1]]
    assert op.split(joined, grid, 1).shape == (1, 2 - grid.index[1])


@pytest.mark.ranks(2)
def test_blocks_of_unlike_shape_or_dtype_are_refused():
    both, one = Partition([2]), Partition([1])
    me = world().rank
    with pytest.raises(PartitionError, match="equal shapes"):
        op.sum_reduce(torch.ones(2 + me), both, one)
    with pytest.raises(PartitionError, match="different dtypes"):
        op.sum_reduce(torch.ones(2, dtype=(torch.float32, torch.float64)[me]), both, one)


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_every_row_of_the_table_is_an_adjoint_pair(dtype):
    comm = world()
    own = torch.Generator().manual_seed(comm.rank)
    shared = torch.Generator().manual_seed(77)

    def make(*shape, same=False):
        return torch.randn(*shape, dtype=dtype, generator=shared if same else own)

    for lengths in ([2, 0, 3, 1], [0, 1, 0, 0]):
        for pair in functional.TABLE:
            case = example(pair, comm, lengths[: comm.size], make, PARTITION_CASES)
            check_adjoint(
                case.forward, case.adjoint, case.x, case.y,
                comm=comm, domain=pair.domain, range=pair.range,
            )  # fmt: skip
            assert pair.forward.adjoint is pair.adjoint


def test_the_functions_have_a_public_home_and_the_documentation_prints_their_table():
    names = {pair.name for pair in functional.TABLE}
    attention = {"ring_attention", "ulysses_attention"}  # not linear: no adjoint
    assert {*names, *attention, "TABLE"} == set(functional.__all__)
    for name in names:
        assert getattr(functional, name) is getattr(op, name)
    page = Path(__file__).parents[2] / "docs" / "operators.md"
    assert table_text(functional.TABLE) in page.read_text(encoding="utf-8")

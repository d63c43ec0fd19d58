"""Groups of the backend `shm` over several hosts, rehearsed on one: gloo serves them."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch
import torch.distributed as dist

from unisono.comm import world

LAYOUTS = {"2+2": ("a", "a", "b", "b"), "3+1": ("a", "a", "a", "b"), "1+1+1+1": tuple("abcd")}
at_4 = pytest.mark.ranks(4, backend="shm", timeout=60)


@contextlib.contextmanager
def on_hosts(layout):
    """Have ranks believe to be on the hosts of the layout."""
    os.environ["UNISONO_HOST_ID"] = LAYOUTS[layout][dist.get_rank()]
    try:
        yield
    finally:
        os.environ.pop("UNISONO_HOST_ID", None)


@contextlib.contextmanager
def group_over(layout):
    """Yield a group of all ranks on the hosts of the layout."""
    with on_hosts(layout):
        group = dist.new_group(backend="shm")
        yield group
        dist.destroy_process_group(group)


@at_4
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_and_verbs_over_hosts(layout):
    with group_over(layout) as group:
        comm, rank = world().of(group), dist.get_rank()
        assert comm.backend == "gloo"
        x = torch.full((3, 2), float(rank))
        dist.all_reduce(x, group=group)
        assert x.unique().tolist() == [6.0]
        everybody = [None] * 4
        dist.all_gather_object(everybody, rank, group=group)
        assert everybody == [0, 1, 2, 3]
        rounded = comm.all_reduce(torch.full((2,), 1.0 + rank, dtype=torch.bfloat16), "mean")
        assert rounded.tolist() == [2.5, 2.5]
        rows = comm.all_gather(torch.full((rank, 2), float(rank)))
        assert rows[:, 0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
        got = comm.exchange({(rank + 1) % 4: x}, {(rank - 1) % 4: x})
        assert torch.equal(got[(rank - 1) % 4], x)
        buffer = comm.shared_buffer((5000,), torch.float32).fill_(1.0)
        assert comm.all_reduce_(buffer).unique().tolist() == [4.0]
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(50, 50), process_group=group
        )
        model(torch.full((2, 50), float(rank))).sum().backward()
        assert model.module.weight.grad.unique().tolist() == [3.0]


@at_4
def test_ranks_of_one_host_share_memory_in_a_world_of_several():
    with on_hosts("2+2"):
        first = dist.get_rank() // 2 * 2
        part = world().sub([first, first + 1])
        assert part.backend == "shm"
        assert part.all_gather(torch.tensor([dist.get_rank()])).tolist() == [first, first + 1]
        part.close()
        across = world().sub([0, 2])
        assert across is None or across.backend == "gloo"

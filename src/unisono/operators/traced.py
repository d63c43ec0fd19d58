"""The kernels while torch.compile traces: functional collectives that a graph can hold.

Everything is made of two of them, `all_reduce` and `all_to_all_single` with sizes. Eager code does
not come here: these calls cost hundreds of microseconds more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.torch_private import functional_collectives

funcol = functional_collectives()


def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of `x` over all ranks."""
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", comm.group_name))


def all_to_all(
    x: Tensor, send_sizes: tuple[int, ...], recv_sizes: tuple[int, ...], comm: Communicator
) -> Tensor:
    """Return the rows received from all ranks."""
    received = funcol.all_to_all_single(
        x.contiguous(), list(recv_sizes), list(send_sizes), comm.group_name
    )
    return funcol.wait_tensor(received)


def all_gather(x: Tensor, dim: int, sizes: tuple[int, ...], comm: Communicator) -> Tensor:
    """Return the blocks of all ranks joined along `dim`: every peer gets a copy of mine."""
    rows = x.movedim(dim, 0)
    lengths = (rows.shape[0],) * comm.size
    copies = torch.cat([rows] * comm.size)
    return all_to_all(copies, lengths, sizes, comm).movedim(0, dim).contiguous()


def reduce_scatter(x: Tensor, dim: int, sizes: tuple[int, ...], comm: Communicator) -> Tensor:
    """Return this rank's block of the sum over ranks, added in rank order."""
    length = sizes[comm.rank]
    blocks = all_to_all(x.movedim(dim, 0), sizes, (length,) * comm.size, comm)
    total = blocks[:length]
    for rank in range(1, comm.size):
        total = total + blocks[rank * length : (rank + 1) * length]
    return total.movedim(0, dim).contiguous()

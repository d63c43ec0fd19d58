"""Padding, cutting and splitting to the ranks of the current row; gp_utils' helpers.

Nothing here changes its arguments, and padding is always zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm.arguments import check_dim
from unisono.errors import PartitionError
from unisono.expect import expect
from unisono.graph_parallel.groups import AssertedPartitionError, get_gp_world_size
from unisono.topology.decompose import split_sizes


def size_list_fn(size: int, parts: int) -> list[int]:
    """Return the balanced split of `size` rows: the first `size % parts` parts have one more.

    >>> size_list_fn(5, 4)
    [2, 1, 1, 1]
    """
    return list(split_sizes(size, parts))


def pad_tensor(tensor: Tensor, dim: int = -1, target_size: int | None = None) -> Tensor:
    """Return `tensor` with zeros appended along `dim`; itself when nothing is missing.

    Args:
        tensor: any shape but a scalar.
        dim: where to pad.
        target_size: length along `dim` afterwards; default the next multiple of the row's ranks.
    """
    dim = _check_dim(tensor, dim, "pad_tensor")
    size = tensor.shape[dim]
    ranks = get_gp_world_size()
    target = -(-size // ranks) * ranks if target_size is None else target_size
    expect("target_size", target, int)
    if target < size:
        raise AssertedPartitionError.because(
            f"pad_tensor(target_size={target}) along dim {dim}",
            f"shape {list(tensor.shape)}",
            f"{target} < {size}",
            "padding only adds; trim_tensor cuts",
        )
    if target == size:
        return tensor
    missing = list(tensor.shape)
    missing[dim] = target - size
    return torch.cat([tensor, tensor.new_zeros(missing)], dim)


def trim_tensor(
    tensor: Tensor, sizes: Tensor | None = None, dim: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Return `tensor` cut along `dim` to a multiple of the row's ranks, and the sizes after it.

    The rows that go are taken from the last entries of `sizes` backwards; the result is a new
    tensor, and `sizes` stays as it was.
    """
    dim = _check_dim(tensor, dim, "trim_tensor")
    excess = tensor.shape[dim] % get_gp_world_size()
    if excess == 0:
        return tensor, None if sizes is None else sizes.clone()
    trimmed = tensor.narrow(dim, 0, tensor.shape[dim] - excess)
    if sizes is None:
        return trimmed, None
    if int(sizes.sum()) < excess:
        raise PartitionError.because(
            f"trim_tensor of {tensor.shape[dim]} rows with sizes {sizes.tolist()}",
            f"{excess} rows to take away",
            f"{int(sizes.sum())} < {excess}",
        )
    taken_behind = sizes.flip(0).cumsum(0).flip(0) - sizes
    taken = torch.minimum((excess - taken_behind).clamp(min=0), sizes)
    return trimmed, sizes - taken


def pad_input(input: Tensor, padded_size: int) -> Tensor:
    """Return `input` with zero rows appended up to `padded_size`."""
    return pad_tensor(input, 0, padded_size)


def split_tensor(
    tensor: Tensor, num_parts: int, dim: int = -1, contiguous_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return exactly `num_parts` balanced chunks along `dim`, views of `tensor`; some may be empty.

    With `contiguous_chunks` each is laid out in order, copied where needed.
    """
    dim = _check_dim(tensor, dim, "_split_tensor")
    chunks = tensor.split(size_list_fn(tensor.shape[dim], num_parts), dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_chunks else tuple(chunks)


def _check_dim(tensor: Tensor, dim: int, verb: str) -> int:
    if tensor.dim() == 0:
        raise PartitionError.because(f"{verb} of a tensor without dims", None, None, "x.reshape(1)")
    return check_dim(dim, tensor, verb)

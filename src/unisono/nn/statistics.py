"""Means and variances over blocks on several ranks: merged from each rank's own, in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.operators import all_gather


def merged_moments(
    mean: Tensor, squares: Tensor, counts: list[int], comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over all ranks. Differentiable; collective.

    Args:
        mean: own mean; whatever it is counts for nothing where the own count is 0.
        squares: own sum of squared deviations from it.
        counts: number of values behind each rank's mean, by rank of `comm`.
        comm: the ranks.
    """
    if comm.size == 1:
        return mean, squares
    rows = all_gather(torch.stack([mean, squares])[None], 0, [1] * comm.size, comm=comm)
    return merged(rows, counts)


def merged(rows: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over ranks, from `[ranks, 2, ...]` of them."""
    if len(counts) == 1:
        return rows[0, 0], rows[0, 1]
    means, sums = rows[:, 0], rows[:, 1]
    weights = torch.tensor(counts, dtype=rows.dtype, device=rows.device)
    weights = weights.reshape(-1, *(1,) * (means.dim() - 1))
    whole = (weights * means).sum(0) / sum(counts)
    return whole, (sums + weights * (means - whole) ** 2).sum(0)


def gathered_rows(
    own: Tensor, comm: Communicator, word: Sequence[int] | None
) -> tuple[Tensor, list[int]]:
    """Return the tensors of all ranks, and the largest of their words, in one message."""
    if comm.size == 1:
        return own[None], [] if word is None else list(word)
    numbers = own.new_tensor(word if word is not None else ())
    row = torch.cat([own.reshape(-1), numbers])
    rows = comm.all_gather(row[None], 0, [1] * comm.size)
    words = rows[:, own.numel() :]
    heard = words.amax(0).int().tolist() if word is not None else []
    return rows[:, : own.numel()].reshape(comm.size, *own.shape), heard


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return own mean and sum of squared deviations of each channel (dim 1). Not differentiable."""
    if x.numel() and x.device.type in ("cpu", "cuda"):
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance * (x.numel() // x.shape[1])
    return own_moments(x, tuple(dim for dim in range(x.dim()) if dim != 1))


def own_moments(
    x: Tensor, dims: tuple[int, ...], *, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return own mean and sum of squared deviations over `dims`; zeros where there is nothing."""
    if x.numel() == 0:  # no values, or no place to have a mean of
        empty = x.sum(dims, keepdim=keepdim)
        return empty, empty
    count = math.prod(x.shape[dim] for dim in dims)
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return mean, variance * count

"""Means and variances over blocks on several ranks: merged from each rank's own, in one message."""

from __future__ import annotations

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
    gathered = all_gather(torch.stack([mean, squares])[None], 0, [1] * comm.size, comm=comm)
    weights = torch.tensor(counts, dtype=mean.dtype, device=mean.device)
    weights = weights.reshape(-1, *(1,) * mean.dim())
    means, sums = gathered[:, 0], gathered[:, 1]
    total = sum(counts)
    whole = (weights * means).sum(0) / total
    return whole, (sums + weights * (means - whole) ** 2).sum(0)


def own_moments(
    x: Tensor, dims: tuple[int, ...], *, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return own mean and sum of squared deviations over `dims`; zeros where there is nothing."""
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    if count == 0:
        empty = x.sum(dims, keepdim=keepdim)
        return empty, empty
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=keepdim)
    return mean, variance * count

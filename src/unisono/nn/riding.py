"""The word inside a sum over all ranks of a layer: counts beside the data, in one message."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.comm import Communicator
from unisono.nn.agreement import BAD, CHANGED, INPUTS, NO_GRAD, PARAMETERS, SAME, Word

_MOST_IN_16_BITS = 256
"""Whole numbers up to here are exact in bfloat16."""


def carries_word(dtype: torch.dtype, ranks: int) -> bool:
    """Whether sums of this dtype can count so many ranks."""
    if dtype == torch.bool or dtype.itemsize == 1:
        return False
    return dtype.itemsize > 2 or ranks <= _MOST_IN_16_BITS


@torch.no_grad()
def summed_with_word(own: Tensor, comm: Communicator, word: Word) -> tuple[Tensor, list[int]]:
    """Return the sum of `own` over ranks, and the largest of their words, in one message."""
    level, gradients, grad_on, _ = word
    counts = [level == BAD, level == CHANGED, gradients == INPUTS, gradients == PARAMETERS, grad_on]
    flat = torch.cat([own.reshape(-1), own.new_tensor([int(count) for count in counts])])
    comm.all_reduce_(flat)
    told = flat[own.numel() :]
    bad, changed, inputs, parameters, on = (told.real if told.is_complex() else told).tolist()
    heard = [
        BAD if bad else CHANGED if changed else SAME,
        INPUTS if inputs else PARAMETERS if parameters else NO_GRAD,
        int(on > 0),
        -int(on == comm.size),
    ]
    return flat[: own.numel()].view(own.shape), heard

"""DistDL's `utilities.torch`: tensors without elements, and what a plan knows of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a tensor without elements, of shape `(0,)`, or `(b, 0)` where a batch size is kept.

    >>> zero_volume_tensor().shape, zero_volume_tensor(3, dtype=torch.float64).shape
    (torch.Size([0]), torch.Size([3, 0]))
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device=device)


class TensorStructure:
    """Shape, dtype and `requires_grad` of a tensor, or of none.

    >>> TensorStructure(torch.ones(2, 3)) == TensorStructure(torch.zeros(2, 3))
    True
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.shape: Any = None
        self.dtype: torch.dtype | None = None
        self.requires_grad: bool | None = None
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: Tensor) -> None:
        """Take over what a tensor has."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.requires_grad = tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStructure):
            return NotImplemented
        return self._known() == other._known()

    __hash__ = None  # type: ignore[assignment]

    def _known(self) -> tuple[object, ...]:
        shape = None if self.shape is None else tuple(int(n) for n in self.shape)
        return shape, self.dtype, self.requires_grad

    def __repr__(self) -> str:
        shape, dtype, requires_grad = self._known()
        return f"TensorStructure(shape={shape}, dtype={dtype}, requires_grad={requires_grad})"


def distdl_padding_to_torch_padding(pad: Sequence[Sequence[int]] | np.ndarray) -> tuple[int, ...]:
    """Return `(left, right)` of each dim in the order of `F.pad`: the last dim first.

    >>> distdl_padding_to_torch_padding([[0, 0], [1, 2], [3, 4]])
    (3, 4, 1, 2, 0, 0)
    """
    return tuple(int(n) for pair in reversed(pad) for n in pair)

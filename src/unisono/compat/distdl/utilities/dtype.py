"""DistDL's `utilities.dtype`: tables between dtypes of numpy, of torch, and numpy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_PAIRS: tuple[tuple[type[np.generic], torch.dtype], ...] = (
    (np.bool_, torch.bool),
    (np.uint8, torch.uint8),
    (np.int8, torch.int8),
    (np.int16, torch.int16),
    (np.int32, torch.int32),
    (np.int64, torch.int64),
    (np.float16, torch.float16),
    (np.float32, torch.float32),
    (np.float64, torch.float64),
    (np.complex64, torch.complex64),
    (np.complex128, torch.complex128),
)

numpy_to_torch_dtype_dict: dict[Any, torch.dtype] = {
    key: ours for theirs, ours in _PAIRS for key in (theirs, np.dtype(theirs))
}
"""Scalar type or dtype of numpy -> dtype of torch. numpy has no bfloat16."""
torch_to_numpy_dtype_dict: dict[torch.dtype, type[np.generic]] = {
    ours: theirs for theirs, ours in _PAIRS
}
numpy_to_intID_dtype_dict: dict[Any, int] = {
    key: np.dtype(key).num for key in numpy_to_torch_dtype_dict
}
intID_to_numpy_dtype_dict: dict[int, type[np.generic]] = {
    np.dtype(theirs).num: theirs for theirs, _ in _PAIRS
}
torch_to_intID_dtype_dict: dict[torch.dtype, int] = {
    ours: np.dtype(theirs).num for theirs, ours in _PAIRS
}
intID_to_torch_dtype_dict: dict[int, torch.dtype] = {
    number: ours for ours, number in torch_to_intID_dtype_dict.items()
}

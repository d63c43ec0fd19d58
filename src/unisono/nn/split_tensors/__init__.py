"""Split tensors: ordinary networks on tensors of which each rank holds a block."""

from __future__ import annotations

# Importing a file of rules fills the table.
from unisono.nn.split_tensors import (
    aten,
    norms,
    pointwise,
    pooling,
    products,
    reductions,
    views,
)
from unisono.nn.split_tensors.functions import split_rule
from unisono.nn.split_tensors.module import SplitModule, split
from unisono.nn.split_tensors.tensor import Gathered, Split

__all__ = ["Gathered", "Split", "SplitModule", "split", "split_rule"]
_ = aten, norms, pointwise, pooling, products, reductions, views

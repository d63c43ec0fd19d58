"""Split tensors: ordinary networks on tensors of which each rank holds a block."""

from __future__ import annotations

# Importing a file of rules fills the table.
from unisono.nn.split_tensors import aten, norms, pointwise, products, reductions, views, windows
from unisono.nn.split_tensors.cuts import Gathered
from unisono.nn.split_tensors.functions import split_rule
from unisono.nn.split_tensors.module import SplitModule, split
from unisono.nn.split_tensors.tensor import Split

__all__ = ["Gathered", "Split", "SplitModule", "split", "split_rule"]
_ = aten, norms, pointwise, products, reductions, views, windows

"""pytagi's `nn.data_struct` module."""

from __future__ import annotations

from unisono.bayes import BaseDeltaStates, BaseHiddenStates, HRCSoftmax

__all__ = [
    "BaseDeltaStates",
    "BaseHiddenStates",
    "HRCSoftmax",
]

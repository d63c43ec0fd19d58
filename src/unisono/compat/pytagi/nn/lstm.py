"""pytagi's `nn.lstm` module."""

from __future__ import annotations

from unisono.bayes import LSTM

__all__ = [
    "LSTM",
]

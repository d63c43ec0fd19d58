"""Checkpoints: what one is made of, who writes which piece of it, and how it appears whole."""

from __future__ import annotations

from unisono.train.checkpoint.checkpoint import Checkpoint, Restored
from unisono.train.checkpoint.folder import convert

__all__ = ["Checkpoint", "Restored", "convert"]

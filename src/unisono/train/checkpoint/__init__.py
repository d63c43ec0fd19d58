"""Checkpoints: what one is made of (`parts*.py`, `tree.py`), who writes which piece of it
(`arrangement.py`), how files appear whole or not at all (`folder.py`, `saving.py`, `reading.py`).
"""

from __future__ import annotations

from unisono.train.checkpoint.checkpoint import Checkpoint, Restored

__all__ = ["Checkpoint", "Restored"]

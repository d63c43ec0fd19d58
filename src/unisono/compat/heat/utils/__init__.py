"""The part of HeAT's `utils` that is offered: loaders of data, and torchvision's transforms."""

from __future__ import annotations

from unisono.compat.heat.utils import data, vision_transforms

__all__ = ["data", "vision_transforms"]

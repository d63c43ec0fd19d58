"""DistDL's `functional`: functions without communication."""

from __future__ import annotations

from . import interpolate, zero_volume_corrector
from .zero_volume_corrector import ZeroVolumeCorrectorFunction

__all__ = ["ZeroVolumeCorrectorFunction", "interpolate", "zero_volume_corrector"]

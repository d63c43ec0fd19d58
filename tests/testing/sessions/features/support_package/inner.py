"""A module of the package."""

from __future__ import annotations

SCALE = 3


def scaled(x):
    return SCALE * x

"""DDPW's `io` module."""

from __future__ import annotations

from unisono.launch import IO

__all__ = ["IO"]

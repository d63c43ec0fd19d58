"""DDPW's `wrapper` module. The package's attribute of that name is the decorator."""

from __future__ import annotations

from unisono.launch import Wrapper, wrapper
from unisono.launch.in_process import setup

__all__ = ["Wrapper", "setup", "wrapper"]

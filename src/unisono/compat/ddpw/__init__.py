"""DDPW's names: `from unisono.compat.ddpw import Platform, Wrapper`.

Both spellings of the library work, the present one and that of its first releases.
"""

from __future__ import annotations

from importlib import metadata

# The module `wrapper` is loaded before the function of that name takes its place here.
from unisono.compat.ddpw import functional, io, platform
from unisono.compat.ddpw.wrapper import Wrapper, wrapper
from unisono.launch import Device, Platform

__version__ = "6.1.3"
"""The release of DDPW whose names these are."""

__all__ = ["Device", "Platform", "Wrapper", "functional", "io", "platform", "wrapper"]


def __getattr__(name: str) -> str:
    """Return our licence, which is looked up only when somebody asks for it."""
    if name == "__licence__":
        return _licence()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _licence() -> str:
    for file in metadata.files("unisono") or ():
        if file.name == "LICENSE":
            return file.read_text()
    return str(metadata.metadata("unisono")["License-Expression"])

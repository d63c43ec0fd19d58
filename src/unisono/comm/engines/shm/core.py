"""The compiled core `unisono._core`, or why it is not to be had here."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from unisono.errors import UnisonoError

VERSION = 9
"""That of the core's layout and calls; `src/core/segment.hpp` has the same."""


@functools.cache
def _loaded() -> tuple[Any, str]:
    if sys.platform != "linux":
        return None, f"the compiled core runs on Linux, not on {sys.platform}"
    try:
        module = importlib.import_module("unisono._core")
    except ImportError as error:
        return None, (
            f"the compiled core is not there ({error}); with a C++ compiler (apt install g++), "
            "install unisono again"
        )
    if module.VERSION != VERSION:  # of an editable install whose sources have moved on
        return None, (
            f"the compiled core has version {module.VERSION}, {VERSION} is needed; build it again: "
            "pip install -e . --no-deps"
        )
    return module, ""


def unavailable() -> str | None:
    """Return why there is no compiled core, None if there is one."""
    if os.environ.get("UNISONO_CORE", "") == "0":
        return "UNISONO_CORE=0 switches the compiled core off"
    module, reason = _loaded()
    return None if module is not None else reason


def load() -> Any:
    """Return the module.

    Raises:
        UnisonoError: the core cannot be used; says why.
    """
    if (reason := unavailable()) is not None:
        raise UnisonoError(reason)
    return _loaded()[0]

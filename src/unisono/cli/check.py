"""One line of the report of `unisono doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do about it."""

    name: str
    status: Literal["ok", "warn", "FAIL", "skip"]
    found: str
    fix: str = ""

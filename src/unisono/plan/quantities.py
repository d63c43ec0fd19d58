"""Rates, times and sizes as people write them: `10GB/s`, `2us`, `1.5 GB`. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from unisono.errors import PlatformError

_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_RATES = {f"{unit.lower()}/s": factor for unit, factor in _BYTES.items()} | {
    f"{prefix}bit/s": 0.125 * 1e3**i for i, prefix in enumerate(("", "k", "m", "g", "t"))
}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def read_rate(text: str) -> float:
    """Return bytes a second.

    >>> read_rate("10GB/s"), read_rate("100Gbit/s")
    (10000000000.0, 12500000000.0)
    """
    rate = 0.0 if re.search("[KMGT]b/", text) else _read(text, _RATES)  # Gb: bits, or bytes?
    if not rate > 0:
        raise PlatformError.because(repr(text), "not a rate", hint="write 10GB/s or 100Gbit/s")
    return rate


def read_time(text: str) -> float:
    """Return seconds.

    >>> read_time("2us")
    2e-06
    """
    seconds = _read(text, _TIMES)
    if not seconds >= 0:
        raise PlatformError.because(repr(text), "not a time with a unit", hint="write 2us")
    return seconds


def _read(text: str, units: Mapping[str, float]) -> float:
    """Return a number with one of these units, not a number for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]+(?:/s)?)\s*", text.lower())
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        return math.nan
    value = number * units.get(match[2], math.nan) if match else math.nan
    return value if math.isfinite(value) else math.nan


def write_time(seconds: float) -> str:
    """Return a time with three digits.

    >>> write_time(0.00123), write_time(0.0)
    ('1.23 ms', '0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}" if seconds < 999.5 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def write_bytes(nbytes: float) -> str:
    """Return a size with three digits.

    >>> write_bytes(7_432_192)
    '7.43 MB'
    """
    for unit in ("TB", "GB", "MB", "KB"):
        if nbytes >= 0.9995 * _BYTES[unit]:
            return f"{nbytes / _BYTES[unit]:.3g} {unit}"
    return f"{nbytes:.0f} B"


def write_rate(bytes_per_s: float) -> str:
    """Return a rate with three digits.

    >>> write_rate(1e10)
    '10 GB/s'
    """
    return f"{write_bytes(bytes_per_s)}/s"

"""Rates, times and sizes as people write them: `10GB/s`, `2us`, `1.5 GB`. Pure."""

from __future__ import annotations

import math
import re

from unisono.errors import PlatformError, UnisonoError

_RATES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BITS = {"bit": 0.125, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9}
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z]*)(/s)?\s*", re.I)


def read_rate(text: str) -> float:
    """Return bytes a second.

    >>> read_rate("10GB/s"), read_rate("100Gbit/s")
    (10000000000.0, 12500000000.0)
    """
    number, unit, per_second = _parts(text, "a rate", "10GB/s or 100Gbit/s")
    factor = _RATES.get(unit.upper()) if unit[-3:].lower() != "bit" else _BITS.get(unit.lower())
    if unit[:-1].isupper() and unit[-1] == "b":  # Gb: usually bits, and sometimes not
        factor = None
    if factor is None or not per_second or number <= 0:
        raise _unreadable(text, "a rate", "10GB/s or 100Gbit/s")
    return number * factor


def read_time(text: str) -> float:
    """Return seconds.

    >>> read_time("2us")
    2e-06
    """
    number, unit, per_second = _parts(text, "a time", "2us")
    if unit.lower() not in _TIMES or per_second:
        raise _unreadable(text, "a time", "2us")
    return number * _TIMES[unit.lower()]


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
        if nbytes >= 0.9995 * _RATES[unit]:
            return f"{nbytes / _RATES[unit]:.3g} {unit}"
    return f"{nbytes:.0f} B"


def write_rate(bytes_per_s: float) -> str:
    """Return a rate with three digits.

    >>> write_rate(1e10)
    '10 GB/s'
    """
    return f"{write_bytes(bytes_per_s)}/s"


def _parts(text: str, kind: str, example: str) -> tuple[float, str, bool]:
    match = _NUMBER.fullmatch(text)
    try:
        number = float(match[1]) if match else -1.0
    except ValueError:
        number = -1.0
    if match is None or not 0 <= number < math.inf:
        raise _unreadable(text, kind, example)
    return number, match[2], match[3] is not None


def _unreadable(text: str, kind: str, example: str) -> UnisonoError:
    return PlatformError.because(f"{text!r}", f"not {kind} with a unit", hint=f"write {example}")

"""Which way to do a collective: a pure function of what all ranks know alike.

On gloo a small collective costs its latencies: a ring of W ranks has W-1 of them, a pairwise
exchange one. A large one costs its bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache

from unisono.errors import UnisonoError

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_gather": ("native", "all_to_all", "broadcasts"),
    "reduce_scatter": ("native", "all_to_all"),
    "all_reduce": ("native", "all_to_all", "scatter_gather"),
}
"""Ways known for each verb; `native` is the backend's own call."""

SMALL_BYTES = 64 * 1024
"""Below this many bytes in all, a gloo collective is latency."""

MAX_PAIRWISE_RANKS = 8
"""Above this many ranks an exchange of copies with every peer costs more than a ring."""


_override: dict[str, str] = {}


def choose(
    verb: str,
    nbytes_total: int,
    even: bool,
    size: int,
    backend: str,
    *,
    rounds_once: bool = False,
) -> str:
    """Return the name of the algorithm for `verb`.

    Args:
        verb: a key of `ALGORITHMS`; any other verb is always done natively.
        nbytes_total: bytes of the whole tensor (joined, for gathers), equal on all ranks.
        even: whether all blocks have the same size.
        size: number of ranks.
        backend: name of the backend.
        rounds_once: the sum must be carried in a wider dtype than it travels in.

    >>> choose("all_gather", 1024, True, 2, "gloo"), choose("all_gather", 10**7, False, 2, "gloo")
    ('all_to_all', 'broadcasts')
    """
    if verb not in ALGORITHMS or size == 1:
        return "native"
    forced = forced_algorithms().get(verb)
    if forced is not None and _is_possible(forced, verb, even, rounds_once, backend):
        return forced
    if backend != "gloo":
        return "native"
    small = nbytes_total <= SMALL_BYTES
    if verb == "reduce_scatter":
        return "all_to_all"
    if verb == "all_gather":
        if small and size <= MAX_PAIRWISE_RANKS:
            return "all_to_all"
        return "native" if small and even else "broadcasts"
    if rounds_once:
        return "all_to_all" if small else "scatter_gather"
    if small and size <= MAX_PAIRWISE_RANKS:
        return "all_to_all"
    return "native"


def _is_possible(name: str, verb: str, even: bool, rounds_once: bool, backend: str) -> bool:
    if name != "native":
        return True
    if verb == "all_gather":
        return even or backend != "gloo"
    # A native sum of 16-bit floats rounds at each step, and gloo cuts only even blocks.
    return not rounds_once and (verb != "reduce_scatter" or even)


@lru_cache(maxsize=8)
def parse_forced(text: str) -> dict[str, str]:
    """Read `verb:name,verb:name` as `UNISONO_ALGO` holds it."""
    forced: dict[str, str] = {}
    for item in filter(None, (word.strip() for word in text.split(","))):
        verb, _, name = item.partition(":")
        if name not in ALGORITHMS.get(verb, ()):
            legal = "; ".join(f"{v}: {', '.join(names)}" for v, names in ALGORITHMS.items())
            raise UnisonoError.because(
                f"UNISONO_ALGO={text!r}", f"{item!r} names no algorithm", None, legal
            )
        forced[verb] = name
    return forced


@contextlib.contextmanager
def forcing(verb: str, name: str) -> Iterator[None]:
    """Use algorithm `name` for `verb` inside; goes before `UNISONO_ALGO`. Same on all ranks."""
    global _override
    before, _override = _override, {verb: name}
    try:
        yield
    finally:
        _override = before


def forced_algorithms() -> Mapping[str, str]:
    """Return the algorithms forced by `forcing` or by `UNISONO_ALGO`."""
    return _override or parse_forced(os.environ.get("UNISONO_ALGO", ""))

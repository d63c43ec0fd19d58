"""The marker `@pytest.mark.ranks(n, timeout=20, backend="gloo")`, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from unisono.errors import PlatformError

DESCRIPTION = (
    'ranks(n, timeout=20, backend="gloo"): run the test body on n ranks, each with a default '
    "process group; a list of n, or of backends, runs the test once for each"
)


@dataclass(frozen=True, kw_only=True)
class RanksMarker:
    """What a `ranks` marker asks for."""

    counts: tuple[int, ...]
    """Numbers of ranks."""
    many: bool
    """Whether a list was given, so that the test is run once for each."""
    timeout_s: float
    """Seconds for the body of the test (for each drawn example under hypothesis)."""
    backends: tuple[str, ...]
    """Backends of the process group."""
    many_backends: bool
    """Whether a list of backends was given."""

    @classmethod
    def of(
        cls, node: pytest.Item | pytest.Function, default_timeout_s: float
    ) -> RanksMarker | None:
        """Read the closest marker of a test; None when it has none."""
        mark = node.get_closest_marker("ranks")
        return None if mark is None else cls.read(mark, default_timeout_s)

    @classmethod
    def read(cls, mark: pytest.Mark, default_timeout_s: float) -> RanksMarker:
        """Read a marker.

        Raises:
            PlatformError: the arguments make no sense.
        """
        options = dict(mark.kwargs)
        asked: Any = mark.args[0] if len(mark.args) == 1 else None
        timeout_s = options.pop("timeout", default_timeout_s)
        backend = options.pop("backend", "gloo")
        many_backends = isinstance(backend, Sequence) and not isinstance(backend, str)
        backends: tuple[Any, ...] = tuple(backend) if many_backends else (backend,)
        many = isinstance(asked, Sequence)
        counts: tuple[Any, ...] = tuple(asked) if many else (asked,)
        fits = (
            bool(counts)
            and all(isinstance(n, int) and n >= 1 for n in counts)
            and isinstance(timeout_s, (int, float))
            and timeout_s > 0
            and bool(backends)
            and all(isinstance(name, str) for name in backends)
            and not options
        )
        if not fits:
            said = [repr(a) for a in mark.args] + [f"{k}={v!r}" for k, v in mark.kwargs.items()]
            raise PlatformError.because(
                f"@pytest.mark.ranks({', '.join(said)})",
                "it takes a number of ranks, a timeout and a backend (lists of the first and last)",
                hint='@pytest.mark.ranks(2, timeout=20, backend="gloo")',
            )
        return cls(
            counts=counts,
            many=many,
            timeout_s=float(timeout_s),
            backends=backends,
            many_backends=many_backends,
        )

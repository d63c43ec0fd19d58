"""Printing that can be switched off for a whole program."""

from __future__ import annotations

from typing import Any

__all__ = ["IO"]


class IO:
    """Prints if `verbose` says so.

    Attributes:
        verbose: what `print` does when it is not told; `Wrapper` sets it from its platform.
    """

    verbose: bool = True

    @staticmethod
    def print(
        *args: Any, verbose: bool | None = None, flush: bool = True, **print_kwargs: Any
    ) -> None:
        """Print as the builtin does, unless `verbose` (default: `IO.verbose`) is false."""
        if IO.verbose if verbose is None else verbose:
            print(*args, flush=flush, **print_kwargs)

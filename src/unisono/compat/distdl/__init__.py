"""DistDL's names: `import unisono.compat.distdl as distdl`, and the script runs.

Over mpi4py communicators and torch process groups, with neither MPI nor a compiler being needed.
Imports inside the package are relative, so the tree also works under the name `distdl`.
"""

from __future__ import annotations

from typing import NoReturn

from . import backend, backends, config, functional, nn, utilities

__version__ = "0.5.0"
"""The release of DistDL whose names these are."""

__all__ = ["backend", "backends", "config", "functional", "nn", "utilities"]

config.set_backend()


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered."""
    raise AttributeError(
        f"{__name__} has no {name!r}: it offers {', '.join(__all__)}\n"
        "  HINT: unisono.nn and unisono.operators hold what these are made of"
    )

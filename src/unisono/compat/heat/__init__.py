"""HeAT's names for training: `import unisono.compat.heat as ht`, and the script runs.

Neural networks, optimizers, data loaders and the communicator are here, without MPI or a GPU being
needed. HeAT's array library is not: keep heat for arrays and pass `x.larray`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from unisono.compat.heat import core, nn, optim, utils
from unisono.compat.heat.core import communication
from unisono.compat.heat.core.communication import (
    MPI,
    MPI_SELF,
    MPI_WORLD,
    Communication,
    MPICommunication,
    MPIRequest,
    get_comm,
    sanitize_comm,
    use_comm,
)
from unisono.compat.libraries import LIBRARIES

__version__ = "1.5.1"
"""The release of HeAT whose names these are."""

__all__ = [
    "MPI",
    "MPI_SELF",
    "MPI_WORLD",
    "Communication",
    "MPICommunication",
    "MPIRequest",
    "communication",
    "core",
    "get_comm",
    "nn",
    "optim",
    "sanitize_comm",
    "use_comm",
    "utils",
]


def __getattr__(name: str) -> NoReturn:
    """Say what is not offered."""
    hint = "import heat for arrays beside this module, and pass x.larray to what is here"
    if sys.modules.get("heat") is sys.modules[__name__]:
        hint = (
            f"{LIBRARIES['heat'].instead}; start without --compat heat or serve('heat') then: "
            "`import heat` finds this module now"
        )
    raise AttributeError(
        f"{__name__} has no {name!r}: it offers HeAT's nn, optim, utils.data and communicator, "
        "not its array library (DNDarray, array, zeros, random, linalg, statistics, I/O)\n"
        f"  HINT: {hint}"
    )

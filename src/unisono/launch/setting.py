"""What a rank takes over from its launcher: environment, directory, warning filters, torch's modes.

A fresh interpreter inherits most of it; a rank forked from the warm server has to be told, or it
would see the world as it was when the server started.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.environment import RANK_PID

MISLEADING = (
    *(RANK_PID, "UNISONO_DETECT", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables of a launcher that tell of another world than that of its ranks."""
_PLAIN_MODULES = ("builtins", "warnings", "torch", "numpy")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The launcher's surroundings at the moment of a run."""

    environment: dict[str, str]
    """Variables common to all ranks."""
    directory: str | None
    """Working directory; None if it is gone."""
    umask: int
    """Mode bits that new files do not get."""
    filters: list[Any]
    """Warning filters."""
    modes: dict[str, Any]
    """Defaults of torch that a script may have set before it runs a function."""

    @classmethod
    def now(cls, environment: Mapping[str, str]) -> Setting:
        """Return the surroundings of this process, with `environment` as variables."""
        directory = None
        with suppress(OSError):
            directory = str(Path.cwd())
        return cls(
            environment=dict(environment),
            directory=directory,
            umask=_umask(),
            filters=_travelling_filters(),
            modes=_modes_of_torch(),
        )

    def apply(self, own: Mapping[str, str]) -> None:
        """Take these surroundings over in this process, with `own` variables on top."""
        os.environ.clear()
        os.environ.update({**self.environment, **own})
        os.umask(self.umask)
        if self.directory is not None:
            with suppress(OSError):
                os.chdir(self.directory)

    def apply_inside(self) -> None:
        """Take over what is set in Python: the warning filters and the modes of torch."""
        warnings.filters[:] = self.filters  # pyright: ignore[reportIndexIssue]
        warnings._filters_mutated()  # pyright: ignore[reportAttributeAccessIssue]
        if self.modes and self.modes != _modes_of_torch():  # setting them loads torch's compiler
            import torch

            torch.set_default_dtype(self.modes["dtype"])
            torch.set_float32_matmul_precision(self.modes["precision"])
            torch.use_deterministic_algorithms(
                self.modes["deterministic"], warn_only=self.modes["warns_only"]
            )


def _umask() -> int:
    """Return the umask; /proc tells it without changing it, which other threads would notice."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    value = os.umask(0o077)
    os.umask(value)
    return value


def _modes_of_torch() -> dict[str, Any]:
    """Return what this process has set in torch; nothing if it has not loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def _travelling_filters() -> list[Any]:
    """Return the filters that a rank can unpickle without importing the user's modules."""
    kept: list[Any] = []
    for entry in warnings.filters:
        home = entry[2].__module__.partition(".")[0]
        if home in _PLAIN_MODULES and home in sys.modules:
            with suppress(Exception):
                pickle.dumps(entry)
                kept.append(entry)
    return kept

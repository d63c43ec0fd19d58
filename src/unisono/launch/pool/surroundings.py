"""What a rank takes over from its launcher: environment, directory, and settings of Python.

Settings are warning filters, the root logger, torch's modes, and the source of code without a file,
such as cells of a notebook, so that tracebacks of a rank show its lines.

A fresh interpreter inherits most of it; a rank forked from the warm server inherits the state of
the moment when the server started.
"""

from __future__ import annotations

import linecache
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.environment import RANK_PID, Environment

MISLEADING = (
    *(RANK_PID, "UNISONO_DETECT", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)
"""Variables of a launcher that describe another world than that of its ranks."""
_FOR_OTHER_HOSTS = (
    *("UNISONO_", "PYTHON", "TORCH", "OMP_", "MKL_", "GLOO_", "NCCL_"),
    *("COLUMNS", "LINES"),
)
"""Prefixes of variables that ranks of other hosts get as well."""
_OF_THIS_HOST = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONBREAKPOINT"),
    *("UNISONO_HOST_ID", "UNISONO_JOB_DIR", "UNISONO_AGENT"),
)
_SOURCE_BYTES = 4 << 20
"""Most source code that is sent along."""
_PLAIN_MODULES = ("builtins", "warnings", "torch", "numpy")


def common_variables(
    base: Mapping[str, str], *, threads: int, more: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the variables of all ranks of a host: `base` without those of another world.

    `more` are variables that the user adds.
    """
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each lost connection prints a C++ stack
        "OMP_NUM_THREADS": str(threads),
        **{name: value for name, value in base.items() if name not in MISLEADING},
        **(more or {}),
    }


def for_other_hosts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks of other hosts get from the launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_FOR_OTHER_HOSTS) and name not in _OF_THIS_HOST
    }


def rank_variables(place: Environment, run_id: str, job_dir: Path, attempt: int) -> dict[str, str]:
    """Return the variables that describe the place of one rank."""
    return {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "NODE_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "UNISONO_RUN_ID": run_id,
        "UNISONO_JOB_DIR": str(job_dir),
        "UNISONO_RESTART": str(attempt),
    }


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Surroundings of the launcher at the start of a run."""

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
    logger: dict[str, Any]
    """Level and format of the root logger; nothing if it is as Python makes it."""
    sources: dict[str, str]
    """Text of code that is in no file, by the name that its frames have."""

    @classmethod
    def now(cls, environment: Mapping[str, str]) -> Surroundings:
        """Return the surroundings of this process, with `environment` as variables."""
        directory = None
        with suppress(OSError):
            directory = str(Path.cwd())
        filters: list[Any] = []
        for entry in warnings.filters:  # those that a rank can unpickle without the user's modules
            home = entry[2].__module__.partition(".")[0]
            if home in _PLAIN_MODULES and home in sys.modules:
                with suppress(Exception):
                    pickle.dumps(entry)
                    filters.append(entry)
        sources: dict[str, str] = {}
        remaining = _SOURCE_BYTES
        for name, entry in reversed(list(linecache.cache.items())):  # the newest first
            # Cells have no time of change; files are read where they are needed.
            if len(entry) == 4 and entry[1] is None and not name.endswith("<doctest>"):
                text = "".join(entry[2])
                remaining -= len(text)
                if remaining < 0:
                    break
                sources[name] = text
        return cls(
            environment=dict(environment),
            directory=directory,
            umask=_umask(),
            filters=filters,
            modes=_modes_of_torch(),
            logger=_root_logger(),
            sources=sources,
        )

    def apply(self, variables: Mapping[str, str]) -> None:
        """Apply environment, umask and directory, with these `variables` on top."""
        os.environ.clear()
        os.environ.update({**self.environment, **variables})
        os.umask(self.umask)
        if self.directory is not None:
            with suppress(OSError):
                os.chdir(self.directory)

    def apply_inside(self) -> None:
        """Apply the settings of Python."""
        for name, text in self.sources.items():
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        root = logging.getLogger()
        # Unless a module of the function has seen to it.
        if self.logger and not root.handlers and root.level == logging.WARNING:
            root.setLevel(self.logger["level"])
            if "formatter" in self.logger:
                stream = sys.stdout if self.logger["is_stdout"] else sys.stderr
                handler = logging.StreamHandler(stream)
                handler.setLevel(self.logger["handler_level"])
                handler.setFormatter(self.logger["formatter"])
                root.addHandler(handler)
        warnings.resetwarnings()  # this also tells modules that the filters have changed
        warnings.filters[:] = self.filters  # pyright: ignore[reportIndexIssue]
        if self.modes and self.modes != _modes_of_torch():  # setting them loads torch's compiler
            import torch

            torch.set_default_dtype(self.modes["dtype"])
            torch.set_float32_matmul_precision(self.modes["precision"])
            torch.use_deterministic_algorithms(
                self.modes["deterministic"], warn_only=self.modes["warns_only"]
            )


def _root_logger() -> dict[str, Any]:
    """Return the settings of the root logger of this process."""
    root = logging.getLogger()
    settings: dict[str, Any] = {"level": root.level}
    handler = next((h for h in root.handlers if type(h) is logging.StreamHandler), None)
    if handler is not None:
        is_plain = type(handler.formatter) is logging.Formatter  # which ranks can unpickle
        settings["formatter"] = handler.formatter if is_plain else logging.Formatter()
        settings["handler_level"] = handler.level
        settings["is_stdout"] = handler.stream in (sys.stdout, sys.__stdout__)
    return {} if settings == {"level": logging.WARNING} else settings


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
    """Return the modes of torch in this process; nothing if it has not loaded torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }

"""The settings of a rank that a test may change: taken before it, put back after it.

What cannot be put back (threads, child processes, open files) is a matter of `leaks.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "SIGHUP")


def _set_signals(handlers: dict[str, Any]) -> None:
    for name, handler in handlers.items():
        signal.signal(getattr(signal, name), handler)


def _signals() -> dict[str, Any]:
    found = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    return {name: handler for name, handler in found.items() if handler is not None}


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "(removed)"


def _set_environment(values: dict[str, str]) -> None:
    if dict(os.environ) != values:
        os.environ.clear()
        os.environ.update(values)


def _set_device(device: torch.device) -> None:
    # None, not "cpu": a device set by name slows every factory function down.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_path(values: list[str]) -> None:
    sys.path[:] = values


_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (torch.get_default_device, _set_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "threads of torch": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "environment": (lambda: dict(os.environ), _set_environment),
    "working directory": (_directory, os.chdir),
    "sys.path": (lambda: list(sys.path), _set_path),
    "signal handlers": (_signals, _set_signals),
}

_RESTORED_SILENTLY = ("environment", "sys.path")
"""The environment is told by `leaks.py` in more detail; importing helpers may extend the path."""


@dataclass(frozen=True)
class RankState:
    """Settings of this process at one time."""

    values: dict[str, Any]

    @classmethod
    def now(cls) -> RankState:
        """Take the settings of this process."""
        return cls({name: get() for name, (get, _) in _SETTINGS.items()})

    def restore(self) -> list[str]:
        """Put the settings back; return a line for each that had changed."""
        changed: list[str] = []
        for name, (get, put) in _SETTINGS.items():
            before, after = self.values[name], get()
            if before == after:
                continue
            put(before)
            if name not in _RESTORED_SILENTLY:
                changed.append(f"{name}: {before} -> {after}")
        return changed

"""mpi4py, loaded when it is first needed, and what its threads may do.

Importing `mpi4py.MPI` initialises MPI, so nothing here does it before somebody asks for a group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import warnings
from typing import Any

from unisono.errors import MissingExtra, UnisonoError

_PURPOSE = "ranks that talk over MPI (backend 'mpi')"
_process_lock = threading.RLock()


def load() -> Any:
    """Return the module `mpi4py.MPI`, with MPI initialised.

    Raises:
        MissingExtra: mpi4py, or an MPI library for it, is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingExtra.of("mpi", _PURPOSE, _first_line(error)) from error
    if MPI.Is_finalized():
        raise UnisonoError.because(_PURPOSE, "MPI has been finalized in this process")
    if not MPI.Is_initialized():
        raise UnisonoError.because(
            _PURPOSE, "MPI is not initialised in this process", None, "MPI.Init_thread() first"
        )
    return MPI


def unavailable() -> str | None:
    """Return why MPI cannot be used here, None if it can; does not initialise it."""
    install = 'pip install "unisono[mpi]"'
    try:
        found = importlib.util.find_spec("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        return f"{_first_line(error)}: {install}"
    return None if found is not None else f"mpi4py is not installed: {install}"


def is_communicator(source: object) -> bool:
    """Whether `source` is a communicator of mpi4py; does not import it."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and isinstance(source, module.Comm)


class Threads:
    """What the threads of this process may do with MPI.

    Attributes:
        lock: held around each MPI call; a real lock only where MPI wants one thread at a time.
        has_background: whether another thread than the main one may call MPI.
    """

    def __init__(self, mpi: Any) -> None:
        level = mpi.Query_thread()
        self._mpi = mpi
        self.has_background: bool = level >= mpi.THREAD_SERIALIZED
        self.lock: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if level == mpi.THREAD_MULTIPLE else _process_lock
        )

    def warn_of_one(self) -> None:
        """Warn once where MPI leaves nothing to a background thread."""
        global _has_warned
        if self.has_background or _has_warned:
            return
        _has_warned = True
        warnings.warn(
            "MPI was initialised for one thread: collectives with async_op=True are done in the "
            "call itself. HINT: mpi4py.rc.thread_level = 'multiple' before importing mpi4py.MPI",
            RuntimeWarning,
            stacklevel=2,
        )

    def check(self, doing: str) -> None:
        """Refuse a call from a thread that MPI does not expect."""
        if not self.has_background and not self._mpi.Is_thread_main():
            raise UnisonoError.because(
                f"{doing} over MPI in thread {threading.current_thread().name!r}",
                "MPI was initialised for its main thread alone",
                None,
                "mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI",
            )


_has_warned = False


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]

"""unisono: many ranks, one model.

The public names below are loaded at first use, so `import unisono` costs a few milliseconds and
imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono import (
        bayes,
        comm,
        compat,
        data_parallel,
        errors,
        graph_parallel,
        launch,
        nn,
        operators,
        plan,
        testing,
        topology,
        train,
    )
    from unisono.comm import Communicator
    from unisono.data_parallel import DASO, DataParallel
    from unisono.launch import (
        Device,
        Job,
        Logs,
        Platform,
        Results,
        Wrapper,
        job_dir,
        requeue,
        restart_count,
        run,
        should_stop,
        submit,
        world,
        wrapper,
    )
    from unisono.topology import Mesh, Partition
    from unisono.train import Checkpoint

__version__ = "0.2.0"

_HOMES = {
    "unisono.comm": "Communicator",
    "unisono.data_parallel": "DASO DataParallel",
    "unisono.launch": "Device Job Logs Platform Results Wrapper job_dir requeue restart_count run "
    "should_stop submit world wrapper",
    "unisono.topology": "Mesh Partition",
    "unisono.train": "Checkpoint",
}

__all__ = [
    "DASO",
    "Checkpoint",
    "Communicator",
    "DataParallel",
    "Device",
    "Job",
    "Logs",
    "Mesh",
    "Partition",
    "Platform",
    "Results",
    "Wrapper",
    "__version__",
    "bayes",
    "comm",
    "compat",
    "data_parallel",
    "errors",
    "graph_parallel",
    "job_dir",
    "launch",
    "nn",
    "operators",
    "plan",
    "requeue",
    "restart_count",
    "run",
    "should_stop",
    "submit",
    "testing",
    "topology",
    "train",
    "world",
    "wrapper",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home, once; what has no home is a package."""
    for home, names in _HOMES.items():
        if name in names.split():
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    if name in __all__:
        return importlib.import_module(f"unisono.{name}")
    from unisono.removed import removed_name

    raise removed_name(f"unisono.{name}")


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)

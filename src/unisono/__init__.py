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
    "Checkpoint": "unisono.train",
    "Communicator": "unisono.comm",
    "DASO": "unisono.data_parallel",
    "DataParallel": "unisono.data_parallel",
    "Device": "unisono.launch",
    "Job": "unisono.launch",
    "Logs": "unisono.launch",
    "Platform": "unisono.launch",
    "Wrapper": "unisono.launch",
    "job_dir": "unisono.launch",
    "requeue": "unisono.launch",
    "restart_count": "unisono.launch",
    "should_stop": "unisono.launch",
    "submit": "unisono.launch",
    "wrapper": "unisono.launch",
    "Results": "unisono.launch",
    "run": "unisono.launch",
    "world": "unisono.launch",
    "Mesh": "unisono.topology",
    "Partition": "unisono.topology",
}
_PACKAGES = (
    "bayes",
    "comm",
    "compat",
    "data_parallel",
    "errors",
    "graph_parallel",
    "launch",
    "nn",
    "operators",
    "plan",
    "testing",
    "topology",
    "train",
)

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
    """Load a public name from its home, once."""
    if name in _PACKAGES:
        return importlib.import_module(f"unisono.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)

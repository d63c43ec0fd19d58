"""Ranks, groups and the network: everything above talks to a `Communicator`.

`world()` is the communicator of all ranks, in a plain process too. Verbs move tensors without
autograd (differentiable ones are in `unisono.operators`); `trace` and `check` look at them.
"""

from __future__ import annotations

from unisono.comm import engines as transports
from unisono.comm.checking import check
from unisono.comm.closing import close_world
from unisono.comm.communicator import Communicator, world
from unisono.comm.failures import post_failure, posted_failure
from unisono.comm.first_use import has_world
from unisono.comm.messages import StartedVerbs
from unisono.comm.pending import Pending
from unisono.comm.start import open_store, start_world, stop_world
from unisono.comm.tracing import Event, start_from_environment, trace
from unisono.environment import Environment, detect

__all__ = [
    "Communicator",
    "Environment",
    "Event",
    "Pending",
    "StartedVerbs",
    "check",
    "close_world",
    "detect",
    "has_world",
    "open_store",
    "post_failure",
    "posted_failure",
    "start_world",
    "stop_world",
    "trace",
    "transports",
    "world",
]

transports.register()
start_from_environment()

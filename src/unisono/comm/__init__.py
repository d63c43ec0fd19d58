"""Ranks, groups and the network: everything above talks to a `Communicator`.

`world()` is the communicator of all ranks, in a plain process too. Verbs move tensors without
autograd (differentiable ones are in `unisono.operators`); `trace` and `check` look at them.
"""

from __future__ import annotations

from unisono.comm import backends as transports
from unisono.comm.communicator import Communicator, world
from unisono.comm.groups import has_world
from unisono.comm.health.check import check
from unisono.comm.health.failures import post_failure, posted_failure
from unisono.comm.health.trace import Event, start_from_environment, trace
from unisono.comm.lifecycle import (
    close_world,
    leave_at_exit,
    open_store,
    start_world,
    stop_world,
)
from unisono.comm.messages import StartedVerbs
from unisono.comm.perform import Pending
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
    "leave_at_exit",
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

"""The same function, anywhere: start ranks, watch them, bring back what they return.

`run` is the front door, `submit` the one that does not wait; `Wrapper` and `wrapper` speak DDPW.
Starting this package imports neither torch nor numpy.
"""

from __future__ import annotations

from unisono.launch.api import dry_run, run, submit, submit_array
from unisono.launch.in_process import world
from unisono.launch.job import Job
from unisono.launch.logs import IO, Logs
from unisono.launch.platform import Device, Platform
from unisono.launch.pool.client import shutdown
from unisono.launch.results import Results
from unisono.launch.stopping import (
    job_dir,
    requeue,
    restart_count,
    should_stop,
    simulate_preemption,
)
from unisono.launch.tasks import Wrapper, wrapper
from unisono.removed import removed_name

__all__ = [
    "IO",
    "Device",
    "Job",
    "Logs",
    "Platform",
    "Results",
    "Wrapper",
    "dry_run",
    "job_dir",
    "requeue",
    "restart_count",
    "run",
    "should_stop",
    "shutdown",
    "simulate_preemption",
    "submit",
    "submit_array",
    "world",
    "wrapper",
]


def __getattr__(name: str) -> object:
    """Say what to write instead of a name that is gone."""
    raise removed_name(f"unisono.launch.{name}")

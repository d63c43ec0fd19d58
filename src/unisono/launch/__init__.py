"""The same function, anywhere: start ranks, watch them, bring back what they return.

`run` is the front door. Starting this package imports neither torch nor numpy.
"""

from __future__ import annotations

from unisono.launch.existing import world
from unisono.launch.logs import Logs
from unisono.launch.results import Results
from unisono.launch.run import run

__all__ = ["Logs", "Results", "run", "world"]

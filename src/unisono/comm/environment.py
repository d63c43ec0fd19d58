"""Which world this process is in; read in `unisono.environment`, which loads no torch."""

from __future__ import annotations

from unisono.environment import Environment, Kind, detect, expand_tasks_per_node

__all__ = ["Environment", "Kind", "detect", "expand_tasks_per_node"]

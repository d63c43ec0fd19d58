"""accelerate in a script of `unisono run`: it joins the world of the ranks.

Alone it starts a gloo world on CPU ranks, or none if the script does not say `cpu=True`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_STATE = "accelerate.state"


class _Finder(MetaPathFinder):
    """Finds the module in which accelerate looks for its world, and changes it once it is there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _STATE else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change(module)

            loader.exec_module = execute_and_change
        return spec


@contextlib.contextmanager
def trainers_join() -> Iterator[None]:
    """Let accelerate use the world of this rank while the block runs, if it is imported there."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _change(module: Any) -> None:
    start = module.PartialState.__init__

    @functools.wraps(start)
    def join_and_start(self: Any, cpu: bool = False, **options: Any) -> None:
        import torch.distributed as dist

        import unisono
        from unisono.launch.context import here

        rank = here()
        if rank is not None and not dist.is_initialized():
            unisono.world()
            cpu = cpu or rank.device.type == "cpu"
        start(self, cpu, **options)

    module.PartialState.__init__ = join_and_start

"""The current groups of the process, in gp_utils' spelling: set-up, clean-up, queries.

`setup_gp` and `use_groups` install a matrix of ranks; regions use its row unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from unisono.comm import Communicator, has_world, world
from unisono.errors import MeshError, an
from unisono.graph_parallel.asserted import AssertedMeshError, AssertedPartitionError
from unisono.graph_parallel.matrix import (
    GraphGroups,
    check_size,
    check_whole_number,
    graph_groups,
    groups_of_mesh,
)
from unisono.topology import Mesh


@dataclass(frozen=True)
class _Installed:
    """The groups of the process, and the world in which they are valid."""

    groups: GraphGroups
    world: dist.ProcessGroup | None
    made_here: bool = False
    before: _Installed | None = None


_installed: _Installed | None = None


def ensure_div(a: int, b: int) -> None:
    """Raise unless `b` divides `a`."""
    if b == 0 or a % b:
        remainder = f" (remainder {a % b})" if b else ""
        raise AssertedPartitionError.because(f"{a} is not divisible by {b}{remainder}")


def divide_and_check_no_remainder(a: int, b: int) -> int:
    """Return `a / b`, which must be whole.

    >>> divide_and_check_no_remainder(6, 2)
    3
    """
    ensure_div(a, b)
    return a // b


def setup_gp(config: Mapping[str, Any]) -> None:
    """Set up the groups of the process. Collective over the world.

    Args:
        config: `gp_gpus`, ranks that share a graph (at most the world is taken), and optionally
            `distributed_backend`, default that of the world.
    """
    if not isinstance(config, Mapping) or "gp_gpus" not in config:
        keys = sorted(map(str, config)) if isinstance(config, Mapping) else type(config).__name__
        raise AssertedMeshError.because(
            "setup_gp(config)",
            f"no key 'gp_gpus' in {keys}",
            None,
            'setup_gp({"gp_gpus": 2, "distributed_backend": None})',
        )
    size = config["gp_gpus"]
    check_whole_number(size, f"setup_gp with gp_gpus={size!r}")
    _install_new(min(size, world().size), config.get("distributed_backend"), "setup_gp")


def setup_graph_parallel_groups(
    graph_parallel_group_size: int, distributed_backend: str | None = None
) -> None:
    """Set up groups of exactly this size. Collective over the world."""
    size = graph_parallel_group_size
    check_whole_number(size, f"setup_graph_parallel_groups({size!r})")
    _install_new(size, distributed_backend, "setup_graph_parallel_groups")


def cleanup_gp() -> None:
    """Forget the groups, and destroy those that set-up made. On all ranks; twice is fine."""
    global _installed
    ended, _installed = _installed, None
    while ended is not None:
        if ended.made_here and ended.world is _world_group():
            ended.groups.dp.close()
            ended.groups.gp.close()
        ended = ended.before


class use_groups:
    """Make these groups the current ones, until the end of a `with` block if there is one.

    Local for `GraphGroups`; collective over a `Mesh` whose communicators are used the first time.

    Args:
        groups: from `graph_groups`, or a `Mesh` with the two axes (no group is made twice).
        gp: name of the mesh axis along which a graph is split.
        dp: name of the mesh axis along which batches differ.
    """

    def __init__(self, groups: GraphGroups | Mesh, *, gp: str = "gp", dp: str = "dp") -> None:
        global _installed
        if not isinstance(groups, GraphGroups | Mesh):
            raise MeshError.because(
                f"use_groups({groups!r:.60})",
                f"{an(type(groups).__name__)}, neither GraphGroups nor a Mesh",
                None,
                "use_groups(graph_groups(2)), or use_groups(Mesh(dp=2, gp=2))",
            )
        self.groups = groups_of_mesh(groups, gp, dp) if isinstance(groups, Mesh) else groups
        self._mine = _Installed(self.groups, _world_group(), before=_installed)
        _installed = self._mine

    def __enter__(self) -> GraphGroups:
        return self.groups

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        global _installed
        if _installed is self._mine:  # a clean-up inside has ended the former ones too
            _installed = self._mine.before


def current_groups() -> GraphGroups | None:
    """Return the current groups; None before set-up, and when their world has ended."""
    if _installed is None or _installed.world is not _world_group():
        return None
    return _installed.groups


def current_gp() -> Communicator:
    """Return the communicator regions use: the current row, or this process if it is alone.

    Raises:
        MeshError: in a world of several ranks without set-up. A forgotten set-up must not pass for
            a parallel run.
    """
    groups = current_groups()
    if groups is not None:
        return groups.gp
    whole = world()
    if whole.size > 1:
        raise MeshError.because(
            "a graph-parallel region before set-up",
            f"a world of {whole.size} ranks and no graph-parallel groups",
            None,
            f'setup_gp({{"gp_gpus": {whole.size}, "distributed_backend": None}}), or comm=...',
        )
    return whole


def initialized() -> bool:
    """Whether groups are set up."""
    return current_groups() is not None


def get_dp_group() -> dist.ProcessGroup | None:
    """Return the process group of this rank's column; None before set-up."""
    groups = current_groups()
    return groups.dp.process_group() if groups is not None and dist.is_initialized() else None


def get_gp_group() -> dist.ProcessGroup | None:
    """Return the process group of this rank's row; None before set-up."""
    groups = current_groups()
    return groups.gp.process_group() if groups is not None and dist.is_initialized() else None


def get_dp_rank() -> int:
    """Return the place in the column; before set-up the rank in the world."""
    groups = current_groups()
    return world().rank if groups is None else groups.dp.rank


def get_gp_rank() -> int:
    """Return the place in the row; 0 before set-up."""
    groups = current_groups()
    return 0 if groups is None else groups.gp.rank


def get_dp_world_size() -> int:
    """Return the size of the column; before set-up that of the world."""
    groups = current_groups()
    return world().size if groups is None else groups.dp.size


def get_gp_world_size() -> int:
    """Return the size of the row; 1 before set-up."""
    groups = current_groups()
    return 1 if groups is None else groups.gp.size


def _install_new(size: int, backend: str | None, verb: str) -> None:
    global _installed
    present = current_groups()
    if present is not None:
        raise AssertedMeshError.because(
            f"{verb} for rows of {size}",
            f"groups are set up already: dp({present.dp.size}) x gp({present.gp.size})",
            None,
            "call cleanup_gp() first",
        )
    if size > 1 and not has_world():
        raise AssertedMeshError.because(
            f"{verb}({size})",
            "torch.distributed is not initialised: this process is a world of one rank",
            f"{size} > 1",
            f"start the function with unisono.run(fn, ranks={size})",
        )
    check_size(size, world().size, f"{verb}({size})")
    groups = graph_groups(size, backend=backend)
    # A rank may clean up at once; its peers must have finished connecting by then.
    groups.dp.barrier()
    groups.gp.barrier()
    _installed = _Installed(groups, _world_group(), made_here=True)


def _world_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None

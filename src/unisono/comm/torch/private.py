"""All that this package uses of torch and that torch does not promise: seen to work with 2.13.

Nothing public tells whether a transform of torch.func is active or when a backward ends, shows the
shapes of a call in a profile, keeps torch.compile away from a function without loading the
compiler, or makes a process group of which only its members know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._functorch import (
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    unwrap_if_dead,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "at_end_of_backward",
    "backends_of",
    "default_store",
    "increment_version",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "is_profiling",
    "is_zero_tensor",
    "known_groups",
    "new_group",
    "on_backward",
    "outside_transforms",
    "profiled",
    "register_group",
    "runs_uncompiled",
    "set_grad_enabled",
    "transforms_active",
    "unregister_group",
    "unwrap_if_dead",
]

F = TypeVar("F", bound=Callable[..., Any])

# -- modes ----------------------------------------------------------------------------------------

set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""A third of the price of `torch.no_grad()`."""

increment_version: Callable[[tuple[torch.Tensor, ...]], None] = torch._C._increment_version
"""Half the price of the public function of this name, which first asks what it was given."""

is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is zeros without memory, as some derivatives of torch are (that of `sgn`)."""

transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is around this call."""

is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler of torch watches this thread."""

at_end_of_backward: Callable[[Callable[[], None]], None]
at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback
"""Calls a function when the running backward has ended, as torch's own FSDP does. One that raises
calls nobody, but lets go of the function: a weak reference to it tells when a backward is over."""


_backward = torch.autograd.backward
_listeners: list[Callable[[Sequence[torch.Tensor]], None]] = []


def on_backward(listener: Callable[[Sequence[torch.Tensor]], None]) -> Callable[[], None]:
    """Call `listener` with the tensors that each backward begins with; return what ends that.

    torch's function is replaced as long as there is a listener: for finding mistakes.
    """

    def announced(tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        for one in tuple(_listeners):
            one(roots)
        _backward(tensors, *args, **kwargs)

    if not _listeners:
        torch.autograd.backward = announced
    _listeners.append(listener)

    def end() -> None:
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners:
            torch.autograd.backward = _backward

    return end


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Leave the transforms of torch.func aside for a while."""
    return temporarily_clear_interpreter_stack()


def profiled(
    name: str, tensors: Sequence[torch.Tensor]
) -> contextlib.AbstractContextManager[object]:
    """Show what is done inside in torch's profile, with the shapes of `tensors`.

    The public `record_function` shows no shapes.
    """
    return cast("Any", torch._C)._profiler._RecordFunctionFast(name, list(tensors))


def runs_uncompiled(function: F) -> F:
    """Return the function, which compiled code calls as it is, with all that it calls.

    For functions in which ranks agree at run time. As `torch.compiler.disable` does, which would
    load the compiler for those who never compile.
    """
    marked = cast("Any", function)
    marked._torchdynamo_disable = True  # a compiled caller stops before it ...
    frames = cast("Any", torch._C)._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy") and hasattr(marked, "__code__"):
        # ... and its own frame is never compiled
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


# -- process groups -------------------------------------------------------------------------------

known_groups: MutableMapping[dist.ProcessGroup, Any] = c10d._world.pg_map
"""Every group that torch.distributed has not destroyed."""


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return c10d._get_default_store()


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of a group for each kind of device; nothing where torch made none."""
    config = str(c10d._world.pg_backend_config.get(group, ""))
    return dict(item.split(":") for item in config.split(",") if ":" in item)


def new_group(
    name: str, ranks: tuple[int, ...], backend: str, timeout: timedelta, *, is_listed: bool = True
) -> dist.ProcessGroup:
    """Make a group of which only the members know.

    `dist.new_group` wants all ranks of the world, or, with local synchronisation, derives the name
    from the number of groups that happen to exist on a rank, so that ranks with different histories
    wait for each other for ever.

    Args:
        name: name of the group, the same on all members.
        ranks: world ranks of the members; this rank is one of them.
        backend: name of the backend.
        timeout: deadline of making it.
        is_listed: whether torch.distributed knows the group, and ends it with the world.
    """
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        group_desc=name,
    )
    made = cast("dist.ProcessGroup", group)
    if is_listed:
        c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
        return made
    world = c10d._world
    for group_by_tag in world.tags_to_pg.values():
        if made in group_by_tag:
            group_by_tag.remove(made)
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        table.pop(made, None)
    unregister_group(name)
    return made


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let compiled code find a group that torch.distributed has not made by its name."""
    c10d._register_process_group(c10d.GroupName(name), group)


def unregister_group(name: str) -> None:
    """Undo `register_group`."""
    c10d._unregister_process_group(c10d.GroupName(name))

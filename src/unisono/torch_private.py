"""All that this package uses of torch and that torch does not promise: seen with 2.11 to 2.15.

A name that a version of torch lacks raises when the feature that needs it is used; importing this
never fails. `missing()` lists such names, and a test finds private names of torch elsewhere.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from unisono.errors import UnisonoError

F = TypeVar("F", bound=Callable[..., Any])

TESTED = ((2, 13), (2, 15))
"""Versions of torch with which the whole suite passes."""
_TESTED_NAMES = " and ".join(f"{major}.{minor}" for major, minor in TESTED)

_missing: list[str] = []


def missing() -> list[str]:
    """Return the private names that this torch lacks."""
    return list(_missing)


def untested() -> str | None:
    """Return a sentence if the suite has not run on this torch."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) in TESTED:
        return None
    return f"torch {torch.__version__} is untested with unisono; tested: {_TESTED_NAMES}"


class _Refusal:
    """Stands for a name that this torch lacks: its use raises one error."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_: Any, **__: Any) -> Any:
        problem = f"torch {torch.__version__} has no such name"
        raise UnisonoError.because(self._path, problem, hint=f"torch {_TESTED_NAMES}")

    __getattr__ = __call__


def _lookup(path: str) -> Any:
    """Return a private name of torch, or what refuses its use."""
    module, _, names = path.partition(":")
    try:
        return functools.reduce(getattr, names.split("."), import_module(module))
    except (ImportError, AttributeError):
        _missing.append(path.replace(":", "."))
        return _Refusal(_missing[-1])


_NAMES = {
    # modes: what is around this call
    "set_grad_enabled": "torch:_C._set_grad_enabled",  # a third of the price of `torch.no_grad()`
    "is_autocast_enabled": "torch:_C._is_any_autocast_enabled",
    "is_profiling": "torch.autograd:_profiler_enabled",
    "profiled": "torch:_C._profiler._RecordFunctionFast",  # `record_function` shows no shapes
    "current_backward": "torch:_C._current_graph_task_id",  # -1 outside of a backward
    # Calls a function when the running backward has ended, as torch's own FSDP does. One that
    # raises calls no hook, but lets go of the function: a weak reference to it tells the end.
    "at_end_of_backward": "torch.autograd:Variable._execution_engine.queue_callback",
    "running_ddp": "torch.nn.parallel:DistributedDataParallel._get_active_ddp_module",
    # torch.func
    "transforms_active": "torch:_C._are_functorch_transforms_active",
    "is_batchedtensor": "torch._C._functorch:is_batchedtensor",
    "is_legacy_batchedtensor": "torch._C._functorch:is_legacy_batchedtensor",
    "is_functorch_wrapped_tensor": "torch._C._functorch:is_functorch_wrapped_tensor",
    "unwrap_if_dead": "torch._C._functorch:unwrap_if_dead",
    "outside_transforms": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
    # operators below wrappers
    "OpOverload": "torch:_ops.OpOverload",
    "no_subclass": "torch:_C.DisableTorchFunctionSubclass",
    "exclude_set": "torch:_C._dispatch_tls_local_exclude_set",
    "include_set": "torch:_C._dispatch_tls_local_include_set",
    "exclude_keys": "torch:_C._ExcludeDispatchKeyGuard",
    "force_keys": "torch:_C._ForceDispatchKeyGuard",
    "has_kernel": "torch:_C._dispatch_has_kernel_for_dispatch_key",
    "dispatch_modes": "torch:_C._len_torch_dispatch_stack",  # how many modes watch operators
    "no_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # kernels and tensors
    "increment_version": "torch:_C._increment_version",  # half the price of the public function
    "is_zero_tensor": "torch:Tensor._is_zerotensor",  # as some derivatives are (that of `sgn`)
    "negative_view": "torch:_neg_view",
    "assert_async": "torch:_assert_async",
    "copy_each_": "torch:_foreach_copy_",
    "fft_c2c": "torch:ops.aten._fft_c2c",
    "flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "flash_attention_backward": (
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
    ),
    # modules, optimizers, checkpoints
    "BatchNormBase": "torch.nn.modules.batchnorm:_BatchNorm",
    "DropoutBase": "torch.nn.modules.dropout:_DropoutNd",
    "optimizer_pre_hooks": "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "optimizer_post_hooks": "torch.optim.optimizer:_global_optimizer_post_hooks",
}
"""Our name -> where torch has it: the module, and the attributes below it."""

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # noqa: F401

    def __getattr__(name: str) -> Any: ...

else:
    globals().update({name: _lookup(path) for name, path in _NAMES.items()})

# -- modes ----------------------------------------------------------------------------------------

TRACES_OPERATORS = torch.__version__ >= "2.13"
"""Whether torch.compile traces a Function whose backward applies another one.

torch 2.11 does not, or compiles it to zeros.
"""


def traced_if_right(function: F) -> F:
    """Let torch.compile trace `function`, an operator; break the graph where it cannot."""
    if TRACES_OPERATORS:
        return function
    disable: Any = torch.compiler.disable
    return disable(function)


def is_joining(wrapper: torch.nn.Module) -> bool:
    """Whether torch's `join` is around this call of a wrapper: other ranks may have no data."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


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


def runs_uncompiled(function: F) -> F:
    """Return the function, which compiled code calls as it is, with all that it calls.

    For functions in which ranks agree at run time. As `torch.compiler.disable` does, which would
    load the compiler for those who never compile.
    """
    marked = cast("Any", function)
    marked._torchdynamo_disable = True  # a compiled caller stops before it ...
    frames: Any = import_module("torch._C._dynamo.eval_frame")
    if hasattr(frames, "set_code_exec_strategy") and hasattr(marked, "__code__"):
        # ... and its own frame is never compiled
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


# -- operators below wrappers ---------------------------------------------------------------------


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """Return how torch writes an operator with others; None if it does not."""
    return import_module("torch._decomp").decomposition_table.get(op)


def functions_that_pass_on() -> list[type[torch.autograd.Function]]:
    """Return the functions, of what is loaded, through which modules pass tensors unchanged."""
    places = {
        "torch.nn.modules._functions": "BackwardHookFunction",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": "RegisterPostBackwardFunction",
    }
    loaded = [(sys.modules.get(module), name) for module, name in places.items()]
    return [getattr(module, name) for module, name in loaded if hasattr(module, name)]


@functools.cache
def keys(*names: str) -> Any:
    """Return a set of dispatch keys."""
    key_sets = (torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names)
    return functools.reduce(lambda a, b: a | b, key_sets)


def kernel_of(op: Any, key: str) -> Callable[..., Any]:
    """Return what an operator does under a dispatch key."""
    return functools.partial(op._op_dk, getattr(torch._C.DispatchKey, key))


# -- compiled code --------------------------------------------------------------------------------


def functional_collectives() -> Any:
    """Return torch's functional collectives; those who never compile do not load them."""
    return import_module("torch.distributed._functional_collectives")


# -- process groups -------------------------------------------------------------------------------

# torch 2.11 has other names, of which newer versions warn.
all_gather_single: Callable[..., Any]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any]
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
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


# -- hooks around calls ---------------------------------------------------------------------------

_c10d: Any = import_module("torch._C._distributed_c10d")
_FlightRecorderHook = getattr(_c10d, "FlightRecorderHook", None)  # 2.15
_NanCheckHook = getattr(_c10d, "NanCheckHook", None)  # 2.15


def recorded_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> RecordedGroup | None:
    """Return what runs calls of `group` inside the hooks that torch has for its own groups.

    torch 2.15 records calls (`TORCH_FR_BUFFER_SIZE`) and looks for NaN (`TORCH_DIST_NAN_CHECK`) by
    hooks of C++ groups, which calls of a group written in Python never reach. None where torch has
    no such hooks, and where both are switched off.

    Args:
        group: a group that has its name.
        ranks: world ranks of the group.
    """
    if _FlightRecorderHook is None or _NanCheckHook is None:
        return None
    sizes = (os.environ.get(f"TORCH_{name}_BUFFER_SIZE") for name in ("FR", "NCCL_TRACE"))
    is_recorded = int(next(filter(None, sizes), "1")) > 0
    is_nan_checked = os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"
    if not is_recorded and not is_nan_checked:
        return None
    made = RecordedGroup(group)
    if is_nan_checked:
        made.hooks.append(_NanCheckHook.attach(made.group))
    if is_recorded:
        made.hooks.append(_FlightRecorderHook.attach(made.group, list(ranks)))
    return made


class RecordedGroup:
    """A C++ group with hooks, whose backend runs what `run` is given.

    Args:
        group: the group whose name, rank and size it has.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        name, rank, size = group.name(), group.rank(), group.size()
        self.hooks: list[Any] = []
        self._thread = threading.local()

        def carry_out(*_: Any) -> Any:
            self._thread.work = self._thread.call()
            return self._thread.work

        verbs: dict[str, Any] = dict.fromkeys(_BACKEND_VERBS, carry_out)
        verbs["getBackendName"] = lambda _: name
        self._backend = type("RecordedBackend", (_c10d.Backend,), verbs)(rank, size)
        self.group: Any = dist.ProcessGroup(dist.HashStore(), rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self.group._set_default_backend(kind)
        self.group._register_backend(torch.device("cpu"), kind, self._backend)
        self.group._set_group_name(group.group_name)
        self.group._set_group_desc(group.group_desc)

    def run(self, verb: str, args: Sequence[Any], call: Callable[[], Any]) -> Any:
        """Return what `call` returns, run inside the hooks of `verb` with `args`."""
        self._thread.call = call
        try:
            getattr(self.group, verb)(*args)
            return self._thread.work  # torch's own object would hide ours
        finally:
            self._thread.call = self._thread.work = None


_BACKEND_VERBS = (
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced"),
    *("allreduce", "allreduce_coalesced", "all_to_all_single", "alltoall", "barrier", "broadcast"),
    *("gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "scatter", "send"),
)
"""Methods that torch 2.15 calls on a backend."""

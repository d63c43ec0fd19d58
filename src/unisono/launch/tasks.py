"""Tasks as DDPW has them: `Wrapper`, `wrapper`, and what a task gets besides its arguments.

The launcher decides from the signature, once, what that is. A `Task` then is a function like any
other. One rank of this host is this very process, as in DDPW.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from unisono.environment import RANK_PID, detect, rank_mark
from unisono.errors import PlatformError
from unisono.expect import expect_choice
from unisono.launch.api import execute, submit_request
from unisono.launch.attempts import telling
from unisono.launch.context import Here, enter_world, generators_kept, here, own_group, set_here
from unisono.launch.in_process import world
from unisono.launch.job import Job
from unisono.launch.logs import IO
from unisono.launch.platform import Platform
from unisono.launch.pool.stacks import own_frames_hidden
from unisono.launch.request import RunRequest, check_call, checked_request, function_name
from unisono.launch.results import Results

_Parameter = inspect.Parameter
_Parameters = Mapping[str, inspect.Parameter]
_INJECTED: tuple[str, ...] = ("global_rank", "local_rank", "group", "platform")
"""Keywords that a task may get from us."""
_CONVENTIONS = ("auto", "seed", "ddpw6", "plain")


class Task:
    """A task that can be called with its own arguments: it adds those that depend on the rank.

    Args:
        fn: the task.
        platform: where it was started, for ranks of other launchers.
        names: which of `_INJECTED` it gets as keywords; None: rank, local rank and group in front.
        takes_value: without `names`, whether one value follows.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        platform: Platform,
        names: tuple[str, ...] | None,
        *,
        takes_value: bool = True,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._platform = platform.but(upon_finish=None, upon_error=None)
        self._names = names
        self._takes_value = takes_value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task on this rank."""
        me = self._this_rank()
        if self._names is None:
            value = (args[0] if args else None,) if self._takes_value else ()
            return self._fn(me.rank, me.local_rank, me.group, *value)
        values = dict(zip(_INJECTED, (me.rank, me.local_rank, me.group, me.platform), strict=True))
        return self._fn(*args, **kwargs, **{name: values[name] for name in self._names})

    def _this_rank(self) -> Here:
        """Return this rank; collective where groups of its platform are still to be made."""
        me = here()
        if me is None:  # of another launcher
            comm = world()
            return Here(
                rank=comm.rank,
                local_rank=detect().local_rank,
                platform=self._platform,
                device=comm.device,
                group=comm.process_group(),
            )
        if me.group is None and me.platform.ipc_groups is not None:  # a script made the world
            return replace(me, group=own_group(me.platform.ipc_groups))
        return me


def as_task(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    platform: Platform,
    *,
    convention: str = "auto",
    is_decorated: bool = False,
) -> Callable[..., Any]:
    """Return what ranks call with these arguments, or raise `PlatformError` if they do not fit.

    Args:
        fn: the task.
        args: its positional arguments.
        kwargs: its keyword arguments.
        platform: where it runs.
        convention: `"seed"`, `"ddpw6"` or `"plain"`; `"auto"` looks at the signature.
        is_decorated: whether `fn` was called like a function, through the decorator.
    """
    expect_choice("convention", convention, _CONVENTIONS, error=PlatformError)
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        check_call(fn, tuple(args), kwargs)
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn  # a builtin: the call itself will tell
    if convention == "auto":
        convention = _convention_of(parameters, args, kwargs, is_decorated=is_decorated)
    if convention == "plain":
        check_call(fn, tuple(args), kwargs)
        return fn
    name = function_name(fn)
    if convention == "seed":
        if len(args) > 1 or kwargs:
            raise PlatformError.because(
                f"start({name}, ...) with global_rank, local_rank, process_group, args",
                f"{len(args)} values and keywords {sorted(kwargs)} where one value fits",
                hint=f"start({name}, (first, second)): one tuple, which arrives as args",
            )
        return Task(fn, platform, None, takes_value=len(_positional(parameters)) > 3)
    names = _INJECTED if convention == "ddpw6" else _named(parameters, len(args))
    if repeated := [word for word in names if word in kwargs]:
        raise PlatformError.because(
            f"start({name}, ..., {repeated[0]}=...)",
            f"each rank gets its own {repeated[0]}",
            hint="another name for it, or Wrapper(platform, convention='plain')",
        )
    check_call(fn, tuple(args), {**kwargs, **dict.fromkeys(names)})
    return Task(fn, platform, names)


def _convention_of(
    parameters: _Parameters, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_decorated: bool
) -> str:
    """Return how a task is called: by the first rule that fits its signature."""
    positional = _positional(parameters)
    if positional[:2] == ["global_rank", "local_rank"] and (
        "process_group" in positional or (len(positional) == 4 and "platform" not in positional)
    ):
        return "seed"
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "ddpw6"
    if _named(parameters, len(args)):
        return "named"
    required = [name for name in positional if parameters[name].default is _Parameter.empty]
    has_one_tuple = not args or (len(args) == 1 and isinstance(args[0], tuple))
    is_seed = len(required) == 4 and has_one_tuple and not kwargs and not is_decorated
    return "seed" if is_seed else "plain"


def _positional(parameters: _Parameters) -> list[str]:
    kinds = _Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD
    return [name for name, parameter in parameters.items() if parameter.kind in kinds]


def _named(parameters: _Parameters, filled: int) -> tuple[str, ...]:
    """Return the keywords of ours that a task names, but for parameters that are filled."""
    kinds = _Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY
    names = {name for name, parameter in parameters.items() if parameter.kind in kinds}
    names -= set(_positional(parameters)[:filled])
    return tuple(name for name in _INJECTED if name in names)


class Wrapper:
    """Starts tasks on a platform.

    Attributes:
        platform: where.
    """

    def __init__(self, platform: Platform, *, convention: str = "auto") -> None:
        """Take a platform.

        Args:
            platform: where tasks run; `IO.verbose` follows its `verbose`.
            convention: how tasks are called: `"seed"` (ranks, group, one value), `"ddpw6"` (by
                keyword), `"plain"`, or `"auto"` by their signature.
        """
        self.platform = platform
        self._convention = convention
        IO.verbose = platform.verbose

    def start(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Results[Any] | Job:
        """Run `task` on every rank of the platform and return what each returned.

        One rank of this host is this process, as DDPW has it. On SLURM the job is queued, and its
        handle returned at once.
        """
        with own_frames_hidden():
            return _start(self.platform, task, args, kwargs, convention=self._convention)


def wrapper(
    platform: Platform,
) -> Callable[[Callable[..., Any]], Callable[..., Results[Any] | Job]]:
    """Decorate a function so that calling it runs it on every rank of `platform`."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Results[Any] | Job]:
        @functools.wraps(fn)
        def launch(*args: Any, **kwargs: Any) -> Results[Any] | Job:
            IO.verbose = platform.verbose
            with own_frames_hidden():
                return _start(platform, fn, args, kwargs, is_decorated=True)

        return launch

    return decorate


def _start(
    platform: Platform,
    task: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    **options: Any,
) -> Results[Any] | Job:
    platform = _with_one_seed(platform)
    function = as_task(task, args, kwargs, platform, **options)
    request = checked_request(function, args, kwargs, on=platform)
    request.platform.print()
    if request.place == "slurm" and not request.joins_world:
        return submit_request(request)
    is_here = request.platform.kind.is_here and not request.joins_world
    if request.ranks == 1 and is_here:
        with telling(request.platform):
            return run_in_process(request)
    return execute(request)


def _with_one_seed(platform: Platform) -> Platform:
    """Return a platform that decides about seeds: equal weights and splits, as DDPW has it."""
    return platform.but(seed_per_rank=False) if platform.seed_per_rank is None else platform


def run_in_process(request: RunRequest) -> Results[Any]:
    """Run a request for one rank in this process; exceptions pass as they are."""
    begin = time.perf_counter()
    with _as_rank(request.platform, rank=0, local_rank=0, node=0):
        ready = time.perf_counter()
        value = request.fn(*request.args, **request.kwargs)
        wall_s = time.perf_counter() - ready
    return Results(
        [value],
        hosts=[socket.gethostname()],
        platform=request.place,
        wall_s=wall_s,
        start_s=ready - begin,
        threads=request.platform.cpus_per_rank,
    )


def setup(
    node: int,
    global_rank: int,
    local_rank: int,
    platform: Platform,
    target: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `target` in this process as the given rank of `platform`; return what it returns.

    Collective over all ranks of the platform: for more than one, `master_addr` and `master_port`
    say where they meet.
    """
    if platform.requires_ipc and (platform.master_addr is None or platform.master_port is None):
        raise PlatformError.because(
            f"setup(..., global_rank={global_rank}) of {platform.world_size} ranks",
            "no address at which the ranks meet",
            hint="Platform(master_addr='127.0.0.1', master_port=29400)",
        )
    platform = _with_one_seed(platform)
    task = as_task(target, args, kwargs, platform)
    with _as_rank(platform, rank=global_rank, local_rank=local_rank, node=node):
        return task(*args, **kwargs)


@contextmanager
def _as_rank(platform: Platform, *, rank: int, local_rank: int, node: int) -> Iterator[None]:
    """Make this process a rank for the length of the block."""
    from unisono.comm.lifecycle import open_store, stop_world

    with generators_kept(), ExitStack() as at_end:
        at_end.callback(os.environ.update, dict(os.environ))
        at_end.callback(os.environ.clear)
        at_end.callback(set_here, here())
        at_end.callback(stop_world)
        for name in (RANK_PID, "MASTER_ADDR", "MASTER_PORT", "UNISONO_DETECT"):
            os.environ.pop(name, None)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(platform.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(platform.ranks_per_node),
            "NODE_RANK": str(node),
            "UNISONO_RUN_ID": secrets.token_hex(8),
            "UNISONO_RESTART": "0",
            **(platform.env or {}),
        }
        environment = detect()
        store = None
        if platform.ipc_groups is not None:
            store = open_store(
                environment,
                addr=platform.master_addr,
                port=platform.master_port or 0,
                timeout_s=platform.start_timeout_s,
            )
            addr = platform.master_addr or "127.0.0.1"
            port = platform.master_port or store.port  # pyright: ignore[reportAttributeAccessIssue]
            platform = platform.but(master_addr=addr, master_port=port)
            os.environ |= {"MASTER_ADDR": addr, "MASTER_PORT": str(port)}
        os.environ[RANK_PID] = rank_mark(os.environ, os.getpid())
        enter_world(environment, platform, store=store, name="in-process")
        yield

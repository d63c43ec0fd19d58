"""Where a call enters a process group: written in any of torch's forms, it goes on in one.

torch's own groups take options, or a short form in their place: `allreduce(x, op)`,
`broadcast(x, root)`, `barrier(timeout=...)`. A call on tensors of another device goes to the group
for that device. torch's profiler sees every call, and compiled code stops before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.errors import UnisonoError

Method = TypeVar("Method", bound=Callable[..., Any])

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}
"""Fields of options that arguments of a short form stand for."""


class Form:
    """How calls of a method are written.

    Args:
        tensors: names of the tensors, or lists of them; other names of one follow it after `|`.
        options: class of the options behind them.
        short: names of the arguments that may stand in place of options.
        is_listed: whether tensors come in lists; without one, a short form is in a list of one.
    """

    def __init__(self, tensors: str, options: type, short: str, *, is_listed: bool) -> None:
        alternatives = [names.split("|") for names in tensors.split()]
        self.names = tuple(first for first, *_ in alternatives)
        self.options, self.short, self.is_listed = options, tuple(short.split()), is_listed
        spellings = [*alternatives, *([name] for name in self.short), ["opts"]]
        self._canonical = {name: names[0] for names in spellings for name in names}

    def normal(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of a call in the one form: tensors, then options."""
        count = len(self.names)
        has_options = len(args) > count and isinstance(args[count], self.options)
        places = (*self.names, *(("opts",) if has_options else self.short))
        values = dict(zip(places, args, strict=False))
        named = {self._canonical.get(name, name): x for name, x in kwargs.items()}
        is_known = self._canonical.keys() >= named.keys() and not named.keys() & values.keys()
        values |= named
        tensors = [values.pop(name, None) for name in self.names]
        options = values.pop("opts", None)
        if self.is_listed and any(isinstance(x, Tensor) for x in tensors):
            tensors = [[x] for x in tensors]
            is_known = is_known and ("root" not in self.short or "root" in values)
        if options is not None:
            is_known = is_known and isinstance(options, self.options) and not values
        if len(args) > len(places) or any(x is None for x in tensors) or not is_known:
            raise TypeError(f"{call}() takes {', '.join(places)}, or {self.options.__name__}")
        if options is None:
            options = self.options()
            for name, x in values.items():
                if x is not None:
                    setattr(options, _FIELDS[name], x)
        return (*tensors, options)


def entry(
    verb: str, tensors: str, options: type, short: str = "timeout", *, is_listed: bool = True
) -> Callable[[Method], Method]:
    """Make a method that takes tensors and options the entry of a collective.

    Args:
        verb: name of the collective in a profile.
        tensors: see `Form`, as for the others.
        options: class of the options.
        short: arguments of the short form.
        is_listed: whether tensors come in lists.
    """
    form = Form(tensors, options, short, is_listed=is_listed)
    count = len(form.names) + 1

    def decorate(method: Method) -> Method:
        name = method.__name__

        @functools.wraps(method)
        def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_normal = len(args) == count and not kwargs and isinstance(args[-1], options)
            if not is_normal or (is_listed and isinstance(args[0], Tensor)):
                args = form.normal(name, args, kwargs)
            return _enter(self, verb, name, method, args)

        return private.runs_uncompiled(enter)  # type: ignore[return-value]

    return decorate


def message(method: Method) -> Method:
    """Make a method that takes tensors first the entry of a message."""
    name = method.__name__
    verb = name.removesuffix("_anysource")

    @functools.wraps(method)
    def enter(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if tensors and not tensors[0].is_cpu:
            peer = next(iter((*args, *kwargs.values())), self.rank())
            ends = (self.rank(), peer) if verb == "send" else (peer, self.rank())
            inner = self.message_group(tensors[0].device, *ends)
            return getattr(inner, name)(tensors, *args, **kwargs)
        return _enter(self, verb, name, method, (tensors, *args), kwargs)

    return private.runs_uncompiled(enter)  # type: ignore[return-value]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, those in lists too."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def _one_device(call: str, values: Sequence[Any]) -> Tensor | None:
    """Return the first tensor of a call; raise if others are on another kind of device."""
    tensors = list(_tensors(values))
    kinds = {x.device.type for x in tensors}
    if len(kinds) > 1:
        raise UnisonoError.because(
            f"torch.distributed.{call} with tensors on {' and '.join(sorted(kinds))}",
            "all tensors of a call must be on one device",
            hint="x.to(device) first; outputs made by torch.empty_like(x)",
        )
    return tensors[0] if tensors else None


def _enter(
    group: Any,
    verb: str,
    name: str,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    first = args[0]
    if len(args) == 2 and isinstance(first, list) and len(first) == 1:
        (x,) = first  # the one tensor of a reduction or broadcast
    else:
        x = _one_device(verb, args)
    if x is not None and not x.is_cpu:
        return getattr(group.inner_group(x.device), name)(*args, **(kwargs or {}))
    run = functools.partial(method, group, *args, **(kwargs or {}))
    if group.recorded is not None and (x is None or x.layout is torch.strided):
        run = functools.partial(group.recorded.run, name, (*args, *(kwargs or {}).values()), run)
    if not private.is_profiling():
        return run()
    event = private.profiled(f"{group.name()}:{verb}", [] if x is None else [x])
    event.__enter__()
    end = functools.partial(event.__exit__, None, None, None)
    try:
        work = run()
    except BaseException:
        end()
        raise
    work.at_end(end)  # of a call under way, in the thread that carries it out
    return work

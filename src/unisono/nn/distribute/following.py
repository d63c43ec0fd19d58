"""Forwards of a user's own in a split network: what looks along a split dim is refused.

`distribute(custom="recurse")` runs such a forward on own blocks. That is right for what treats
points one by one, or looks along dims that are not split, and wrong without a word for everything
else. So each torch function that the forward calls is looked up here, and what is not known to be
right is refused. Layers that `distribute` has put in place are left alone: they know the split.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from unisono.comm.torch.private import runs_uncompiled
from unisono.errors import PartitionError
from unisono.nn.distribute.rules import (
    WHOLE,
    Cut,
    check_known,
    cut_of,
    cuts,
    followed,
    tensors_in,
)


class _Frames(threading.local):
    """What runs now, outermost first: forwards that are followed, and layers that are not."""

    def __init__(self) -> None:
        self.stack: list[Trust | Layer] = []


_frames = _Frames()


@dataclass(frozen=True, eq=False)
class Trust:
    """A module with a forward of its own, in the split part.

    Args:
        path: of the module in the network.
        kind: name of its class.
        cut: split dims of an input of `dims` dims; of others at most the samples are split.
        dims: how many dims a split tensor has.
        is_chained: its result goes to the next layer of a chain.
    """

    path: str
    kind: str
    cut: Cut
    dims: int
    is_chained: bool = False

    def cut_of(self, x: Tensor) -> Cut:
        """Return the split dims of an argument that comes from outside."""
        if x.dim() == self.dims:
            return self.cut
        return self.cut & {0} if x.dim() else WHOLE

    def refuse(self, asked: str, found: str, hint: str) -> NoReturn:
        """Refuse something that the forward does."""
        where = f"forward of {self.path or 'the module'} ({self.kind}): {asked}"
        raise PartitionError.because(where, found, None, hint)


def trust(module: nn.Module, about: Trust) -> None:
    """Follow the forward of a module from now on. A copy of the module has to be given again."""
    module.forward = partial(_followed, module, about)


def trusted(module: nn.Module) -> Trust | None:
    """Return what is known of a module whose forward is followed."""
    own = vars(module).get("forward")
    return own.args[1] if isinstance(own, partial) and own.func is _followed else None


@runs_uncompiled
def _followed(module: nn.Module, about: Trust, *args: Any, **kwargs: Any) -> Any:
    stack = _frames.stack
    depth = len(stack)
    is_called_by_forward = depth > 0 and isinstance(stack[-1], Trust)
    if not is_called_by_forward:  # from outside, or from a chain of layers
        for x in tensors_in((args, kwargs)):
            cuts[x] = about.cut_of(x)
    for name in module._parameters:  # stand-ins, by which gradients meet
        own = vars(module).get(name)
        if isinstance(own, Tensor) and not isinstance(own, nn.Parameter):
            cuts[own] = WHOLE
    stack.append(about)
    try:
        with nullcontext() if depth else _Follower():
            out = type(module).forward(module, *args, **kwargs)
    finally:
        del stack[depth:]
    for x in tensors_in(out):
        check_known(about, x)
        if about.is_chained and not is_called_by_forward and cut_of(x) != about.cut:
            about.refuse(
                f"a result of shape {list(x.shape)} with split dims {sorted(cut_of(x))}",
                f"the next layer of the chain takes split dims {sorted(about.cut)}",
                "the order of dims in which it came",
            )
    return out


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that knows the split: what it does inside is not looked at.

    Args:
        path: of the layer in the network.
        takes: split dims of what it may be called with; None: any.
        gives: split dims of what it returns; None: those of its input.
        dims: how many dims a split tensor has.
    """

    path: str
    takes: Cut | None
    gives: Cut | None
    dims: int

    def attach(self, layer: nn.Module) -> None:
        """Stand around the forward of a layer, once."""
        if any(True for _ in layers_around(layer)):
            return
        layer.register_forward_pre_hook(self.begin, with_kwargs=True)
        layer.register_forward_hook(self.end, with_kwargs=True, always_call=True)

    @runs_uncompiled
    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Check what a followed forward hands in, and look away."""
        stack = _frames.stack
        if not stack:
            return
        caller = stack[-1]
        if isinstance(caller, Trust) and self.takes is not None:
            for x in tensors_in((args, kwargs)):
                check_known(caller, x)
                if cut_of(x) != self.takes:
                    caller.refuse(
                        f"a call of {self.path} with a tensor of shape {list(x.shape)} whose "
                        f"split dims are {sorted(cut_of(x)) or 'none'}",
                        f"{type(layer).__name__} takes split dims {sorted(self.takes) or 'none'}",
                        "call it with what comes from the input of the forward, dims in the same "
                        "order" if self.takes else "nn.Sequential(..., nn.Flatten(), ...) gathers",
                    )  # fmt: skip
        stack.append(self)

    @runs_uncompiled
    def end(self, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Look again; called after an error too."""
        stack = _frames.stack
        if not stack or stack[-1] is not self:
            return
        stack.pop()
        if isinstance(stack[-1], Trust):
            given = next(tensors_in((args, kwargs)), None)
            for x in tensors_in(output):
                if self.gives is None:
                    cuts[x] = WHOLE if given is None else cut_of(given)
                else:
                    cuts[x] = self.gives if x.dim() == self.dims else self.gives & {0}


def layers_around(layer: nn.Module) -> Iterator[Layer]:
    """Yield what is attached to a layer."""
    for hook in layer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Layer):
            yield owner


class _Follower(TorchFunctionMode):
    """Looks at each torch function that a followed forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self._level = maybe_current_level()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        about = _frames.stack[-1]
        if isinstance(about, Layer):
            return func(*args, **(kwargs or {}))
        if maybe_current_level() != self._level:  # other tensors stand for those that are known
            about.refuse(
                "a transform of torch.func, such as vmap",
                "nobody can follow split dims through it",
                "torch.einsum or broadcasting; or a layer of your own on unisono.nn.Module",
            )
        return followed(about, func, args, kwargs or {})

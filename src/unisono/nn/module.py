"""`Module`: the base of distributed layers, set up when called, and again when the input changes.

A layer learns shapes only when it is called, and a rank sees only its own block; the hook here
lets all ranks of the layer decide together whether to set up, so that none waits for ever.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.nn.agreement import current_mode, final_plan, refuse_mixed_grad_mode
from unisono.topology import Partition
from unisono.torch_private import runs_uncompiled


class Module(nn.Module):
    """A torch module that is set up lazily, together with the other ranks.

    A layer of your own overrides `_distdl_module_setup(input)` (and perhaps
    `_distdl_module_teardown` and `_distdl_input_changed`); `input` is the tuple of positional
    arguments. Before each forward: if some rank's input has changed, or the module is not set up,
    every rank tears down and sets up. The ranks are those of all partitions among the attributes.
    """

    _distdl_backend: Any = None
    """Kept for programs that read it."""

    def __init__(self) -> None:
        super().__init__()
        self._distdl_is_setup = False
        self._agreeing: Communicator | None = None
        """All ranks of the layer, known once set up; None for a single rank."""
        self.register_forward_pre_hook(_before_forward, with_kwargs=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep `torch.compile` out of the forward of every layer."""
        super().__init_subclass__(**kwargs)
        written: Any = vars(cls).get("forward")
        if getattr(written, "__qualname__", None) == f"{cls.__qualname__}.forward":  # not another's
            runs_uncompiled(written)

    def partitions(self) -> tuple[Partition, ...]:
        """Return the partitions over which set-up is collective: those among the attributes."""
        return tuple(value for value in self.__dict__.values() if isinstance(value, Partition))

    def _distdl_module_setup(self, input: tuple[Any, ...]) -> None:
        """Make what the layer needs for inputs like these. Called by all ranks together."""

    def _distdl_module_teardown(self, input: tuple[Any, ...]) -> None:
        """Drop what set-up has made. Called by all ranks together."""

    def _distdl_input_changed(self, input: tuple[Any, ...]) -> bool:  # noqa: ARG002
        """Return whether this rank's input needs another set-up. Local."""
        return False

    def _distdl_module_requires_reset(self, input: tuple[Any, ...]) -> bool:
        """Return whether to set up now: the same answer on all ranks."""
        if not self._distdl_is_setup:
            return True
        changed = self._distdl_input_changed(input)
        mode = current_mode()
        if mode == "off" and changed:
            raise final_plan(type(self).__name__, "no shapes", _shapes(input))
        if self._agreeing is None or mode == "off":
            return changed
        answers = self._agreeing.all_gather_ints([changed, torch.is_grad_enabled()])
        refuse_mixed_grad_mode(self._agreeing, [on for _, on in answers])
        return any(changed for changed, _ in answers)

    @staticmethod
    @runs_uncompiled
    def _distdl_forward_pre_hook(module: Module, input: tuple[Any, ...]) -> Any:
        """Set the module up if it has to be. Who overrides it may return another input."""
        if module._distdl_module_requires_reset(input):
            module._set_up(input)

    def _set_up(self, input: tuple[Any, ...]) -> None:
        """Tear down what there is and set up. Called by all ranks together."""
        if self._distdl_is_setup:
            self._distdl_module_teardown(input)
            self._distdl_is_setup = False
        if self._agreeing is None:
            self._agreeing = self._control()
        self._distdl_module_setup(input)
        self._distdl_is_setup = True

    def _members(self) -> tuple[int, ...]:
        """Return the ranks of all partitions, ascending, in the root communicator."""
        return tuple(sorted({rank for part in self.partitions() for rank in part.ranks}))

    def _root(self) -> Communicator | None:
        """Return the communicator whose ranks the partitions name; None without partitions."""
        parts = self.partitions()
        for part in parts[1:]:
            parts[0].check_same_root(part)
        return parts[0].root if parts else None

    def _control(self) -> Communicator | None:
        """Return all ranks of the layer, to talk to with CPU tensors; None for a single rank.

        Collective over these ranks at its first use.
        """
        root = self._root()
        if root is None or root.size == 1:
            return None
        members = self._members()
        if root.rank not in members or len(members) == 1:
            return None
        comm = root.sub(members)
        return comm if comm is None or comm.device.type == "cpu" else comm.with_device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what belongs to the ranks of this world: a copy is set up when called."""
        state = self.__dict__.copy()
        return state | {"_distdl_is_setup": False, "_agreeing": None}


@runs_uncompiled
def _before_forward(
    module: nn.Module, input: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Call the hook that layers may override, with all arguments in the order of forward's own."""
    if not isinstance(module, Module):
        return None
    placed, named = (input, {}) if not kwargs else _in_order(module, input, kwargs)
    other = module._distdl_forward_pre_hook(module, (*placed, *named.values()))
    if other is None:
        return None
    other = other if isinstance(other, tuple) else (other,)
    count = len(other) - len(named)
    return other[:count], dict(zip(named, other[count:], strict=True))


def _in_order(
    module: Module, input: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call in the order of forward's own, however they are given.

    Those that may stand by place, and those that must be named.
    """
    try:
        bound = inspect.signature(module.forward).bind_partial(*input, **kwargs)
    except TypeError as error:  # before any message, instead of forward's own after set-up
        raise TypeError(f"{type(module).__name__}.forward(): {error}") from None
    return bound.args, bound.kwargs


def _shapes(input: tuple[Any, ...]) -> str:
    return ", ".join(str(list(x.shape)) for x in input if isinstance(x, Tensor)) or "no tensor"

"""Tensors and tables that complete what is owed before anybody looks at them.

`GuardedParameters` stands in for a module's `_parameters`: every way to a parameter through the
module tree passes it. `GuardedGrad` stands in for `.grad` while the gradient is under way.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, ItemsView, ValuesView
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Keeper(Protocol):
    """Whoever knows what is owed."""

    active: bool
    """Whether anything is under way or owed."""

    def settle_layer(self, layer: str) -> None:
        """Complete everything that concerns this layer. Local."""
        ...

    def settle_bucket(self, index: int) -> None:
        """Complete everything that concerns this bucket. Local."""
        ...


class GuardedParameters(dict[str, Any]):
    """The parameter table of one layer; a plain dict to whoever copies or pickles it.

    Args:
        table: the module's own table.
        layer: name of the module.
        keeper: held weakly.
    """

    def __init__(self, table: dict[str, Any], layer: str, keeper: Keeper) -> None:
        super().__init__(table)
        self._layer = layer
        self._keeper = weakref.ref(keeper)

    def _settle(self) -> None:
        keeper = self._keeper()
        if keeper is not None and keeper.active:
            keeper.settle_layer(self._layer)

    def __getitem__(self, name: str) -> Any:
        self._settle()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """See `dict`."""
        self._settle()
        return super().get(name, default)

    def pop(self, *args: Any) -> Any:
        """See `dict`."""
        self._settle()
        return super().pop(*args)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """See `dict`."""
        self._settle()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """See `dict`."""
        self._settle()
        return super().values()

    def copy(self) -> dict[str, Any]:
        """See `dict`."""
        self._settle()
        return self.plain()

    def plain(self) -> dict[str, Any]:
        """Return the table as an ordinary dict, without completing anything."""
        return dict(super().items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)


def guard_parameters(module: nn.Module, keeper: Keeper) -> list[nn.Module]:
    """Put a guard on the table of every submodule with parameters; returns these."""
    guarded: list[nn.Module] = []
    for name, part in module.named_modules():
        table = part._parameters
        if table and not isinstance(table, GuardedParameters):
            part.__dict__["_parameters"] = GuardedParameters(table, name, keeper)
            guarded.append(part)
    return guarded


def unguard_parameters(modules: list[nn.Module]) -> None:
    """Give the modules ordinary tables again."""
    for part in modules:
        table = part._parameters
        if isinstance(table, GuardedParameters):
            part.__dict__["_parameters"] = table.plain()


_HARMLESS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "ndim")
}
"""What can be asked of a gradient that has not arrived."""


class GuardedGrad(Tensor):
    """A gradient under way: any operation on it waits, then works on the plain tensor."""

    _slot: Tensor
    _index: int
    _keeper: weakref.ref[Any]

    @staticmethod
    def over(slot: Tensor, index: int, keeper: Keeper) -> GuardedGrad:
        """Return the guard for `slot`, a gradient of bucket `index`; it shares its memory."""
        guard = slot.as_subclass(GuardedGrad)
        guard._slot = slot
        guard._index = index
        guard._keeper = weakref.ref(keeper)
        return guard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        settles = func not in _HARMLESS
        plain_args = [_plain(x, settles) for x in args]
        plain_kwargs = {name: _plain(x, settles) for name, x in (kwargs or {}).items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain_args, **plain_kwargs)


def _plain(x: Any, settles: bool) -> Any:
    """Replace guards in an argument by what they guard, after it has arrived."""
    if isinstance(x, GuardedGrad):
        keeper = x._keeper()
        if settles and keeper is not None and keeper.active:
            keeper.settle_bucket(x._index)
        return x._slot
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return type(x)(_plain(y, settles) for y in x)
    return x

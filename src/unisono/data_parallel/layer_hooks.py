"""What hangs on the layers of a module in non-blocking mode."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle


class Updater(Protocol):
    """Who updates layers."""

    @property
    def pending(self) -> bool:
        """Whether anything is under way or owed."""
        ...

    def _settle_layer(self, layer: str) -> None: ...


class LayerHook:
    """Forward pre-hook that updates its layer; in copies of the module it does nothing."""

    def __init__(self, updater: Updater | None, layer: str) -> None:
        self._updater = None if updater is None else weakref.ref(updater)
        self.layer = layer

    def __call__(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        """Complete what the layer needs before its forward."""
        updater = None if self._updater is None else self._updater()
        if updater is not None and updater.pending:
            updater._settle_layer(self.layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerHook:
        return LayerHook(None, self.layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return LayerHook, (None, self.layer)


def hook_layers(module: nn.Module, layers: list[str], make_hook: Any) -> list[RemovableHandle]:
    """Register a pre-hook on every layer, in place of any left from a copy."""
    handles: list[RemovableHandle] = []
    for layer in layers:
        part = module.get_submodule(layer)
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, LayerHook) and hook._updater is None:
                del part._forward_pre_hooks[key]
        handles.append(part.register_forward_pre_hook(make_hook(layer)))
    return handles


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` was applied to the module or a part of it."""
    return any(
        type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
        for part in module.modules()
    )


def layer_of(name: str) -> str:
    """Return the layer of a parameter: `a.b` for `a.b.weight`, `` for `weight`."""
    return name.rpartition(".")[0]

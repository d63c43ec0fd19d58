"""HeAT's names for the parts of `DataParallel`, for code that reaches into it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unisono.comm import Communicator
from unisono.data_parallel.construction import on_device
from unisono.data_parallel.deferred import DeferredUpdates
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.layer_hooks import WaitHandle, layer_of
from unisono.errors import explain


class UnknownName(KeyError):
    """A layer or parameter that is not there; the message has lines, which KeyError would quote."""

    def __str__(self) -> str:
        return str(self.args[0])


class HeatParts(nn.Module):
    """What HeAT calls the layers, handles and hooks of a `DataParallel`."""

    communicator: Communicator
    _deferred: DeferredUpdates | None
    _param_slices: dict[str, slice]
    """Layer -> its place in the list of parameters."""
    _param_indices: dict[str, int]
    """Name of a parameter -> its place in the list."""

    def _running(self) -> GradientEngine:
        """Return the engine."""
        raise TypeError(f"{type(self).__name__} has no gradient engine")

    @property
    def _active_layers(self) -> set[str]:
        """Names of layers with a reduction under way or an update owed."""
        return self._deferred.active_layers() if self._deferred is not None else set()

    @property
    def _layer_wait_handles(self) -> OrderedDict[str, list[tuple[str, Any, torch.dtype, Tensor]]]:
        """Gradients under way: layer -> (parameter, handle, dtype, buffer), in backward order."""
        handles: OrderedDict[str, list[tuple[str, Any, torch.dtype, Tensor]]] = OrderedDict()
        engine = self._running()
        for bucket in engine.gradient_buckets:
            if bucket in engine.under_way:
                for name, slot in zip(bucket.names, bucket.slots, strict=True):
                    entry = (name, WaitHandle(engine, bucket), slot.dtype, slot)
                    handles.setdefault(layer_of(name), []).append(entry)
        return handles

    def _iparam_update(
        self, param_slice: slice | None = None, layer_names: list[str] | None = None
    ) -> None:
        """Wait for and apply the owed updates of these layers, by default of all. Local."""
        layers = list(self._param_slices) if layer_names is None else list(layer_names)
        unknown = [name for name in layers if name not in self._param_slices]
        if unknown:
            raise UnknownName(
                explain(
                    f"_iparam_update(layer_names={layers})",
                    f"unknown layers {unknown}",
                    None,
                    f"layer_names from {list(self._param_slices)}",
                )
            )
        if param_slice is not None:
            slices = [self._param_slices[name] for name in layers]
            owned = {i for part in slices for i in range(part.start, part.stop)}
            asked = set(range(*param_slice.indices(len(self._param_indices))))
            if owned != asked:
                raise ValueError(
                    explain(
                        f"_iparam_update({param_slice}, {layers})",
                        f"the layers hold parameters {sorted(owned)}",
                        f"{sorted(asked)} != {sorted(owned)}",
                        "leave one of the two out",
                    )
                )
        if self._deferred is not None and self._deferred.active:
            for name in layers:
                self._deferred.settle_layer(name)

    @torch.no_grad()
    def _blocking_hook(self, grad_loc: Tensor) -> Tensor:
        """Return the mean of `grad_loc` over ranks, as a new tensor. Collective over `comm`."""
        return on_device(self.communicator, grad_loc.device).all_reduce(grad_loc, "mean")

    def _nonblocking_hook(self, layer_name: str, param_name: str) -> Callable[[Tensor], Tensor]:
        """Return `hook(grad)`: files a gradient and starts its bucket when full. Collective.

        Inside a backward the engine files it by itself, and the hook only passes it on.
        """
        name = param_name
        if layer_name and not param_name.startswith(f"{layer_name}."):
            name = f"{layer_name}.{param_name}"
        if name not in self._param_indices:
            raise UnknownName(
                explain(
                    f"_nonblocking_hook({layer_name!r}, {param_name!r})",
                    f"no parameter {name!r}",
                    None,
                    f"layer and name of one of {list(self._param_indices)}",
                )
            )

        def hook(grad: Tensor) -> Tensor:
            engine = self._running()
            if torch._C._current_graph_task_id() == -1:
                for bucket in engine.gradient_buckets:
                    if name in bucket.names:
                        engine.deliver(bucket, bucket.names.index(name), grad)
            return grad

        return hook

    @staticmethod
    def _reset_parameters(module: nn.Module) -> None:
        """Call `module.reset_parameters()` if it has one."""
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()

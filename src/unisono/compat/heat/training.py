"""HeAT's wrappers where they differ from ours: the communicator of DASO, names for their parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from unisono import data_parallel
from unisono import torch_private as private
from unisono.comm.mpi_style import MPI_WORLD
from unisono.data_parallel.bucket import GradientBucket
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.ranks import on_device, reset_layer
from unisono.errors import explain

__all__ = ["DASO", "DataParallel", "DataParallelMultiGPU"]


class UnknownName(KeyError):
    """A layer or parameter that is not there; the message has lines, which KeyError would quote."""

    def __init__(self, call: str, problem: str, names: Iterable[str]) -> None:
        super().__init__(explain(call, problem, hint=f"one of {list(names)}"))

    def __str__(self) -> str:
        return str(self.args[0])


class WaitHandle:
    """One gradient under way."""

    def __init__(self, engine: GradientEngine, bucket: GradientBucket) -> None:
        self._engine = engine
        self._bucket = bucket

    def wait(self) -> None:
        """Return when the gradient is the mean over ranks. Local."""
        self._engine.wait(self._bucket)

    Wait = wait


class DataParallel(data_parallel.DataParallel):
    """`unisono.data_parallel.DataParallel`, with HeAT's names for its layers, handles and hooks.

    For code that reaches into it. Arguments, and what it does, are the same.
    """

    _reset_parameters = staticmethod(reset_layer)

    @property
    def _param_indices(self) -> dict[str, int]:
        """Name of a parameter -> its place in the list of parameters."""
        return {name: i for i, (name, _) in enumerate(self._inner.named_parameters())}

    @property
    def _param_slices(self) -> dict[str, slice]:
        """Layer -> its place in the list of parameters."""
        slices: dict[str, slice] = {}
        for name, i in self._param_indices.items():
            layer = name.rpartition(".")[0]
            slices[layer] = slice(slices[layer].start if layer in slices else i, i + 1)
        return slices

    @property
    def _active_layers(self) -> set[str]:
        """Names of layers with a reduction under way or an update pending."""
        return self._deferred.active_layers() if self._deferred is not None else set()

    @property
    def _layer_wait_handles(self) -> OrderedDict[str, list[tuple[str, Any, torch.dtype, Tensor]]]:
        """Gradients under way: layer -> (parameter, handle, dtype, buffer), in backward order."""
        handles: OrderedDict[str, list[tuple[str, Any, torch.dtype, Tensor]]] = OrderedDict()
        engine = self._running()
        for bucket in engine.under_way:
            for name, slot in zip(bucket.names, bucket.slots, strict=True):
                entry = (name, WaitHandle(engine, bucket), slot.dtype, slot)
                handles.setdefault(name.rpartition(".")[0], []).append(entry)
        return handles

    def _iparam_update(
        self, param_slice: slice | None = None, layer_names: list[str] | None = None
    ) -> None:
        """Wait for and apply the pending updates of these layers, by default of all. Local."""
        slices = self._param_slices
        layers = list(slices) if layer_names is None else list(layer_names)
        unknown = [name for name in layers if name not in slices]
        if unknown:
            call = f"_iparam_update(layer_names={layers})"
            raise UnknownName(call, f"unknown layers {unknown}", slices)
        if param_slice is not None:
            owned = {i for name in layers for i in range(slices[name].start, slices[name].stop)}
            requested = set(range(*param_slice.indices(len(self._param_indices))))
            if owned != requested:
                raise ValueError(
                    explain(
                        f"_iparam_update({param_slice}, {layers})",
                        f"the layers hold parameters {sorted(owned)}",
                        f"{sorted(requested)} != {sorted(owned)}",
                        "leave one of the two out",
                    )
                )
        if self._deferred is not None:
            for name in layers:
                self._deferred.settle_layer(name)

    @torch.no_grad()
    def _blocking_hook(self, grad_loc: Tensor) -> Tensor:
        """Return the mean of `grad_loc` over ranks, as a new tensor. Collective over `comm`."""
        return on_device(self.communicator, grad_loc.device).all_reduce(grad_loc, "mean")

    def _nonblocking_hook(self, layer_name: str, param_name: str) -> Callable[[Tensor], Tensor]:
        """Return `hook(grad)`: files a gradient and starts its bucket when full. Collective.

        Inside a backward the engine files it, and the hook only passes it on.
        """
        name = param_name
        if layer_name and not param_name.startswith(f"{layer_name}."):
            name = f"{layer_name}.{param_name}"
        if name not in self._param_indices:
            call = f"_nonblocking_hook({layer_name!r}, {param_name!r})"
            raise UnknownName(call, f"no parameter {name!r}", self._param_indices)

        def hook(grad: Tensor) -> Tensor:
            engine = self._running()
            if private.current_backward() == -1:
                for bucket in engine.buckets:
                    if name in bucket.names:
                        engine.deliver(bucket, bucket.names.index(name), grad)
            return grad

        return hook


class DataParallelMultiGPU(data_parallel.DataParallelMultiGPU):
    """`unisono.data_parallel.DataParallelMultiGPU`, with HeAT's name for the reset of a layer."""

    _reset_parameters = staticmethod(reset_layer)


class DASO(data_parallel.DASO):
    """`unisono.data_parallel.DASO` on the ranks of `MPI_WORLD` where none are given.

    Its `comm` then has HeAT's verbs; `DataParallelMultiGPU` takes it from here. Collective over
    `comm`.
    """

    def __init__(
        self,
        local_optimizer: Optimizer,
        total_epochs: int,
        comm: object = MPI_WORLD,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        comm = MPI_WORLD if comm is None else comm
        super().__init__(local_optimizer, total_epochs, comm, *args, **kwargs)

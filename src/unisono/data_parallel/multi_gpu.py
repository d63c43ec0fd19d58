"""`DataParallelMultiGPU`: a module whose gradients are averaged inside each node, for DASO."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn

from unisono.data_parallel.daso.daso import DASO
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.ranks import (
    check_same_module,
    communicator_of,
    name_as_wrapped,
    reset_module,
)
from unisono.data_parallel.wrapper import check_options
from unisono.errors import MeshError, explain
from unisono.expect import expect

__all__ = ["DataParallelMultiGPU"]


class DataParallelMultiGPU(nn.Module):
    """The module with gradients averaged over the ranks of its node; DASO does the rest.

    All ranks get rank 0's parameters and buffers. Any device, any number of ranks on a node.
    Collective over `comm`.

    Args:
        module: the model; its values are kept.
        optimizer: a DASO optimizer of its parameters.
        comm: all ranks, those of the optimizer; None takes them from it.
        bucket_mb: largest gradient bucket.
        compression: of gradients inside the node, as for `DataParallel`.
        broadcast_buffers: the node's first rank's buffers go to the others before each forward.
        find_unused: look for unused parameters after forward; speed only.
        reset_parameters: re-initialise the module first, by a fixed seed.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: DASO,
        comm: object = None,
        *,
        bucket_mb: float | None = None,
        compression: object = None,
        broadcast_buffers: bool = True,
        find_unused: bool = False,
        reset_parameters: bool = False,
    ) -> None:
        expect("optimizer", optimizer, DASO, "DASO(optimizer, total_epochs), or DataParallel")
        check_options(
            "DataParallelMultiGPU",
            module,
            bucket_mb,
            compression,
            broadcast_buffers=broadcast_buffers,
            find_unused=find_unused,
            reset_parameters=reset_parameters,
        )
        ranks = optimizer.communicator if comm is None else communicator_of(comm)
        others = optimizer.communicator.ranks
        if ranks.ranks != others:
            raise MeshError.because(
                "DataParallelMultiGPU(comm=...)",
                f"ranks {list(ranks.ranks)}, but the optimizer's are {list(others)}",
                hint="DASO(..., comm=comm)",
            )
        super().__init__()
        self.module = module
        self.comm = optimizer.comm if comm is None else comm
        self.loc_gpus = optimizer.loc_gpus
        self._optimizer = optimizer
        self._options: dict[str, Any] = {
            "bucket_mb": bucket_mb,
            "compression": compression,
            "broadcast_buffers": broadcast_buffers,
            "find_unused": find_unused,
        }
        options = (*self._options.values(), reset_parameters)
        check_same_module(module, ranks, [repr(option) for option in options])
        if reset_parameters:
            reset_module(module, ranks)
        optimizer.set_model(module, local_sync=self._set_sync)
        self._engine: GradientEngine | None = None
        self._running()

    def _running(self) -> GradientEngine:
        """Return the engine. In a copy it is made first: collective over the node."""
        if self._engine is None:
            node = self._optimizer.exchange.node
            self._engine = GradientEngine(self.module, node, **self._options)
            self._engine.require_sync = self._optimizer.local.syncs
        return self._engine

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        engine = self._running()
        engine.before_forward()
        outputs = self.module(*inputs, **kwargs)
        engine.after_forward(outputs)
        return outputs

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients in the node; DASO switches it."""
        return self._running().require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._running().require_sync = value

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward inside only accumulate on this rank."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: object, **__: object) -> NoReturn:
        """Refuse: nodes count batches to know when to exchange, so all ranks need equally many."""
        raise ValueError(
            explain(
                "DataParallelMultiGPU.join()",
                "DASO needs equal batch counts on all ranks",
                hint="drop_last=True in the loader, or DataParallel.join() without DASO",
            )
        )

    def _set_sync(self, on: bool) -> None:
        self.require_backward_grad_sync = on

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take names with `module.`, as `state_dict` gives them, and those of the module inside."""
        name_as_wrapped(state_dict, prefix, self.module)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- copies: with the optimizer's own copy, which `copy.deepcopy((model, optimizer))` shows ----

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None, "_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.comm = communicator_of(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelMultiGPU:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        nn.Module.__setstate__(twin, copy.deepcopy(self.__getstate__(), memo))
        twin.comm = self.comm
        return twin

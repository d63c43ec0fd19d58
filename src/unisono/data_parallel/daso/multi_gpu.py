"""`DataParallelMultiGPU`: a module whose gradients are averaged inside each node, for DASO."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from unisono.comm import Communicator
from unisono.data_parallel.daso.daso import DASO
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.ranks import communicator_of
from unisono.data_parallel.wrapper import DataParallel
from unisono.errors import MeshError
from unisono.expect import expect, refusal

__all__ = ["DataParallelMultiGPU"]


class DataParallelMultiGPU(DataParallel):
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
        reset_parameters: re-initialise the module first, by a fixed seed.
    """

    _claims = False  # its DASO takes one wrapper of the model after another

    def __init__(
        self,
        module: nn.Module,
        optimizer: DASO,
        comm: object = None,
        *,
        bucket_mb: float | None = None,
        compression: object = None,
        broadcast_buffers: bool = True,
        reset_parameters: bool = False,
    ) -> None:
        expect("optimizer", optimizer, DASO, "DASO(optimizer, total_epochs), or DataParallel")
        ranks = optimizer.communicator if comm is None else communicator_of(comm)
        others = optimizer.communicator.ranks
        if ranks.ranks != others:
            raise MeshError.because(
                "DataParallelMultiGPU(comm=...)",
                f"ranks {list(ranks.ranks)}, but the optimizer's are {list(others)}",
                hint="DASO(..., comm=comm)",
            )
        self._daso = optimizer
        super().__init__(
            module,
            ranks,
            blocking_parameter_updates=True,
            bucket_mb=bucket_mb,
            compression=compression,
            broadcast_buffers=broadcast_buffers,
            reset_parameters=reset_parameters,
        )
        self.comm = optimizer.comm if comm is None else comm
        optimizer.set_model(module, local_sync=self._set_sync)

    @property
    def _averaging_ranks(self) -> Communicator:
        return self._daso.exchange.node

    def _start(self) -> GradientEngine:
        engine = super()._start()
        engine.require_sync = self._daso.syncs_node
        engine.replicas.may_drift = True  # DASO leaves exchanges inside a node out
        return engine

    @property
    def loc_gpus(self) -> int:
        """Ranks on this node."""
        return self._daso.loc_gpus

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients in the node; DASO switches it."""
        return self._running().require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._running().require_sync = value

    def _set_sync(self, on: bool) -> None:
        self.require_backward_grad_sync = on

    def join(self, *_: object, **__: object) -> NoReturn:
        """Refuse: nodes count batches to know when to exchange, so all ranks need equally many."""
        raise refusal(
            ValueError,
            "DataParallelMultiGPU.join()",
            "DASO needs equal batch counts on all ranks",
            hint="drop_last=True in the loader, or DataParallel.join() without DASO",
        )

    def samples(self, n: float) -> NoReturn:
        """Refuse: nodes average parameters, so every rank's gradient counts the same."""
        raise refusal(
            ValueError,
            f"DataParallelMultiGPU.samples({n!r})",
            "DASO weights ranks alike",
            hint="DataParallel.samples() without DASO",
        )

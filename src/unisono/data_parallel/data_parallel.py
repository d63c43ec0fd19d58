"""`DataParallel`: the same module on every rank, trained as if one rank had seen all the data."""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.comm import Communicator
from unisono.comm.torch.private import runs_uncompiled
from unisono.data_parallel.buckets import Bucket
from unisono.data_parallel.checks import (
    check_max_norm,
    check_options,
    checked_optimizers,
    fallback_reason,
)
from unisono.data_parallel.construction import (
    broadcast_module,
    check_same_module,
    name_as_wrapped,
    reset_module,
)
from unisono.data_parallel.deferred import DeferredUpdates
from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.join import Join
from unisono.data_parallel.layer_hooks import (
    LayerHook,
    hook_layers,
    layer_of,
)
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.ranks import communicator_of
from unisono.data_parallel.stats import Stats
from unisono.data_parallel.weighting import Weights
from unisono.expect import expect_choice

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """Trains `module` on all ranks of `comm` with averaged gradients. Collective over `comm`.

    After a step every rank holds the parameters that one process would hold after a step with the
    mean of all ranks' gradients. Without an optimizer, or with `blocking_parameter_updates=True`,
    gradients are complete when `backward()` returns. Otherwise `step()` returns while they travel,
    and each layer is updated just before it is used again: the same numbers, less waiting.

    Args:
        module: built alike on every rank; all take rank 0's parameters and buffers.
        comm: the ranks: a Communicator, ProcessGroup or MPICommunication; None: the world.
        optimizer: None, a `DataParallelOptimizer` or several.
        blocking_parameter_updates: whether `step()` acts at once.
        bucket_mb: largest bucket; None: by transport.
        compression: None, `"bf16"`, `"fp16"`, `"powersgd"`, a `PowerSGD` or a function.
        broadcast_buffers: whether rank 0's buffers go to all at each synchronising forward.
        find_unused: look for unused parameters after forward; speed only.
        reset_parameters: re-initialise all layers first, with a fixed seed, as HeAT does.

    >>> model = DataParallel(nn.Linear(2, 1))
    >>> model(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """

    module: nn.Module
    """The module inside."""
    comm: object
    """The ranks, as they were given."""
    communicator: Communicator
    """The ranks."""
    blocking_parameter_updates: bool
    """Whether `step()` acts at once."""
    _engine: GradientEngine | None = None
    _weights: Weights
    _deferred: DeferredUpdates | None = None
    _join: Join | None = None

    def __init__(
        self,
        module: nn.Module,
        comm: object = None,
        optimizer: DataParallelOptimizer | Sequence[DataParallelOptimizer] | None = None,
        blocking_parameter_updates: bool = False,
        *,
        bucket_mb: float | None = None,
        compression: object = None,
        broadcast_buffers: bool = True,
        find_unused: bool = False,
        reset_parameters: bool = False,
    ) -> None:
        super().__init__()
        check_options(
            module,
            bucket_mb,
            compression,
            blocking_parameter_updates,
            broadcast_buffers=broadcast_buffers,
            find_unused=find_unused,
            reset_parameters=reset_parameters,
        )
        optimizers = checked_optimizers(optimizer, module)
        self.module = module
        self.communicator = communicator_of(comm)
        self.comm = self.communicator if comm is None else comm
        reason = None if blocking_parameter_updates else fallback_reason(optimizers, module)
        if reason:
            warnings.warn(f"updates are blocking: {reason}", UserWarning, stacklevel=2)
        self.blocking_parameter_updates = bool(
            blocking_parameter_updates or reason or not optimizers
        )
        self._dp_optimizers = optimizers
        self._fwd_hook_handles: list[RemovableHandle] = []
        self._options: dict[str, Any] = {
            "bucket_mb": bucket_mb,
            "compression": compression,
            "broadcast_buffers": broadcast_buffers,
            "find_unused": find_unused,
        }
        self._name_layers()
        options = [self.blocking_parameter_updates, *_words(self)]
        check_same_module(module, self.communicator, options)
        if reset_parameters:
            reset_module(module, self.communicator)
        broadcast_module(module, self.communicator)
        self._start()

    def _start(self) -> GradientEngine:
        """Make the engine and, in non-blocking mode, the guards. Collective over `comm`."""
        engine = GradientEngine(
            self.module,
            self.communicator,
            blocking=self.blocking_parameter_updates,
            **self._options,
        )
        engine.options = tuple(_words(self))
        engine.weigh = weights = Weights(engine)
        deferred: DeferredUpdates | None = None
        for optimizer in self._dp_optimizers:
            optimizer.blocking_parameter_updates = self.blocking_parameter_updates
            optimizer.attach(None, engine)
        if not self.blocking_parameter_updates and self.communicator.size > 1:
            deferred = DeferredUpdates(engine, self._dp_optimizers[0])
        self._engine, self._weights, self._deferred = engine, weights, deferred
        self._fwd_hook_handles = []
        if deferred is not None:
            self._fwd_hook_handles = hook_layers(self.module, self._layers, self._forward_hook)
        weakref.finalize(self, _leave, engine, deferred)
        return engine

    def _name_layers(self) -> None:
        names = (name for name, _ in self.module.named_parameters())
        self._layers = list(dict.fromkeys(layer_of(name) for name in names))

    # -- training -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over `comm` when training (buffers, changed parameters)."""
        engine = self._running()
        if engine.comm.size == 1:
            return self.module(*inputs, **kwargs)
        if self._join is not None and self.module.training and torch.is_grad_enabled():
            engine.before_forward(self._join.before_forward())
        else:
            engine.before_forward()
        deferred = self._deferred
        if deferred is not None and (deferred.is_compiled or torch.compiler.is_compiling()):
            self.finalize()  # compiled code reads parameters without asking anybody
        return self._end_forward(engine, self.module(*inputs, **kwargs))

    @runs_uncompiled
    def _end_forward(self, engine: GradientEngine, outputs: Any) -> Any:
        self.finalize()  # layers that this forward did not use
        engine.after_forward(outputs)
        return outputs

    @runs_uncompiled
    def finalize(self) -> None:
        """Complete all reductions and apply all owed updates. Local, idempotent."""
        if self._deferred is not None:
            self._deferred.finalize()

    @property
    def optimizer(self) -> DataParallelOptimizer | Sequence[DataParallelOptimizer] | None:
        """The optimizer that was given, or several of them; None without one."""
        found = self._dp_optimizers
        return found[0] if len(found) == 1 else tuple(found) or None

    @property
    def pending(self) -> bool:
        """Whether a reduction is under way or an update owed."""
        return self._deferred is not None and self._deferred.active

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward inside only accumulate; the next one outside averages the sum."""
        engine = self._running()
        before, engine.require_sync = engine.require_sync, False
        try:
            with self._weights.scaling():
                yield
        finally:
            engine.require_sync = before

    @contextlib.contextmanager
    def samples(self, n: float) -> Iterator[None]:
        """Weight the gradient of the backward inside by this rank's `n` samples.

        The mean becomes sum of n_r g_r over sum of n_r, the one-process mean over all samples. All
        ranks use it for the same backward; `n` may be 0. Inside one accumulation with `no_sync`
        every backward has its own block, beginning with cleared gradients.
        """
        self._running()
        with self._weights.samples(n):
            yield

    @contextlib.contextmanager
    def join(
        self, *stepped: object, divide_by: Literal["active", "world"] = "active"
    ) -> Iterator[None]:
        """Train with uneven numbers of batches: ranks without data wait for the others.

        Collective over `comm`; inside, one backward follows each training forward. At the end all
        ranks hold the parameters, buffers and optimizer state of a rank that trained to the end.
        What a rank has accumulated with `no_sync` when it runs out goes into the others' next mean.

        Args:
            stepped: what is stepped inside: schedulers, a `GradScaler`, anything with `state_dict`
                and `load_state_dict`. All ranks have the same state of it at the end. Optimizers
                are found at their first step; name one that a rank without any batch never steps.
            divide_by: mean over ranks with data, or over all (those without bring zeros).

        Raises:
            TypeError: `stepped` has something without a state.
            ValueError: at the end, on all ranks: an optimizer that not all ranks know of, or a
                learning rate that changes inside without its scheduler being named.

        Example:
            with model.join(scheduler):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_of(model(x), y).backward()
                    optimizer.step()
                    scheduler.step()
        """
        expect_choice("divide_by", divide_by, ["active", "world"])
        engine = self._running()
        joined = Join(engine, self._weights, self._dp_optimizers, stepped)
        self._join = joined
        try:
            with joined.block(divide_by == "world"):
                yield
        finally:
            self._join = None

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the averaged gradient to a total norm; returns the norm before. Local.

        Gradients are the same on all ranks, so their norm is, too.
        """
        check_max_norm(max_norm)
        self.finalize()
        return nn.utils.clip_grad_norm_(
            self.module.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def rebuild(self) -> None:
        """Make the buckets again after parameters changed. Collective over `comm`."""
        engine = self._running()
        self._name_layers()
        engine.rebuild()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets, in the order in which they travel; none in a world of one."""
        return self._running().buckets

    def stats(self) -> Stats:
        """Return what communication has cost this rank so far. Local."""
        return self._running().stats()

    def compression_state_dict(self) -> dict[str, Any]:
        """Return the state of the compression (PowerSGD: factors, this rank's errors). Local."""
        return self._running().averaging.state_dict()

    def load_compression_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `compression_state_dict` gave on this rank. Local."""
        self._running().averaging.load_state_dict(state)

    def _settle_layer(self, layer: str) -> None:
        """Wait for and apply the owed update of a layer. Local."""
        if self._deferred is not None and self._deferred.active:
            self._deferred.settle_layer(layer)

    def _forward_hook(self, layer_name: str) -> LayerHook:
        """Return a forward pre-hook that applies the owed update of that layer."""
        return LayerHook(self, layer_name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the end of training (`training` false) completes what is owed."""
        if name == "training" and not value and self.__dict__.get("_deferred") is not None:
            self.finalize()
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take names with `module.`, as `state_dict` gives them, and those of the module inside."""
        name_as_wrapped(state_dict, prefix, self.module)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- copies ---------------------------------------------------------------------------------

    def _running(self) -> GradientEngine:
        """Return the engine. After unpickling it is made first: collective over `comm`."""
        if self._engine is None:
            self._engine = self._start()
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Return a parallel copy with its own hooks, buckets and optimizers. Collective."""
        self.finalize()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        plain = self._plain_state()
        held = {name: x for name, x in self.__getstate__().items() if name not in plain}
        super(DataParallel, twin).__setstate__({**copy.deepcopy(held, memo), **plain})
        twin.comm, twin.communicator = self.comm, self.communicator
        averaging = twin._start().averaging
        if self._engine is not None:
            averaging.load_state_dict(self._engine.averaging.state_dict())
        return twin

    def _plain_state(self) -> dict[str, Any]:
        """Return what describes this object without its module, ranks and hooks."""
        kept = ("blocking_parameter_updates", "_options", "_layers")
        return {
            **{name: copy.copy(self.__dict__[name]) for name in kept},
            "_engine": None,
            "_weights": None,
            "_deferred": None,
            "_join": None,
            "_fwd_hook_handles": [],
        }

    def __getstate__(self) -> dict[str, Any]:
        self.finalize()
        ours = {"comm", "communicator", "_dp_optimizers", *self._plain_state()}
        rest = {name: value for name, value in self.__dict__.items() if name not in ours}
        return {**rest, **self._plain_state(), "_dp_optimizers": self._dp_optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.comm = self.communicator = communicator_of(None)


def _words(model: DataParallel) -> list[str]:
    """Return the options as text that is the same in every process."""
    return [
        f"{name}={getattr(value, '__qualname__', type(value).__name__)}"
        if callable(value)
        else f"{name}={value!r}"
        for name, value in model._options.items()
    ]


def _leave(engine: GradientEngine, deferred: DeferredUpdates | None) -> None:
    """The last act for a `DataParallel` that is gone: complete requests, free the module."""
    owes = deferred is not None and deferred.owes
    with contextlib.suppress(Exception):
        engine.under_way.wait_all()
    if deferred is not None:
        deferred.close()
    engine.detach()
    if owes:
        warnings.warn(
            "a DataParallel ended before its last update was applied; call finalize() or eval() "
            "after the last step()",
            ResourceWarning,
            stacklevel=2,
        )

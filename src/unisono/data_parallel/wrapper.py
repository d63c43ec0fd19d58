"""`DataParallel`: the same module on every rank, trained as if one rank had seen all the data."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
import weakref
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from unisono.comm import Communicator
from unisono.comm.claims import check_unclaimed, claim
from unisono.data_parallel.batch_norm import synchronised
from unisono.data_parallel.bucket import Bucket
from unisono.data_parallel.engine import GradientEngine, Options, Stats
from unisono.data_parallel.join import Join, Weights
from unisono.data_parallel.nonblocking import (
    DataParallelOptimizer,
    DeferredUpdates,
    UpdateHook,
    fallback_reason,
)
from unisono.data_parallel.ranks import (
    broadcast_module,
    check_same_module,
    communicator_of,
    name_as_wrapped,
    reset_module,
)
from unisono.errors import LayoutError, an
from unisono.expect import expect, expect_choice, refusal
from unisono.launch.context import device_of
from unisono.torch_private import running_ddp, runs_uncompiled

__all__ = ["DataParallel"]


_CONNECTED = ("comm", "communicator", "_engine", "_weights", "_join")
"""What ties a wrapper to ranks; its copies make their own."""


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
        compression: None, `"bf16"`, `"fp16"`, or a hook written for torch's DDP.
        broadcast_buffers: whether rank 0's buffers go to all at each synchronising forward.
        reset_parameters: re-initialise all layers first, with a fixed seed, as HeAT does.
        sync_batch_norm: take the statistics of batch normalisation over all ranks, as one process
            does; its layers are exchanged in place.
        equal_batches: ranks are meant to see the same rows; without it they are warned.
        ddp_arguments: none; an argument of torch's DDP is refused with what to write instead.

    >>> model = DataParallel(nn.Linear(2, 1))
    >>> model(torch.ones(3, 2)).shape
    torch.Size([3, 1])
    """

    comm: object
    """The ranks, as they were given."""
    communicator: Communicator
    """The ranks."""
    blocking_parameter_updates: bool
    """Whether `step()` acts at once."""
    _claims = True
    """Whether it must be the only wrapper of its parameters."""
    _engine: GradientEngine | None = None
    _weights: Weights
    _join: Join | None = None
    _is_known_outermost = False
    """Whether a forward has shown that no DDP of torch's is around it."""

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
        reset_parameters: bool = False,
        sync_batch_norm: bool = False,
        equal_batches: bool = False,
        **ddp_arguments: object,
    ) -> None:
        super().__init__()
        _refuse_ddp_arguments(type(self).__name__, ddp_arguments)
        expect("module", module, nn.Module, "module=torch.nn.Linear(4, 2)")
        expect("blocking_parameter_updates", blocking_parameter_updates, bool)
        expect("reset_parameters", reset_parameters, bool)
        expect("sync_batch_norm", sync_batch_norm, bool)
        self._options = Options(bucket_mb, compression, broadcast_buffers, equal_batches)
        _check_module(type(self).__name__, module)
        optimizers = _checked_optimizers(optimizer, module)
        self.communicator = communicator_of(comm)
        if sync_batch_norm:
            module = synchronised(module, device_of(module), self.communicator)
        self._modules["module"] = module
        if self._claims:
            check_unclaimed(module.parameters(), self, self.communicator.ranks)
        self.comm = self.communicator if comm is None else comm
        reason = None if blocking_parameter_updates else fallback_reason(optimizers, module)
        if reason:
            warnings.warn(f"updates are blocking: {reason}", UserWarning, stacklevel=2)
        self.blocking_parameter_updates = bool(
            blocking_parameter_updates or reason or not optimizers
        )
        self._dp_optimizers = optimizers
        options = {"blocking": self.blocking_parameter_updates, **vars(self._options)}
        check_same_module(module, self.communicator, options)
        if reset_parameters:
            reset_module(module, self.communicator)
        broadcast_module(module, self.communicator)
        self._start()

    def _start(self) -> GradientEngine:
        """Make the engine, and what defers updates where they are. Collective over `comm`."""
        blocking = self.blocking_parameter_updates
        if self._claims:
            claim(self._inner.parameters(), self, self.communicator.ranks)
        engine = GradientEngine(
            self._inner, self._averaging_ranks, self._options, blocking=blocking
        )
        for optimizer in self._dp_optimizers:
            optimizer.blocking_parameter_updates = blocking
            optimizer.attach(engine)
        if not blocking and self.communicator.size > 1:
            engine.updates = DeferredUpdates(engine, self._dp_optimizers[0])
        self._engine, self._weights = engine, Weights(engine)
        weakref.finalize(self, _leave, engine)
        return engine

    @property
    def _deferred(self) -> DeferredUpdates | None:
        """What carries out steps later than they are asked for; None: nothing does."""
        return None if self._engine is None else self._engine.updates

    @property
    def _averaging_ranks(self) -> Communicator:
        """The ranks over which gradients are averaged."""
        return self.communicator

    # -- ways to the parameters: pending updates are completed first -------------------------------

    @property
    def _inner(self) -> nn.Module:
        return cast(nn.Module, self._modules["module"])

    @property
    def module(self) -> nn.Module:
        """The module inside; completes pending updates."""
        self.finalize()
        return self._inner

    def named_modules(
        self, *args: Any, **kwargs: Any
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield all modules, as `parameters()` and its like ask for; completes pending updates."""
        self.finalize()
        return super().named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the module inside; completes pending updates."""
        self.finalize()
        return super().named_children()

    # -- training -------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Collective over `comm` when training (buffers, changed parameters)."""
        engine, module = self._running(), self._inner
        if engine.comm.size == 1:
            return module(*inputs, **kwargs)
        if module.training and torch.is_grad_enabled():
            self._see_forward(engine, (inputs, kwargs))
        if self._join is not None and module.training and torch.is_grad_enabled():
            engine.before_forward(self._join.before_forward())
        else:
            engine.before_forward()
        deferred = engine.updates
        if deferred is not None and (deferred.is_compiled or torch.compiler.is_compiling()):
            self.finalize()  # compiled code calls no hooks of its layers
        return self._end_forward(engine, module(*inputs, **kwargs))

    @runs_uncompiled
    def _see_forward(self, engine: GradientEngine, inputs: Any) -> None:
        if not self._is_known_outermost:
            _check_outermost(self)
            self._is_known_outermost = True
        engine.replicas.see_forward(inputs)

    @runs_uncompiled
    def _end_forward(self, engine: GradientEngine, outputs: Any) -> Any:
        if engine.updates is not None:
            engine.updates.end_forward()
        engine.after_forward(outputs)
        return outputs

    @runs_uncompiled
    def finalize(self) -> None:
        """Complete all reductions and apply all pending updates. Local, idempotent."""
        if self._deferred is not None:
            self._deferred.finalize()

    @property
    def optimizer(self) -> DataParallelOptimizer | Sequence[DataParallelOptimizer] | None:
        """The optimizer, or several of them; None without one."""
        optimizers = self._dp_optimizers
        return optimizers[0] if len(optimizers) == 1 else tuple(optimizers) or None

    @property
    def pending(self) -> bool:
        """Whether a reduction is under way or an update pending."""
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
        if not max_norm >= 0:  # infinity clips nothing
            hint = "clip_grad_norm(1.0), at least 0"
            raise refusal(ValueError, f"clip_grad_norm({max_norm})", hint=hint)
        return nn.utils.clip_grad_norm_(
            self.module.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradient buckets, in the order in which they travel; none in a world of one."""
        return tuple(bucket.info for bucket in self._running().buckets)

    def stats(self) -> Stats:
        """Return what communication has cost this rank so far. Local."""
        return self._running().stats()

    @property
    def _fwd_hook_handles(self) -> list[RemovableHandle]:
        """The hooks on the forwards of layers, by HeAT's name; none in blocking mode."""
        return [] if self._deferred is None else self._deferred.layer_hooks

    def _forward_hook(self, layer_name: str) -> UpdateHook:
        """Return a forward pre-hook that applies the pending update of that layer."""
        return UpdateHook(self._deferred, layer_name)

    def __getattr__(self, name: str) -> Any:
        """Look up parameters and submodules; name `.module` if the module inside has the name."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "register_comm_hook":
                hint = "DataParallel(module, compression=functools.partial(hook, state))"
                raise AttributeError(f"{error}\n  HINT: {hint}") from None
            inner = self.__dict__.get("_modules", {}).get("module")
            if inner is None or name.startswith("_") or not hasattr(inner, name):
                raise
            wrapper = type(self).__name__
            raise AttributeError(
                f"{error}\n  HINT: model.module.{name}: it belongs to the "
                f"{type(inner).__name__} that the {wrapper} wraps",
                name=name,
                obj=self,
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the end of training (`training` false) completes pending updates."""
        if name == "training" and not value:
            self.finalize()
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Take names with `module.`, as `state_dict` gives them, and those of the module inside."""
        name_as_wrapped(state_dict, prefix, self._inner)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- copies ---------------------------------------------------------------------------------

    def _running(self) -> GradientEngine:
        """Return the engine. After unpickling it is made first: collective over `comm`."""
        if self._engine is None:
            self._engine = self._start()
        return self._engine

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Return a parallel copy with its own hooks, buckets and optimizers. Collective."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._options)] = self._options  # a function, or what it holds, is not copied
        super(DataParallel, twin).__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.comm, twin.communicator = self.comm, self.communicator
        twin._start()
        return twin

    def __getstate__(self) -> dict[str, Any]:
        self.finalize()
        return {name: value for name, value in self.__dict__.items() if name not in _CONNECTED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.comm = self.communicator = communicator_of(None)


_INSTEAD_OF_DDP = {
    "process_group": "DataParallel(module, process_group)",
    "bucket_cap_mb": "bucket_mb=25",
    "delay_all_reduce_named_params": "comm.all_reduce_(p.grad, op='mean') where you want it",
    "mixed_precision": "torch.autocast around forward, compression='bf16' for what travels",
}
"""What to write for some arguments of torch's DDP; the others are not needed."""


def _refuse_ddp_arguments(wrapper: str, arguments: dict[str, object]) -> None:
    known = {"find_unused", *inspect.signature(DistributedDataParallel.__init__).parameters}
    for name in arguments:
        if name not in known:
            raise TypeError(f"{wrapper}.__init__() got an unexpected keyword argument {name!r}")
        problem = "an argument of torch's DDP, or of an earlier version"
        hint = _INSTEAD_OF_DDP.get(name, "leave it out: what it asks for is done without it")
        raise refusal(TypeError, f"{wrapper}(..., {name}=...)", problem, hint=hint)


def _leave(engine: GradientEngine) -> None:
    """The last act for a `DataParallel` that is gone: complete requests, free the module."""
    deferred = engine.updates
    is_pending = deferred is not None and deferred.is_step_pending
    with contextlib.suppress(Exception):
        engine.wait_all()
    if deferred is not None:
        deferred.close()
    engine.detach()
    if is_pending:
        warnings.warn(
            "a DataParallel ended before its last update was applied; call finalize() or eval() "
            "after the last step()",
            ResourceWarning,
            stacklevel=2,
        )


def _check_outermost(wrapper: DataParallel) -> None:
    """Refuse torch's DDP around a wrapper: gradients would be divided by the ranks twice."""
    outer = running_ddp()
    if outer is not None and any(part is wrapper for part in outer.modules()):
        name = type(wrapper).__name__
        raise LayoutError.because(
            f"a forward of {name} in a DistributedDataParallel",
            "both average the gradients of the same parameters",
            hint="wrap the module once, by either of them",
        )


def _check_module(wrapper: str, module: nn.Module) -> None:
    """Refuse a module that is wrapped already, or that has no values to send yet."""
    for name, part in module.named_modules():
        is_ours = isinstance(part.__dict__.get("_engine"), GradientEngine)
        if is_ours or isinstance(part, DistributedDataParallel):
            raise refusal(
                ValueError,
                f"{wrapper} of a module with {an(type(part).__name__)} in it",
                f"{name or 'the module itself'}, which averages its gradients already",
                hint=f"use {name}.module in its place" if name else f"{wrapper}(model.module)",
            )
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(x):
            problem, hint = "has no shape yet", "run one forward first: module(example_batch)"
        elif x.is_meta:
            problem = "is on meta, without values"
            hint = "module.to_empty(device='cpu'), then load or initialise its values"
        else:
            continue
        raise refusal(
            ValueError, f"{wrapper}({type(module).__name__})", f"{name} {problem}", hint=hint
        )


def _checked_optimizers(optimizer: Any, module: nn.Module) -> list[DataParallelOptimizer]:
    """Return the optimizers as a list, each with at least one parameter of the module."""
    if optimizer is None:
        return []
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    module_ids = {id(p) for p in module.parameters()}
    for one in optimizers:
        kind = type(one).__name__
        if not isinstance(one, DataParallelOptimizer):
            hint = "DataParallelOptimizer(optimizer) of a torch optimizer, a list of such, or None"
            hint = "DataParallelMultiGPU(module, daso)" if kind == "DASO" else hint
            raise refusal(TypeError, f"optimizer={kind}", "not a DataParallelOptimizer", hint=hint)
        if not any(id(p) in module_ids for p in one.params_ref):
            call = f"an optimizer with {len(one.params_ref)} parameters"
            problem = f"none of them is one of the module's {len(module_ids)} parameters"
            hint = "build the optimizer from the parameters of this very module"
            raise refusal(ValueError, call, problem, hint=hint)
    return optimizers

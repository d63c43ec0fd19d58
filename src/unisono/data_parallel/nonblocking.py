"""`DataParallelOptimizer`, whose step may be carried out later: when its gradients arrive.

Every bucket may have a reduction under way and an update pending. The forward of a layer, and every
way to parameters through the wrapper or the optimizer, completes both first. Nothing here starts a
collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from unisono import torch_private as private
from unisono.data_parallel.bucket import GradientBucket
from unisono.data_parallel.engine import GradientEngine
from unisono.expect import expect, refusal

__all__ = ["DataParallelOptimizer"]

_PER_PARAMETER: set[type] = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    *(optim.Adafactor, optim.SparseAdam),
}
"""Optimizers that treat each parameter on its own: no counter in a group, no norm over all. A step
on some parameters, and later on the others, gives the bits of one step on all of them."""

_OBSERVES = "_only_observes_steps"

Frozen = list[dict[str, Any]]
"""Hyper-parameters of each group at some time."""

Hook = TypeVar("Hook", bound=Callable[..., None])


class DataParallelOptimizer(optim.Optimizer):
    """A torch optimizer for use with `DataParallel`; behaves like the one inside.

    Attached to a non-blocking `DataParallel`, `step()` returns while gradients still travel and
    parameters are updated just before they are used again, with the hyper-parameters of the time of
    the call. Otherwise `step()` acts at once.

    Args:
        torch_optimizer: the optimizer that does the work.
        blocking: wish for blocking updates; a `DataParallel` sets it.

    >>> layer = nn.Linear(2, 1)
    >>> optimizer = DataParallelOptimizer(optim.SGD(layer.parameters(), lr=0.1))
    >>> len(optimizer.params_ref), optimizer.update_next
    (2, False)
    """

    torch_optimizer: optim.Optimizer
    """The optimizer inside."""
    blocking_parameter_updates: bool
    """Whether `step()` acts at once."""
    _step_supports_amp_scaling = False
    """A scaler unscales gradients itself, also for a fused optimizer inside: what it would set here
    instead, the one inside never sees."""

    def __init__(self, torch_optimizer: optim.Optimizer, blocking: bool = False) -> None:
        hint = "a torch optimizer: torch.optim.SGD(model.parameters(), lr=0.1)"
        expect("torch_optimizer", torch_optimizer, optim.Optimizer, hint)
        if isinstance(torch_optimizer, DataParallelOptimizer):
            call = "DataParallelOptimizer(DataParallelOptimizer(...))"
            raise refusal(TypeError, call, hint="the inner one: optimizer.torch_optimizer")
        expect("blocking", blocking, bool)
        self.torch_optimizer = torch_optimizer
        self.blocking_parameter_updates = blocking
        self._engine: weakref.ref[GradientEngine] | None = None

    # -- what the inner optimizer has -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the inner optimizer; gradients are complete before a step.

        A `GradScaler`, say, looks at them from here.
        """
        if (updates := self._updates()) is not None:
            updates.show_gradients()
        return self.torch_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the inner optimizer; completes pending updates."""
        self.finalize()
        return self.torch_optimizer.state

    @property
    def params_ref(self) -> list[nn.Parameter]:
        """All parameters of all groups, in order."""
        return [p for group in self.torch_optimizer.param_groups for p in group["params"]]

    @property
    def update_next(self) -> bool:
        """Whether a step is pending."""
        return (updates := self._updates()) is not None and updates.is_step_pending

    def __getattr__(self, name: str) -> Any:
        """Find everything else in the inner optimizer, the tables of its hooks too."""
        if name == "torch_optimizer":
            raise AttributeError(name)
        return getattr(self.torch_optimizer, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.finalize()
        self.torch_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, complete at any moment."""
        self.finalize()
        return self.torch_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.finalize()
        self.torch_optimizer.load_state_dict(state_dict)

    # -- steps ----------------------------------------------------------------------------------

    def attach(self, engine: GradientEngine) -> None:
        """Leave gradients, and steps where it defers them, to `engine`, by a weak reference."""
        self._engine = weakref.ref(engine)

    def _updates(self) -> DeferredUpdates | None:
        engine = None if self._engine is None else self._engine()
        return None if engine is None else engine.updates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, at once or later; returns the closure's value if there is one."""
        updates = self._updates()
        if updates is None:
            return self.torch_optimizer.step(closure) if closure else self.torch_optimizer.step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates.step()
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, by default to zeros, as HeAT does; a pending step is not lost."""
        engine = None if self._engine is None else self._engine()
        inner = self.torch_optimizer
        if engine is None or type(inner).zero_grad is not optim.Optimizer.zero_grad:
            inner.zero_grad(set_to_none)
        else:
            engine.clear_gradients(inner, set_to_none)

    def finalize(self) -> None:
        """Carry out a pending step. Local."""
        if (updates := self._updates()) is not None:
            updates.finalize()

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the inner optimizer; the copy belongs to no `DataParallel` yet."""
        self.finalize()
        return type(self), (self.torch_optimizer, self.blocking_parameter_updates)

    def __repr__(self) -> str:
        return f"DataParallelOptimizer({self.torch_optimizer!r})"


def fallback_reason(optimizers: Sequence[DataParallelOptimizer], module: nn.Module) -> str | None:
    """Return why updates cannot be deferred; None if they can, or if it was not requested.

    The same answer on every rank: it depends on classes and parameters alone, never on what has
    arrived. By the very class: a subclass, and an optimizer from elsewhere, may keep what it learns
    in its groups (Prodigy, D-Adaptation, schedule-free) or look at all gradients together.
    """
    if not optimizers:
        return None
    if len(optimizers) > 1:
        return f"{len(optimizers)} optimizers share the module"
    optimizer = optimizers[0]
    kind = type(optimizer.torch_optimizer)
    if kind not in _PER_PARAMETER:
        return f"{kind.__name__} is not known to treat each parameter on its own"
    trainable = {id(p) for p in module.parameters() if p.requires_grad}
    updated = {id(p) for p in optimizer.params_ref if p.requires_grad}
    if trainable != updated:
        return (
            f"the optimizer holds {len(updated)} trainable parameters and the module "
            f"{len(trainable)}, {len(trainable & updated)} in common"
        )
    return None


def only_observes(hook: Hook) -> Hook:
    """Mark a step hook that looks neither at parameters nor at gradients.

    Such a hook is called once for every `step()`, also for one that is carried out later, layer by
    layer. For any other hook a step waits until all gradients are there.
    """
    setattr(hook, _OBSERVES, True)
    return hook


@dataclass
class PendingUpdates:
    """A step that was asked for and is not complete."""

    frozen: Frozen
    """Hyper-parameters at the time of the step."""
    buckets: set[int]
    """Numbers of the buckets whose parameters wait for it."""
    clears: set[int] = field(default_factory=set)
    """Buckets to fill with zeros after their update."""


class DeferredUpdates:
    """The pending step of one optimizer over the buckets of one engine.

    Args:
        engine: in non-blocking mode.
        optimizer: treats each parameter on its own, and holds exactly the trainable ones of the
            module.
    """

    def __init__(self, engine: GradientEngine, optimizer: DataParallelOptimizer) -> None:
        self.is_compiled = False
        """Whether the module is compiled code, which calls no hooks of its layers."""
        self._engine = engine
        self._optimizer = optimizer.torch_optimizer
        self._pending: PendingUpdates | None = None
        self._layers: dict[str, list[int]] = {}
        self._called: set[str] = set()  # layers whose forward has begun in this forward
        self._passed_over: set[str] = set()  # layers of which others read parameters directly
        self.layer_hooks: list[RemovableHandle] = []
        """Of the layers' forwards."""
        # A step, save or load of the optimizer or the module inside finds no update pending.
        hook, module = UpdateHook(self), engine.module
        self._step_hook = self._optimizer.register_step_pre_hook(hook)
        self._hooks: list[RemovableHandle] = [
            self._step_hook,
            self._optimizer.register_state_dict_pre_hook(hook),
            self._optimizer.register_load_state_dict_pre_hook(hook),
            module.register_state_dict_pre_hook(hook),
            module.register_load_state_dict_pre_hook(hook),
        ]
        self.attach()

    def attach(self) -> None:
        """Take the buckets and layers of the module as it is now. Local."""
        module, buckets = self._engine.module, self._engine.buckets
        self.is_compiled = any(
            type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None
            for part in module.modules()
        )
        self._layers = {}
        self._passed_over = set()
        self._remove_layer_hooks()
        for name, part in module.named_modules():
            # A split network reads the parameters of all its layers before it calls the first.
            reads_all = getattr(part, "reads_all_parameters", False)
            part_ids = {id(p) for p in part.parameters(recurse=reads_all)}
            indices = [b.index for b in buckets if any(id(p) in part_ids for p in b.params)]
            if indices or not name:
                self._layers[name] = indices
                hook = part.register_forward_pre_hook(UpdateHook(self, name))
                self.layer_hooks.append(hook)

    def _remove_layer_hooks(self) -> None:
        for hook in self.layer_hooks:
            hook.remove()
        self.layer_hooks.clear()

    def close(self) -> None:
        """Leave module and optimizer as they were before. Local."""
        self._engine.updates = None
        self._remove_layer_hooks()
        for hook in self._hooks:
            hook.remove()
        self._pending = None

    # -- what the engine asks -------------------------------------------------------------------

    def check_untouched(self, bucket: GradientBucket) -> None:
        """Raise if the gradients were written to of `bucket`, which has just arrived."""
        if bucket.version != bucket.sent_version and not self._engine.backward.is_open:
            raise refusal(
                RuntimeError,
                "gradients written to while they travelled",
                bucket.describe(),
                hint="model.finalize() before, or reach them by model.parameters(), "
                "model.clip_grad_norm(...) and optimizer.zero_grad(), which wait for them",
            )

    def is_awaited(self, bucket: GradientBucket) -> bool:
        """Whether the pending step needs the gradients of `bucket`."""
        return self._pending is not None and bucket.index in self._pending.buckets

    def clear_later(self, bucket: GradientBucket) -> None:
        """Fill `bucket` with zeros right after the pending step of it."""
        if self._pending is not None:
            self._pending.clears.add(bucket.index)

    # -- what the optimizer asks ----------------------------------------------------------------

    @property
    def is_step_pending(self) -> bool:
        """Whether a step was taken that is not complete."""
        return self._pending is not None

    @property
    def active(self) -> bool:
        """Whether anything is under way or pending."""
        return self._pending is not None or bool(self._engine.under_way)

    def step(self) -> None:
        """Take a step: at once for what is here on all ranks, later for the rest. Local.

        A parameter that is read before then has the same value on all ranks.
        """
        if self._pending is not None:
            self.finalize()
        engine, optimizer = self._engine, self._optimizer
        # Not only those that have not arrived: which these are differs from rank to rank.
        waiting = engine.under_way
        # The user may have put other gradients in the place of those under way.
        has_others = any(
            param.grad is not slot
            for bucket in waiting
            for param, slot in zip(bucket.params, bucket.slots, strict=True)
        )
        if not waiting or has_others or _is_watched(optimizer, self._step_hook.id):
            self.finalize()
            optimizer.step()
            return
        # A scheduler on the inner optimizer asks whether it has stepped.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        pending = PendingUpdates(_freeze(optimizer), {b.index for b in waiting})
        inside = {id(p) for bucket in waiting for p in bucket.params}
        everything = {id(p) for group in optimizer.param_groups for p in group["params"]}
        _step_some(optimizer, everything - inside, pending.frozen)
        self._pending = pending
        for hook in list(private.optimizer_post_hooks.values()):  # those that only observe
            hook(optimizer, (), {})

    # -- settling -------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Complete everything. Local, idempotent."""
        if self.active:
            self._settle(range(len(self._engine.buckets)))

    def show_gradients(self) -> None:
        """Complete what an optimizer's parameters are read for before a step. Local."""
        if self._pending is None:
            self.finalize()

    def settle_layer(self, layer: str) -> None:
        """Complete everything that concerns the parameters of this layer. Local."""
        if self.active:
            self._settle(self._layers.get(layer, ()))

    def enter_layer(self, layer: str) -> None:
        """Make parameters ready for the forward of a layer; `""` is the module itself. Local."""
        if not layer:
            self._called.clear()
            for other in self._passed_over:
                self.settle_layer(other)
        self._called.add(layer)
        self.settle_layer(layer)

    def end_forward(self) -> None:
        """Complete what this forward did not use. Local.

        Layers whose own forward was not called may have been used all the same: attention reads the
        weight of its last layer. From now on they are settled when a forward begins.
        """
        self._passed_over.update(self._layers.keys() - self._called)
        self.finalize()

    def active_layers(self) -> set[str]:
        """Return the names of layers with a reduction under way or an update pending."""
        buckets = {bucket.index for bucket in self._engine.under_way}
        if self._pending is not None:
            buckets |= self._pending.buckets
        return {
            name
            for name, layer_buckets in self._layers.items()
            if not buckets.isdisjoint(layer_buckets)
        }

    def _settle(self, indices: Sequence[int]) -> None:
        if torch.is_inference_mode_enabled():
            # Optimizer state made in there would be of no use in training.
            with torch.inference_mode(False), torch.no_grad():
                self._settle(indices)
            return
        while True:
            # Whatever is here is used while the rest travels.
            self._update_arrived()
            first = next((b for b in self._engine.under_way if b.index in indices), None)
            if first is None:
                return
            self._engine.wait(first)

    def _update_arrived(self) -> None:
        pending, engine = self._pending, self._engine
        if pending is None:
            return
        ready = [b for b in engine.buckets if b.index in pending.buckets and engine.has_arrived(b)]
        if not ready:
            return
        for bucket in ready:
            engine.wait(bucket)
        pending.buckets.difference_update(b.index for b in ready)
        if not pending.buckets:
            self._pending = None
        self._update(pending, ready)

    def _update(self, pending: PendingUpdates, buckets: Sequence[GradientBucket]) -> None:
        """Carry out the step for these buckets with the gradients of the time of the step."""
        shown: list[tuple[nn.Parameter, Tensor | None]] = []
        for bucket in buckets:
            for i, (param, slot) in enumerate(zip(bucket.params, bucket.slots, strict=True)):
                shown.append((param, param.grad))
                param.grad = None if i in bucket.idle else slot
        try:
            _step_some(self._optimizer, {id(param) for param, _ in shown}, pending.frozen)
        finally:
            for param, grad in shown:
                param.grad = grad
        for bucket in buckets:
            if bucket.index in pending.clears:
                bucket.clear(set_to_none=False)


class UpdateHook:
    """A hook that completes updates: of the layer whose forward begins, or all of them.

    In copies of the module it does nothing.
    """

    def __init__(self, updates: DeferredUpdates | None, layer: str | None = None) -> None:
        self._updates = None if updates is None else weakref.ref(updates)
        self._layer = layer

    def __call__(self, *_: object) -> None:
        """Complete what is needed now."""
        if torch.compiler.is_compiling():
            return  # the wrapper completes everything before compiled code runs
        updates = None if self._updates is None else self._updates()
        if updates is None:
            return
        if self._layer is None:
            updates.finalize()
        else:
            updates.enter_layer(self._layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return UpdateHook, (None, self._layer)


# -- an optimizer on some of its parameters: inner parts of torch.optim, seen with torch 2.13 ----


def _is_watched(optimizer: optim.Optimizer, step_hook: int) -> bool:
    """Whether a step in parts can be observed: hooks, another `step`."""
    patched = vars(optimizer).get("step")
    return bool(
        any(key != step_hook for key in optimizer._optimizer_step_pre_hooks)
        or optimizer._optimizer_step_post_hooks
        or private.optimizer_pre_hooks
        or any(not hasattr(hook, _OBSERVES) for hook in private.optimizer_post_hooks.values())
        or (patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"))
    )


def _freeze(optimizer: optim.Optimizer) -> Frozen:
    """Return the hyper-parameters of all groups as they are now."""
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _step_some(optimizer: optim.Optimizer, parameter_ids: set[int], frozen: Frozen) -> None:
    """Update the parameters with these ids, with the frozen hyper-parameters. No hooks run."""
    groups = optimizer.param_groups
    shown: list[dict[str, Any]] = []
    for group, values in zip(groups, frozen, strict=True):
        params = [p for p in group["params"] if id(p) in parameter_ids]
        if params:
            shown.append({"params": params, **values})
    if not shown:
        return
    function = type(optimizer).step
    bare = getattr(function, "__wrapped__", function) if hasattr(function, "hooked") else function
    optimizer.param_groups = shown
    try:
        with torch.no_grad():
            bare(optimizer)
    finally:
        optimizer.param_groups = groups

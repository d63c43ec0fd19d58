"""Non-blocking updates: which buckets are under way, which owe an update, and paying in time.

Two bits a bucket: R, its reduction is under way; U, a step was asked for and is owed. Everything
that looks at a parameter or a gradient settles the bucket first. Nothing here starts a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from unisono.data_parallel.engine import GradientEngine
from unisono.data_parallel.gradient_bucket import GradientBucket
from unisono.data_parallel.guards import GuardedGrad, guard_parameters, unguard_parameters
from unisono.data_parallel.layer_hooks import is_compiled
from unisono.data_parallel.optimizer import DataParallelOptimizer
from unisono.data_parallel.partial_step import (
    Frozen,
    freeze,
    is_watched,
    step_some,
    tell_observers,
)


class Owed:
    """A step that was asked for and is not complete.

    Attributes:
        frozen: hyper-parameters at the time of the step.
        buckets: numbers of the buckets whose parameters wait for it.
        given: gradients at the time of the step, where they were not those under way.
        clears: buckets to fill with zeros after their update.
    """

    def __init__(self, frozen: Frozen, buckets: Iterable[int]) -> None:
        self.frozen = frozen
        self.buckets = set(buckets)
        self.given: dict[int, Tensor | None] = {}
        self.clears: set[int] = set()


class DeferredUpdates:
    """The owed step of one optimizer over the buckets of one engine.

    Args:
        engine: in non-blocking mode.
        optimizer: treats each parameter on its own, and holds exactly the trainable ones of the
            module.
    """

    def __init__(self, engine: GradientEngine, optimizer: DataParallelOptimizer) -> None:
        self.active = False
        """Whether anything is under way or owed."""
        self.is_compiled = False
        """Whether the module reads its parameters without asking anybody."""
        self._engine = engine
        self._optimizer = optimizer.torch_optimizer
        self._owed: Owed | None = None
        self._guarded: list[nn.Module] = []
        self._guards: dict[int, list[GuardedGrad]] = {}
        self._idle: dict[int, set[int]] = {}
        self._layers: dict[str, list[int]] = {}
        engine.on_attach = self.attach
        engine.under_way.on_start = self.launched
        engine.under_way.on_arrival = self.arrived
        engine.on_reuse = self.finalize
        # Whoever steps, saves or loads the inner optimizer directly must find everything paid.
        finalizing = _finalizing(weakref.ref(self))
        self._step_hook = self._optimizer.register_step_pre_hook(finalizing)
        self._state_hooks = (
            self._optimizer.register_state_dict_pre_hook(finalizing),
            self._optimizer.register_load_state_dict_pre_hook(finalizing),
        )
        optimizer.attach(self)
        self.attach()

    def attach(self) -> None:
        """Guard the module as it is now. Local."""
        self.detach()
        self.is_compiled = is_compiled(self._engine.module)
        self._layers = {
            name: self._buckets_of(part) for name, part in self._engine.module.named_modules()
        }
        self._guards = {
            bucket.index: [GuardedGrad.over(slot, bucket.index, self) for slot in bucket.slots]
            for bucket in self._engine.gradient_buckets
        }
        self._guarded = guard_parameters(self._engine.module, self)
        self._engine.note_structure()  # with the new tables

    def detach(self) -> None:
        """Take all guards away. Local."""
        unguard_parameters(self._guarded)
        self._guarded = []
        for bucket in self._engine.gradient_buckets:
            for param, slot in zip(bucket.params, bucket.slots, strict=True):
                if isinstance(param.grad, GuardedGrad):
                    param.grad = slot

    def close(self) -> None:
        """Leave module and optimizer as they were before. Local."""
        self.detach()
        self._guards.clear()
        for hook in (self._step_hook, *self._state_hooks):
            hook.remove()
        self._owed, self.active = None, False

    def _buckets_of(self, part: nn.Module) -> list[int]:
        own = {id(p) for p in dict.values(part._parameters) if p is not None}
        return [
            bucket.index
            for bucket in self._engine.gradient_buckets
            if any(id(p) in own for p in bucket.params)
        ]

    # -- what the engine tells ------------------------------------------------------------------

    def launched(self, bucket: GradientBucket) -> None:
        """Note that `bucket` is under way: its gradients are not to be looked at."""
        self.active = True
        for param, guard in zip(bucket.params, self._guards[bucket.index], strict=True):
            param.grad = guard

    def arrived(self, bucket: GradientBucket) -> None:
        """Show the means as gradients, except where the user has put something else meanwhile."""
        guards = self._guards[bucket.index]
        own = {
            i: param.grad
            for i, (param, guard) in enumerate(zip(bucket.params, guards, strict=True))
            if param.grad is not guard
        }
        for param, slot in zip(bucket.params, bucket.slots, strict=True):
            param.grad = slot
        bucket.resolve_unused()
        self._idle[bucket.index] = {i for i, p in enumerate(bucket.params) if p.grad is None}
        for i, grad in own.items():
            bucket.params[i].grad = grad
        self._rest()

    # -- what the optimizer asks ----------------------------------------------------------------

    @property
    def owes(self) -> bool:
        """Whether a step is owed."""
        return self._owed is not None

    def step(self) -> None:
        """Take a step: at once for what has arrived, else when it has. Local."""
        if self._owed is not None:
            self.finalize()
        engine = self._engine
        waiting = [b for b in engine.gradient_buckets if not engine.under_way.has_arrived(b)]
        if not waiting or is_watched(self._optimizer, self._step_hook.id):
            self.finalize()
            self._optimizer.step()
            return
        # A scheduler on the inner optimizer asks whether it has stepped.
        self._optimizer._opt_called = True  # type: ignore[attr-defined]
        owed = Owed(freeze(self._optimizer), [b.index for b in waiting])
        for bucket in waiting:
            for i, param in enumerate(bucket.params):
                if param.grad is not self._guards[bucket.index][i]:
                    owed.given[id(param)] = param.grad
        for bucket in engine.gradient_buckets:
            if bucket.index not in owed.buckets:
                engine.under_way.wait(bucket)
        others = self._params_outside(waiting)
        step_some(self._optimizer, {id(param) for param in others}, owed.frozen)
        self._owed = owed
        self.active = True
        tell_observers(self._optimizer)

    def _params_outside(self, buckets: Sequence[GradientBucket]) -> list[nn.Parameter]:
        inside = {id(p) for bucket in buckets for p in bucket.params}
        groups = self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if id(p) not in inside]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients; those an owed update still needs, right after it. Local."""
        engine, owed = self._engine, self._owed
        cleared: set[int] = set()
        for bucket in engine.gradient_buckets:
            cleared.update(id(p) for p in bucket.params)
            owes = owed is not None and bucket.index in owed.buckets
            if not owes:
                engine.under_way.wait(bucket)
            elif owed is not None and not set_to_none:
                owed.clears.add(bucket.index)
                continue
            bucket.clear(set_to_none)
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in cleared and param.grad is not None:
                    param.grad = None if set_to_none else torch.zeros_like(param.grad)

    # -- settling -------------------------------------------------------------------------------

    def finalize(self) -> None:
        """Complete everything. Local, idempotent."""
        if self.active:
            self._settle(range(len(self._engine.gradient_buckets)))

    def settle_layer(self, layer: str) -> None:
        """Complete everything that concerns the parameters of this layer. Local."""
        self._settle(self._layers.get(layer, ()))

    def settle_bucket(self, index: int) -> None:
        """Complete everything that concerns this bucket. Local."""
        self._settle((index,))

    def active_layers(self) -> set[str]:
        """Return the names of layers with a reduction under way or an update owed."""
        buckets = {b.index for b in self._engine.gradient_buckets if b in self._engine.under_way}
        if self._owed is not None:
            buckets |= self._owed.buckets
        return {name for name, own in self._layers.items() if not buckets.isdisjoint(own)}

    def _settle(self, indices: Sequence[int]) -> None:
        if torch.is_inference_mode_enabled():
            # Optimizer state made in there would be of no use in training.
            with torch.inference_mode(False), torch.no_grad():
                self._settle(indices)
            return
        buckets = self._engine.gradient_buckets
        while True:
            # Whatever is here is used while the rest travels.
            self._update_arrived()
            wanted = next((i for i in indices if buckets[i] in self._engine.under_way), None)
            if wanted is None:
                return
            self._engine.under_way.wait(buckets[wanted])

    def _update_arrived(self) -> None:
        owed = self._owed
        if owed is None:
            return
        engine = self._engine
        ready = [b for b in engine.gradient_buckets if b.index in owed.buckets]
        ready = [b for b in ready if engine.under_way.has_arrived(b)]
        if not ready:
            return
        for bucket in ready:
            engine.under_way.wait(bucket)
        owed.buckets.difference_update(b.index for b in ready)
        if not owed.buckets:
            self._owed = None
        self._update(owed, ready)
        self._rest()

    def _update(self, owed: Owed, buckets: Sequence[GradientBucket]) -> None:
        """Carry out the step for these buckets with the gradients of the time of the step."""
        shown: list[tuple[nn.Parameter, Tensor | None]] = []
        for bucket in buckets:
            idle = self._idle.get(bucket.index, set())
            for i, param in enumerate(bucket.params):
                shown.append((param, param.grad))
                mean = None if i in idle else bucket.slots[i]
                param.grad = owed.given.get(id(param), mean)
        try:
            step_some(self._optimizer, {id(param) for param, _ in shown}, owed.frozen)
        finally:
            for param, grad in shown:
                param.grad = grad
        for bucket in buckets:
            if bucket.index in owed.clears:
                bucket.clear(set_to_none=False)

    def _rest(self) -> None:
        self.active = self._owed is not None or len(self._engine.under_way) > 0


def _finalizing(deferred: weakref.ref[DeferredUpdates]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        keeper = deferred()
        if keeper is not None:
            keeper.finalize()

    return hook

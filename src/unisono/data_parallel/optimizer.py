"""`DataParallelOptimizer`: a torch optimizer whose step may be carried out a little later."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from unisono.expect import expect, refusal

if TYPE_CHECKING:
    from unisono.data_parallel.engine import GradientEngine
    from unisono.data_parallel.nonblocking import DeferredUpdates

__all__ = ["DataParallelOptimizer"]


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
            raise refusal(
                TypeError,
                "DataParallelOptimizer(DataParallelOptimizer(...))",
                "it wraps a torch optimizer already",
                hint="pass the inner one: optimizer.torch_optimizer",
            )
        expect("blocking", blocking, bool)
        self.torch_optimizer = torch_optimizer
        self.blocking_parameter_updates = blocking
        self._engine: weakref.ref[GradientEngine] | None = None

    # -- what the inner optimizer has -----------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner optimizer; gradients are complete before a step.

        A `GradScaler`, say, looks at them from here.
        """
        if (updates := self._updates()) is not None:
            updates.show_gradients()
        return self.torch_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:  # type: ignore[override]
        self.torch_optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the inner optimizer; completes pending updates."""
        self.finalize()
        return self.torch_optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # type: ignore[override]
        self.torch_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the inner optimizer."""
        return self.torch_optimizer.defaults

    @property
    def params_ref(self) -> list[nn.Parameter]:
        """All parameters of all groups, in order."""
        return [p for group in self.torch_optimizer.param_groups for p in group["params"]]

    @property
    def update_next(self) -> bool:
        """Whether a step is pending."""
        return (updates := self._updates()) is not None and updates.owes

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
        """Leave gradients, and steps where it defers them, to `engine`; it is held weakly."""
        self._engine = weakref.ref(engine)

    def _updates(self) -> DeferredUpdates | None:
        engine = None if self._engine is None else self._engine()
        return None if engine is None else engine.updates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, or owe it (see the class); returns the closure's value if there is one."""
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

    # -- copies ---------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelOptimizer:
        self.finalize()
        inner = copy.deepcopy(self.torch_optimizer, memo)
        return type(self)(inner, self.blocking_parameter_updates)

    def __getstate__(self) -> dict[str, Any]:
        self.finalize()
        return {
            "torch_optimizer": self.torch_optimizer,
            "blocking_parameter_updates": self.blocking_parameter_updates,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._engine = None

    def __repr__(self) -> str:
        return f"DataParallelOptimizer({self.torch_optimizer!r})"

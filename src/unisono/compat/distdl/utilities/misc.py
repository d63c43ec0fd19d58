"""DistDL's `utilities.misc`: a dict with attributes, and one in place of autograd's `ctx`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Bunch(dict[str, Any]):
    """A dict whose entries are attributes too.

    >>> ctx = Bunch(a=1)
    >>> ctx.b = 2
    >>> ctx["b"], ctx.a
    (2, 1)
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class DummyContext(Bunch):
    """What `forward` and `backward` of an autograd function need when they are called by hand.

    >>> ctx = DummyContext()
    >>> ctx.save_for_backward(Tensor([1.0]))
    >>> len(ctx.saved_tensors)
    1
    """

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors as `saved_tensors`."""
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Keep what is changed in place."""
        self.dirty_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Keep what has no gradient."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Keep whether missing gradients become zeros."""
        self.materialize_grads = value

"""The functions that autograd calls; they hold the engine weakly: parameters may outlive it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from unisono.data_parallel.gradient_bucket import GradientBucket

if TYPE_CHECKING:
    from unisono.data_parallel.engine import GradientEngine

Hook = Callable[[Tensor], None]


def on_arrival(engine: GradientEngine, bucket: GradientBucket, i: int) -> Hook:
    """Return the hook for a gradient that has been accumulated."""
    me = weakref.ref(engine)

    def hook(param: Tensor) -> None:  # noqa: ARG001
        engine = me()
        if engine is not None:
            engine.receive(bucket, i)

    return hook


def before_arrival(engine: GradientEngine, bucket: GradientBucket, i: int) -> Hook:
    """Return the hook for a gradient that is about to be accumulated."""
    me = weakref.ref(engine)

    def hook(grad: Tensor) -> None:  # noqa: ARG001
        engine = me()
        if engine is not None and (engine.under_way or i in bucket.came):
            engine.make_room(bucket, i)

    return hook


def on_sparse_arrival(engine: GradientEngine, i: int) -> Hook:
    """Return the hook for a sparse gradient that has been accumulated."""
    me = weakref.ref(engine)

    def hook(param: Tensor) -> None:  # noqa: ARG001
        engine = me()
        if engine is not None:
            engine.receive_sparse(i)

    return hook


def on_output(engine: GradientEngine) -> Hook:
    """Return the hook for a backward that starts at an output of the module."""
    me = weakref.ref(engine)

    def hook(grad: Tensor) -> None:  # noqa: ARG001
        engine = me()
        if engine is not None:
            engine.begin_backward()

    return hook

"""`runs_uncompiled`: what `torch.compile` leaves alone, because ranks agree in it at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def runs_uncompiled(function: F) -> F:
    """Return the function, which compiled code calls as it is, with all that it calls.

    As `torch.compiler.disable` does, which would load the compiler for those who never compile.
    """
    marked = cast("Any", function)
    marked._torchdynamo_disable = True  # a compiled caller stops before it ...
    frames = cast("Any", torch._C)._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy") and hasattr(marked, "__code__"):
        # ... and its own frame is never compiled
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function

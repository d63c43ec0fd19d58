"""Who is told that a verb is about to replace the values of a user's tensor: the layout check."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

listener: Callable[[Tensor], None] | None = None
"""Called with the tensor before an in-place verb; None while nobody looks."""

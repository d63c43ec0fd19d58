"""The call of a user's message function, with its two usual slips told in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from unisono.errors import PartitionError

Message = Callable[[Tensor, Tensor, Any], Tensor]
"""`message(x_src, x_dst, edge_attr) -> [E', ...]`."""
_HINT = "def message(x_src, x_dst, edge_attr): return x_src  # [E', ...], a row for each edge"


def messages(message: Message, x_src: Tensor, x_dst: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Return the messages of some edges, a row for each; local."""
    try:
        sent = message(x_src, x_dst, edge_attr)
    except TypeError as error:
        if _takes_three(message):
            raise
        raise PartitionError.because(
            "message_pass: message(x_src, x_dst, edge_attr)", str(error), None, _HINT
        ) from None
    if not isinstance(sent, Tensor) or sent.shape[:1] != x_src.shape[:1]:
        found = f"shape {list(sent.shape)}" if isinstance(sent, Tensor) else repr(sent)
        raise PartitionError.because(
            "message_pass: what message(x_src, x_dst, edge_attr) returned",
            found,
            f"{x_src.shape[0]} edges need a tensor of {x_src.shape[0]} rows",
            _HINT,
        )
    return sent


def _takes_three(message: Message) -> bool:
    try:
        inspect.signature(message).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # built-in functions need not tell
        return True
    return True

"""What the engine asks of outputs: which tensors they hold, and which parameters they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        for field in dataclasses.fields(outputs):
            yield from tensors_in(getattr(outputs, field.name))


def reached_leaves(outputs: list[Tensor]) -> set[int]:
    """Return ids of the leaf tensors that a backward from `outputs` gives a gradient to."""
    reached = {id(x) for x in outputs if x.grad_fn is None}
    todo = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            reached.add(id(leaf))
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)
    return reached

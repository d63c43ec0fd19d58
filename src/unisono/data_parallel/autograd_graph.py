"""What the engine asks of outputs: which tensors they hold, and which parameters they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_OPAQUE = (nn.Module, type, ModuleType, FunctionType)
"""What no forward returns its result in."""


_OBJECTS = 4
"""How many ordinary objects, one inside the other, are looked into."""


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings, dataclasses and other objects."""
    return _tensors_in(outputs, _OBJECTS, set())


def _tensors_in(outputs: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
        return
    held: Iterable[Any] = ()
    if isinstance(outputs, Mapping):
        held = outputs.values()
    elif isinstance(outputs, list | tuple):
        held = outputs
    elif dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        held = [getattr(outputs, field.name) for field in dataclasses.fields(outputs)]
    elif (
        depth > 0
        and hasattr(outputs, "__dict__")
        and not isinstance(outputs, _OPAQUE)
        and id(outputs) not in seen
    ):
        seen.add(id(outputs))
        depth -= 1
        held = list(vars(outputs).values())
    for value in held:
        yield from _tensors_in(value, depth, seen)


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

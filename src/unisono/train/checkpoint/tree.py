"""State as a tree: dicts, lists and tuples, taken apart into its tensors and the rest. Pure.

Tensors are stored one by one, each under its path; the rest is a small plain value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

Path = tuple[Any, ...]
"""Keys and positions from the root of a tree to a leaf."""


def taken_apart(
    tree: Any, is_leaf: Callable[[Any], bool]
) -> tuple[Any, dict[str, tuple[Path, Any]]]:
    """Return the tree with None in place of its leaves, and the leaves by name, each with its path.

    >>> taken_apart({"lr": 0.1, "w": [1j]}, lambda value: isinstance(value, complex))
    ({'lr': 0.1, 'w': [None]}, {'w.0': (('w', 0), 1j)})
    """
    leaves: dict[str, tuple[Path, Any]] = {}

    def visit(node: Any, path: Path) -> Any:
        if is_leaf(node):
            name = ".".join(map(str, path))
            while name in leaves:  # {"a.b": x, "a": {"b": y}}
                name += "'"
            leaves[name] = (path, node)
            return None
        return _mapped(node, path, visit)

    return visit(tree, ()), leaves


def put_together(rest: Any, leaves: Mapping[Path, Any]) -> Any:
    """Return the tree that was taken apart, with these leaves.

    >>> put_together({"lr": 0.1, "w": [None]}, {("w", 0): 1j})
    {'lr': 0.1, 'w': [1j]}
    """

    def visit(node: Any, path: Path) -> Any:
        return leaves[path] if path in leaves else _mapped(node, path, visit)

    return visit(rest, ())


def _mapped(node: Any, path: Path, visit: Callable[[Any, Path], Any]) -> Any:
    # Exact types only: a Counter or a user's list is a value, and comes back as what it was.
    if type(node) in (dict, OrderedDict):
        return {key: visit(value, (*path, key)) for key, value in node.items()}
    if type(node) in (list, tuple):
        return type(node)(visit(value, (*path, i)) for i, value in enumerate(node))
    return node

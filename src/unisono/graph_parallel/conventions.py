"""The two meanings of a gradient, as an argument that has no default.

Who uses a gathered or summed tensor decides what its gradients on the ranks are: equal copies of
one gradient (R), or terms of a sum (P). Nothing in the data tells which; so it must be said.
"""

from __future__ import annotations

from typing import Any, Final

from unisono.errors import PartitionError


class _Missing:
    def __repr__(self) -> str:
        return "<not given>"


MISSING: Final[Any] = _Missing()
"""Stands for an argument that was left out."""

_MEANING = {
    "gather": {
        "slice": 'R: all ranks use the result alike (a loss of everything): grad="slice"',
        "sum": 'P: each rank uses it for its own nodes or edges (a layer): grad="sum"',
    },
    "reduce": {
        "identity": 'R: all ranks use the sum alike (an energy, a loss): grad="identity"',
        "sum": 'P: each rank uses it for its own share of the work: grad="sum"',
    },
}


def check_grad(grad: object, verb: str) -> str:
    """Return `grad` if `verb` ("gather" or "reduce") knows it, else explain the conventions."""
    meanings = _MEANING[verb]
    if isinstance(grad, str) and grad in meanings:
        return grad
    first, copies, terms = next(iter(meanings)), *meanings.values()
    raise PartitionError.because(
        f"{verb}(grad={grad!r})",
        "what the gradient means depends on who uses the result",
        f"{copies}\n{terms}",
        f'{verb}(x, grad="{first}") where a loss follows, grad="sum" inside a layer',
    )

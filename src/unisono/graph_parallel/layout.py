"""Debug tags: which tensors are replicated, sharded or partial, followed through torch functions.

Off, a region pays one test. Inside `layout_check()`, or in the whole run with `UNISONO_CHECK=1`, a
sum reduced twice or a gather of what is not in pieces raises `LayoutError` where it happens, and
values that must be equal on all ranks are compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm import Communicator
from unisono.comm.sites import call_site
from unisono.errors import LayoutError, UnisonoError
from unisono.graph_parallel.equality import difference_over_ranks
from unisono.graph_parallel.layout_rules import result_kind

Kind = Literal["replicated", "sharded", "partial"]
KINDS: tuple[Kind, ...] = ("replicated", "sharded", "partial")


@dataclass(frozen=True)
class Tag:
    """What is known of a tensor."""

    kind: Kind
    dim: int | None = None
    """Dim along which it is sharded, where that is known."""
    site: str = ""
    """Source line where it became so."""


class _Follower(TorchFunctionMode):
    """Passes tags from the arguments of torch functions to their results."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.tags:
            return out
        found = result_kind(func, args, kwargs, self.tags.get)
        if found is not None:
            kind, dim = found
            if kind == "clash":
                raise _clash(args, self.tags)
            for result in out if isinstance(out, tuple | list) else (out,):
                if isinstance(result, Tensor):
                    self.tags[result] = Tag(kind, dim, call_site())
        return out


_follower: _Follower | None = None


@contextmanager
def layout_check() -> Iterator[None]:
    """Follow tags and compare values inside. All ranks must enter it at the same place."""
    global _follower
    before = _follower
    with _Follower() as _follower:
        try:
            yield
        finally:
            _follower = before


def mark(x: Tensor, layout: Kind) -> Tensor:
    """Tag `x` by hand and return it; does nothing outside of `layout_check`."""
    if layout not in KINDS:
        raise LayoutError.because(
            f"mark(x, {layout!r})", f"layouts are {', '.join(KINDS)}", None, 'mark(x, "sharded")'
        )
    if _follower is not None:
        _follower.tags[x] = Tag(layout, None, call_site())
    return x


def layout_of(x: Tensor) -> Kind | None:
    """Return the tag of `x`; None when nothing is known."""
    tag = None if _follower is None else _follower.tags.get(x)
    return None if tag is None else tag.kind


def watched(
    verb: str,
    x: Tensor,
    move: Callable[[Tensor], Tensor],
    comm: Communicator,
    dim: int | None = None,
) -> Tensor:
    """Return `move(x)`; in debug mode refuse what `verb` cannot mean, and tag the result."""
    if _follower is None or torch.compiler.is_compiling():
        return move(x)
    tags, site = _follower.tags, call_site()
    tag = tags.get(x)
    _refuse(verb, tag)
    if verb in ("copy", "scatter"):
        _compare(x, comm, f"{verb} of a tensor that must be equal on all ranks", "reduce it first")
    with torch._C.DisableTorchFunction():
        out = move(x)
    if verb == "gather slice" and out.requires_grad:
        out.register_hook(lambda grad: _compare_slices(grad, comm, site))
    if verb in ("copy", "exchange"):
        if tag is not None:
            tags[out] = tag
    elif verb in ("scatter", "reduce_scatter"):
        tags[out] = Tag("sharded", (dim or 0) % max(out.dim(), 1), site)
    else:
        tags[out] = Tag("replicated", None, site)
    return out


def tagged(x: Tensor, kind: Kind, dim: int | None = None) -> Tensor:
    """Tag a result of ours in debug mode, and return it."""
    if _follower is not None and not torch.compiler.is_compiling():
        _follower.tags[x] = Tag(kind, dim, call_site())
    return x


def start_from_environment() -> None:
    """Follow tags for the whole run if `UNISONO_CHECK=1`."""
    global _follower
    if os.environ.get("UNISONO_CHECK", "") not in ("", "0") and _follower is None:
        _follower = _Follower()
        _follower.__enter__()


_WRONG: dict[str, dict[str, str]] = {
    "reduce": {
        "replicated": "it is the same on all ranks already: reduced twice?",
        "sharded": "each rank holds other rows, which do not add up: gather, or sum the rows first",
    },
    "gather": {"replicated": "every rank holds all of it already"},
    "scatter": {"sharded": "it is in pieces already"},
}


def _refuse(verb: str, tag: Tag | None) -> None:
    wrong = _WRONG.get(verb.split()[0], {}).get("" if tag is None else tag.kind)
    if tag is not None and wrong is not None:
        raise LayoutError.because(
            f"{verb.split()[0]} of a {tag.kind} tensor",
            f"{wrong}\nit became {tag.kind} at {tag.site}",
            None,
            f"leave this {verb.split()[0]} out, or say what the tensor is: mark(x, 'partial')",
        )


def _clash(args: tuple[Any, ...], tags: WeakTensorKeyDictionary) -> UnisonoError:
    found = [tags.get(arg) for arg in args if isinstance(arg, Tensor)]
    return LayoutError.because(
        "sum of a partial and a replicated tensor",
        "; ".join(f"{tag.kind} since {tag.site}" for tag in found if tag is not None),
        "the replicated term would be counted once for each rank",
        'reduce(x, grad="identity") the partial one first',
    )


def _compare(x: Tensor, comm: Communicator, asked: str, hint: str) -> None:
    """Raise on all ranks unless they hold the same values."""
    found = difference_over_ranks(x, comm)
    if found is not None:
        raise LayoutError.because(asked, found, None, hint)


def _compare_slices(grad: Tensor, comm: Communicator, site: str) -> None:
    _compare(
        grad,
        comm,
        f'the gradient of gather(grad="slice") at {site}: it must be equal on all ranks',
        'grad="sum", where each rank uses the result for its own nodes or edges',
    )


start_from_environment()

"""Debug tags: which tensors are replicated, sharded or partial, followed through torch functions.

Off, a region pays one test. Inside `layout_check()`, or in the whole run with `UNISONO_CHECK=1`, a
sum reduced twice or a gather of what is not in pieces raises `LayoutError` where it happens, and
values that must be equal on all ranks are compared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from unisono.comm import Communicator, arguments
from unisono.comm.call import call_site
from unisono.errors import LayoutError, UnisonoError, an
from unisono.graph_parallel.equality import difference_over_ranks
from unisono.graph_parallel.layout_rules import result_kind, tensors_in, writes_first

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


_PACKAGE = Path(__file__).resolve().parents[1]
_MOVERS = (
    f"{_PACKAGE / 'comm'}{os.sep}",
    f"{_PACKAGE / 'operators'}{os.sep}",
    f"{_PACKAGE / 'graph_parallel' / 'transfer.py'}",
)
"""Where tensors are made ready to travel: a copy made there does not stay what its source is."""
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"


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
        if getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
            for x in tensors_in((args, kwargs)):
                self.forget(x)
            return out
        if _is_for_travel():
            return out
        found = result_kind(func, args, kwargs, self.tags.get)
        if found is None:
            if args and isinstance(args[0], Tensor) and writes_first(getattr(func, "__name__", "")):
                self.forget(args[0])
        else:
            kind, dim = found
            if kind == "clash":
                raise _clash(args, self.tags)
            for result in out if isinstance(out, tuple | list) else (out,):
                if isinstance(result, Tensor):
                    self.tags[result] = Tag(kind, dim, call_site())
        return out

    def forget(self, x: Tensor) -> None:
        """Drop the tags of `x` and its views: a collective replaces their values."""
        is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
        for tensor in [t for t in self.tags if t is x or is_alias(t, x)]:
            self.tags.pop(tensor, None)


def _is_for_travel() -> bool:
    """Whether the torch function that the follower looks at was called by verbs or operators."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_MOVERS)


_follower: _Follower | None = None


def _follow_with(follower: _Follower | None) -> None:
    global _follower
    _follower = follower
    arguments.write_listener = None if follower is None else follower.forget


@contextmanager
def layout_check() -> Iterator[None]:
    """Follow tags and compare values inside. All ranks must enter it at the same place."""
    before = _follower
    with _Follower() as follower:
        _follow_with(follower)
        try:
            yield
        finally:
            _follow_with(before)


def is_following() -> bool:
    """Whether tags are followed now."""
    return _follower is not None


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
    if os.environ.get("UNISONO_CHECK", "") not in ("", "0") and _follower is None:
        _follow_with(_Follower().__enter__())


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
            f"{verb.split()[0]} of {an(tag.kind)} tensor",
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

"""Debug tags: which tensors are replicated, sharded or partial, followed through torch functions.

Off, a region pays one test. Inside `layout_check()`, or in the whole run with `UNISONO_CHECK=1`, a
sum reduced twice or a gather of what is not in pieces raises `LayoutError` where it happens, and
values that must be equal on all ranks are compared. Rules are cautious: what they do not know is
"unknown", and unknown never raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from unisono import torch_private as private
from unisono.comm import Communicator, arguments
from unisono.comm.call import call_site
from unisono.errors import LayoutError, an
from unisono.expect import expect_choice

Kind = Literal["replicated", "sharded", "partial"]
KINDS: tuple[Kind, ...] = ("replicated", "sharded", "partial")
Known = Literal["replicated", "sharded", "partial", "unsure"]
"""What a tag says; "unsure": replicated, if all ranks brought the same numbers. Values tell."""

TOLERANCE = 1e-6
"""Largest difference between ranks that passes, relative to the largest value."""


@dataclass(frozen=True)
class Tag:
    """What is known of a tensor."""

    kind: Known
    dim: int | None = None
    """Dim along which it is sharded, where that is known."""
    site: str = ""
    """Source line where it became so."""
    is_summed: bool = False
    """Whether gradients of all ranks are summed on the way back."""


class _Follower(TorchFunctionMode):
    """Passes tags from the arguments of torch functions to their results."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.entered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Replicated tensors that went into `copy` or `scatter`: their gradients are whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.autograd.grad, Tensor.backward, torch.autograd.backward):
            _refuse_summed(tensors_in(args[:1]), self.tags)
        out = func(*args, **kwargs)
        if func is torch.autograd.grad:
            self._tag_gradients(args[1], out)
        if not self.tags:
            return out
        if getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
            for x in tensors_in((args, kwargs)):
                self.forget(x)
            return out
        name = getattr(func, "__name__", "")
        tensors = list(tensors_in((args, kwargs)))
        tags = [self.tags.get(x) for x in tensors]
        found = result_kind(name, tensors, tags, args, kwargs)
        is_written = bool(args) and isinstance(args[0], Tensor) and writes_first(name)
        if is_written and (found is None or found[0] == "unsure"):
            self.forget(args[0])
        if found is not None:
            kind, dim = found
            is_summed = kind == "replicated" and any(tag.is_summed for tag in tags if tag)
            for result in tensors_in(out):
                self.tags[result] = Tag(kind, dim, call_site(), is_summed)
        return out

    def _tag_gradients(self, inputs: Any, gradients: Any) -> None:
        """Note what gradients are: rows of own rows; alike, where the way back sums them."""
        for x, gradient in zip(tensors_in((inputs,)), gradients, strict=False):
            tag = self.tags.get(x)
            if not isinstance(gradient, Tensor):
                continue
            if x in self.entered:
                self.tags[gradient] = Tag("unsure", None, call_site())
            elif tag is not None and tag.kind == "sharded":
                self.tags[gradient] = Tag("sharded", tag.dim, call_site())

    def forget(self, x: Tensor) -> None:
        """Drop the tags of `x` and its views: a collective replaces their values."""
        for tensor in [t for t in self.tags if t is x or private.is_alias_of(t, x)]:
            self.tags.pop(tensor, None)


follower: _Follower | None = None
"""Who follows tags now."""


def _follow_with(new: _Follower | None) -> None:
    global follower
    follower = new
    arguments.write_listener = None if new is None else new.forget


@contextmanager
def layout_check() -> Iterator[None]:
    """Follow tags and compare values inside. All ranks must enter it at the same place."""
    before = follower
    with _Follower() as new:
        _follow_with(new)
        try:
            yield
        finally:
            _follow_with(before)


def is_following() -> bool:
    """Whether tags are followed now."""
    return follower is not None and not torch.compiler.is_compiling()


def mark(x: Tensor, layout: Kind) -> Tensor:
    """Tag `x` by hand and return it; does nothing outside of `layout_check`."""
    expect_choice("layout", layout, KINDS, error=LayoutError)
    return tagged(x, layout)


def tagged(x: Tensor, kind: Kind, dim: int | None = None, *, is_summed: bool = False) -> Tensor:
    """Tag a tensor in debug mode, and return it."""
    if follower is not None and is_following():
        follower.tags[x] = Tag(kind, dim, call_site(), is_summed)
    return x


def layout_of(x: Tensor) -> Kind | None:
    """Return the tag of `x`; None when nothing is known."""
    tag = None if follower is None else follower.tags.get(x)
    return None if tag is None or tag.kind == "unsure" else tag.kind


def watched(
    verb: str,
    x: Tensor,
    move: Callable[..., Tensor],
    *args: Any,
    comm: Communicator,
    dim: int | None = None,
) -> Tensor:
    """Return `move(x, *args, comm=comm)`, in debug mode.

    What `verb` cannot mean is refused, and the result is tagged.
    """
    if follower is None or not is_following():
        return move(x, *args, comm=comm)
    tags, site = follower.tags, call_site()
    tag = tags.get(x)
    _refuse(verb, tag, x, comm)
    if verb in ("copy", "scatter"):
        _compare(x, comm, f"{verb} of a tensor that must be equal on all ranks", "reduce it first")
        follower.entered[x] = True
    with private.no_torch_function():
        out = move(x, *args, comm=comm)
    if verb == "gather slice" and out.requires_grad:
        asked = f'the gradient of gather(grad="slice") at {site}: it must be equal on all ranks'
        hint = 'grad="sum", where each rank uses the result for its own nodes or edges'
        out.register_hook(lambda grad: _compare(grad, comm, asked, hint))
    if verb in ("copy", "exchange"):
        if tag is not None:
            tags[out] = tag
    elif verb in ("scatter", "reduce_scatter"):
        tags[out] = Tag("sharded", (dim or 0) % max(out.dim(), 1), site)
    else:
        tags[out] = Tag("replicated", None, site, is_summed=verb.endswith(" sum"))
    return out


_WRONG: dict[str, dict[str, str]] = {
    "reduce": {
        "replicated": "it is the same on all ranks already: reduced twice?",
        "sharded": "each rank holds other rows, which do not add up: gather, or sum the rows first",
    },
    "gather": {"replicated": "every rank holds all of it already"},
    "scatter": {"sharded": "it is in pieces already"},
}


def _refuse(verb: str, tag: Tag | None, x: Tensor, comm: Communicator) -> None:
    if tag is None:
        return
    region, kind = verb.split()[0], tag.kind
    if kind == "unsure":
        is_one = comm.size == 1 or region != "reduce"
        is_same = not is_one and difference_over_ranks(x, comm) is None and bool(x.any())
        kind = "replicated" if is_same else kind
    wrong = _WRONG.get(region, {}).get(kind)
    if wrong is not None:
        raise LayoutError.because(
            f"{region} of {an(kind)} tensor",
            f"{wrong}\nit became {kind} at {tag.site}",
            None,
            f"leave this {region} out, or say what the tensor is: mark(x, 'partial')",
        )


def _refuse_summed(outputs: Iterator[Tensor], tags: WeakTensorKeyDictionary) -> None:
    """Raise if each rank would differentiate its own copy of one sum, and all be added up."""
    for x in outputs:
        tag = tags.get(x)
        if tag is not None and tag.kind == "replicated" and tag.is_summed:
            raise LayoutError.because(
                "the gradient of a replicated tensor",
                f'it became replicated at {tag.site}, of a sum or gather with grad="sum"',
                "each rank differentiates it, and all are added up: too large by their number",
                'grad="identity" (of a gather: "slice"), or the gradient of the own term alone',
            )


def _compare(x: Tensor, comm: Communicator, asked: str, hint: str) -> None:
    """Raise on all ranks unless they hold the same values."""
    found = difference_over_ranks(x, comm)
    if found is not None:
        raise LayoutError.because(asked, found, None, hint)


def difference_over_ranks(x: Tensor, comm: Communicator) -> str | None:
    """Return in words how far the ranks' tensors are apart, None if they are equal. Collective.

    The same answer on every rank.
    """
    if comm.size == 1 or x.numel() == 0:
        return None
    with private.no_torch_function(), torch.no_grad():
        values = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
        values = values.double()
        # A difference of two infinities, or with nan, is no number: compare their kinds.
        kinds = values.isposinf() + 2 * values.isneginf() + 3 * values.isnan()
        sent = torch.stack([torch.where(kinds == 0, values, 0.0), kinds.double()])
        highest, lowest = comm.all_reduce(sent, "max"), comm.all_reduce(sent, "min")
        apart = float((highest[0] - lowest[0]).max())
        scale = float(torch.maximum(highest[0].abs(), lowest[0].abs()).max())
        odd = int((highest[1] != lowest[1]).sum())
    if odd:
        return f"{odd} of {values.numel()} values are nan or infinite on some ranks only"
    if apart <= TOLERANCE * scale:
        return None
    return f"values differ by {apart:.3g}, the largest is {scale:.3g}"


# -- how a torch function turns the tags of its arguments into that of its result -----------------


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ADD = _names("add sub __add__ __radd__ __sub__ __rsub__ __iadd__ add_")
_TIMES = _names("mul div __mul__ __rmul__ __truediv__ true_divide mul_ div_")
_NEGATE = _names("neg __neg__")
_SAME_SHAPE = _ADD | _TIMES | _NEGATE | _names("clone contiguous")
_LINEAR = _NEGATE | _names(
    "view reshape squeeze unsqueeze flatten clone view_as contiguous t to double float sum"
)
_SCATTERS = _names("index_add index_add_ scatter_add scatter_add_")
_SELECTS = _names(
    "__getitem__ narrow select split chunk split_with_sizes tensor_split index_select gather take "
    "masked_select unbind roll pad unfold hsplit vsplit dsplit unsafe_split unsafe_chunk "
    "narrow_copy as_strided diagonal diag tril triu take_along_dim select_scatter slice_scatter "
    "diagonal_scatter masked_fill masked_fill_ masked_scatter index_fill __setitem__"
)
"""Each rank may select something else of what all hold alike."""
_NUMBERED = _ADD | _TIMES | _names("pow __pow__ __rpow__ pow_ __imul__ __itruediv__ fill_ __isub__")
"""Each rank may bring another number, such as 1 on one rank and 0 on the others."""
_CONSTANT = _names(
    "zeros_like ones_like empty_like new_zeros new_ones new_empty new_tensor full_like new_full "
    "randn_like rand_like dim size stride backward __get__ __set__ requires_grad_ register_hook "
    "detach_"
)
_FORGOTTEN = _CONSTANT | {"grad"}
"""Without a tag; each rank's gradients are the terms of its own share of the work."""


def result_kind(
    name: str, tensors: Sequence[Tensor], tags: Sequence[Tag | None], args: Any, kwargs: Any
) -> tuple[Known, int | None] | None:
    """Return what the result of a torch function is and its sharded dim, None for unknown.

    Args:
        name: of the function.
        tensors: all among its arguments.
        tags: theirs.
        args: of the call.
        kwargs: of the call.
    """
    if name in _FORGOTTEN or not any(tags):
        return None
    if name in _SCATTERS:
        source = tags[-1]
        return ("partial", None) if source is not None and source.kind == "sharded" else None
    kinds = {
        tag.kind if tag else "replicated" if isinstance(x, torch.nn.Parameter) else "unknown"
        for x, tag in zip(tensors, tags, strict=True)
    }
    with_number = any(isinstance(arg, int | float | complex) for arg in (*args, *kwargs.values()))
    if "partial" in kinds:
        known = [tag for tag in tags if tag is not None]
        return ("partial", None) if _is_partial(name, kinds, known, with_number) else None
    if "unknown" in kinds:
        return None
    if "sharded" not in kinds:
        if name in _SELECTS:
            return None
        is_unsure = "unsure" in kinds or (name in _NUMBERED and with_number)
        return ("unsure" if is_unsure else "replicated", None)
    if name == "detach":  # so begins every verb, whose result is in pieces no longer
        return None
    sharded = next(tag for tag in tags if tag is not None and tag.kind == "sharded")
    if name == "sum":
        return _of_sharded_sum(sharded, tensors[0].dim(), args, kwargs)
    return ("sharded", sharded.dim if name in _SAME_SHAPE else None)


def _is_partial(name: str, kinds: set[str], tags: list[Tag], with_number: bool) -> bool:
    """Return whether the result of partial arguments is a summand on each rank, too."""
    if name in _ADD:
        if with_number:  # which each rank adds
            return False
        if any(tag.kind == "replicated" for tag in tags):
            raise LayoutError.because(
                "sum of a partial and a replicated tensor",
                "; ".join(f"{tag.kind} since {tag.site}" for tag in tags),
                "the replicated term would be counted once for each rank",
                'reduce(x, grad="identity") the partial one first',
            )
        return kinds == {"partial"}
    if name in _TIMES:
        once = sum(tag.kind == "partial" for tag in tags) == 1
        return once and kinds <= {"partial", "replicated"}
    return name in _LINEAR and kinds == {"partial"}


def _of_sharded_sum(
    tag: Tag, dims: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Known, int | None] | None:
    summed = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if summed is None:
        return ("partial", None)
    if tag.dim is None:
        return None
    gone = {d % dims for d in ((summed,) if isinstance(summed, int) else summed)}
    if tag.dim in gone:
        return ("partial", None)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return ("sharded", tag.dim if keeps else tag.dim - sum(d < tag.dim for d in gone))


def writes_first(name: str) -> bool:
    """Whether the function of this name replaces values of its first argument."""
    if name in _CONSTANT:
        return False
    is_augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return name == "__setitem__" or is_augmented or (name[-1:] == "_" and name[-2:] != "__")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors among arguments, those in lists and dictionaries too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def start_from_environment() -> None:
    """Follow tags for the whole run if `UNISONO_CHECK=1`."""
    if os.environ.get("UNISONO_CHECK", "") not in ("", "0") and follower is None:
        _follow_with(_Follower().__enter__())


start_from_environment()

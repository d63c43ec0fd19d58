"""One call of a torch function in a forward that is followed, and why it may be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Cut = frozenset[int]
"""The dims of a tensor of which ranks hold different parts; none: it is whole on every rank."""
WHOLE: Cut = frozenset()
cuts = WeakTensorKeyDictionary()
"""What is known of tensors, for as long as they live: a cell may keep its state between calls."""


def cut_of(x: Tensor) -> Cut:
    """Return the split dims of a tensor; of one that nobody has seen, none."""
    return cuts.get(x) or WHOLE


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, those in lists and dictionaries too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


class Refusing(Protocol):
    """Somebody who can say where a call stands."""

    def refuse(self, asked: str, found: str, hint: str) -> NoReturn:
        """Raise."""
        ...


def check_known(by: Refusing, x: Tensor) -> None:
    """Refuse a tensor that came by a way on which nobody could look."""
    if x.grad_fn is None:
        return
    if x.grad_fn.name() == "CheckpointFunctionBackward":
        by.refuse(
            "checkpoint(..., use_reentrant=True)",
            "its backward runs functions again outside of this forward, where gradients of "
            "parameters do not meet",
            "use_reentrant=False",
        )
    if x not in cuts:
        by.refuse(
            f"a tensor {list(x.shape)}",
            "it came neither from torch functions of this forward nor by its arguments: nobody "
            "knows whether it is split",
            "hand it to forward as an argument; plain Python instead of torch.jit.script",
        )


class Call:
    """One call of a torch function."""

    def __init__(self, by: Refusing, func: Any, name: str, args: Any, kwargs: Any) -> None:
        self.by, self.func, self.name = by, func, name
        self.args, self.kwargs = args, kwargs
        self.tensors = list(tensors_in((args, kwargs)))
        self.is_split = any(cut_of(x) for x in self.tensors)

    @property
    def x(self) -> Tensor:
        """The tensor that the function is about: its first argument."""
        first = self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("self"))
        return first if isinstance(first, Tensor) else self.refuse_unknown()

    def given(self, place: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its place or by one of its names."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def several(self, *names: str) -> tuple[int, ...]:
        """Return numbers that stand by themselves or in one tuple, behind the tensor."""
        named = next((self.kwargs[name] for name in names if name in self.kwargs), ())
        found: tuple[Any, ...] = self.args[1:] or (named,)
        return tuple(found[0]) if isinstance(found[0], tuple | list) else found

    def check(self) -> None:
        """Refuse arguments that nobody knows, and draws that ranks would not share."""
        for x in self.tensors:
            check_known(self.by, x)
            is_trained = isinstance(x, nn.Parameter) and x.requires_grad
            if is_trained and x not in cuts and torch.is_grad_enabled():
                self.refuse(
                    f"with a parameter {list(x.shape)} of another module, whose gradient would "
                    "be that of own points alone",
                    "a parameter of this module, or a call of the module that owns it",
                )
        if _is_drawn(self):
            self.refuse(
                "draws on each rank numbers of its own, those of one process on none",
                "a child nn.Dropout, nn.Dropout2d; or generator=, seeded alike on all ranks",
            )

    def check_along(self, dims: Any, x: Tensor | None = None) -> tuple[int, ...]:
        """Refuse split dims among those that the function looks along; None: all."""
        x = self.x if x is None else x
        if dims is None or isinstance(dims, bool) or dims in ((), []):
            every = tuple(range(x.dim()))
        else:
            every = tuple(d % max(x.dim(), 1) for d in ((dims,) if isinstance(dims, int) else dims))
        for d in sorted(cut_of(x)):
            if d in every:
                self.refuse_dim(x, d)
        return every

    def refuse_dim(self, x: Tensor, dim: int) -> NoReturn:
        """Refuse to look along a split dim."""
        self.refuse(
            f"looks along dim {dim} of own blocks {list(x.shape)}, which is split over ranks",
            hint_for(self.name),
        )

    def refuse_unknown(self) -> NoReturn:
        """Refuse a function of which nothing is known."""
        x = next(x for x in self.tensors if cut_of(x))
        dims = ", ".join(map(str, sorted(cut_of(x))))
        self.refuse(
            f"may look along dim {dims} of own blocks {list(x.shape)}, split over ranks",
            hint_for(self.name),
        )

    def refuse(self, found: str, hint: str) -> NoReturn:
        """Refuse this call."""
        self.by.refuse(self.name, f"{self.name} {found}", hint)


_LAYER_HINT = "a layer of torch as a child, or a layer of your own on unisono.nn.Module"
HINTS = {
    "mean": "nn.AdaptiveAvgPool2d(1), in an nn.Sequential",
    "adaptive_avg_pool": "nn.AdaptiveAvgPool2d(1), in an nn.Sequential",
    "interpolate": "a child nn.Upsample(size=...) or nn.Upsample(scale_factor=...)",
    "upsample": "a child nn.Upsample(size=...) or nn.Upsample(scale_factor=...)",
    "conv": "a child nn.Conv2d (nn.ConvTranspose2d), which owns its weight",
    "max_pool": "a child nn.MaxPool2d",
    "avg_pool": "a child nn.AvgPool2d",
    "batch_norm": "a child nn.BatchNorm2d",
    "instance_norm": "a child nn.InstanceNorm2d",
    "group_norm": "a child nn.GroupNorm",
    "layer_norm": "a child nn.LayerNorm",
    "pad": "a child nn.ZeroPad2d, or another padding layer",
    "__getitem__": "crop with a child nn.ZeroPad2d((0, 0, 0, -1)), or nn.Upsample(size=...)",
    "narrow": "crop with a child nn.ZeroPad2d((0, 0, 0, -1)), or nn.Upsample(size=...)",
    "flatten": "nn.Flatten in an nn.Sequential: whole samples go on from there",
}


def hint_for(name: str) -> str:
    """Return what to write instead of a function."""
    return next((hint for word, hint in HINTS.items() if name.startswith(word)), _LAYER_HINT)


def _is_drawn(call: Call) -> bool:
    """Whether the call draws from torch's default generators."""
    if "dropout" in call.name:
        return bool(call.given(2, "training", "train", default=True))
    if call.name == "scaled_dot_product_attention":
        return bool(call.given(4, "dropout_p", default=0.0))
    return call.name in _RANDOM and call.kwargs.get("generator") is None


def names_in(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


_RANDOM = frozenset(
    names_in("""
        rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ normal
        normal_ uniform_ exponential_ log_normal_ geometric_ cauchy_ random_ multinomial poisson
        gumbel_softmax
    """)
)

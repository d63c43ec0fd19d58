"""What a torch function does to split dims: where they go, or that it may look along one.

Each function that is known has a rule, by its name; whatever is not known is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
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


def followed(by: Refusing, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function, and note the split dims of what it returns.

    Raises:
        PartitionError: the function may look along a split dim.
    """
    name = _name(func)
    if name in _QUESTIONS:
        return func(*args, **kwargs)
    call = Call(by, func, name, args, kwargs)
    call.check()
    found = _rule(name)(call) if call.is_split else _whole
    out = func(*args, **kwargs)
    for x in tensors_in(out):
        cuts[x] = found(x)
    return out


def _whole(_: Tensor) -> Cut:
    return WHOLE


def _name(func: Any) -> str:
    """Return the name of a torch function: of an attribute that is read, of an operator."""
    name = getattr(func, "__name__", "") or ""
    if name in ("__get__", "__set__"):
        return f"{name} {getattr(getattr(func, '__self__', None), '__name__', '')}"
    return name.split(".")[0]  # relu.default


Rule = Callable[[Call], Callable[[Tensor], Cut]]
"""From a call to the split dims of each tensor that it returns; refuses what may be wrong."""


def _together(call: Call, tensors: Sequence[Tensor], *, spreads: bool = True) -> Cut:
    """Return the split dims of tensors that meet point by point, aligned at their last dims."""
    dims = max(x.dim() for x in tensors)
    split = {d + dims - x.dim() for x in tensors for d in cut_of(x)}
    for d in sorted(split):
        sizes = set[int]()
        for x in tensors:
            at = d - dims + x.dim()
            if at in cut_of(x):
                sizes.add(x.shape[at])
            elif at >= 0 and not (spreads and x.shape[at] == 1):
                call.refuse(
                    f"meets dim {d}, which is split over ranks, with a tensor {list(x.shape)} that "
                    "was not made from split ones: it would stand for other places on each rank",
                    "make it from the input, such as torch.zeros_like(x); positions: a channel of "
                    "the input",
                )
        if len(sizes) > 1:
            at = " and ".join(map(str, sorted(sizes)))
            call.refuse(
                f"meets own blocks of {at} points in dim {d}, which is split over ranks",
                HINTS["__getitem__"],
            )
    return frozenset(split)


def _pointwise(call: Call) -> Callable[[Tensor], Cut]:
    if call.kwargs.get("out") is not None:
        call.refuse_unknown()
    split = _together(call, call.tensors)
    return lambda _: split


def _same(call: Call) -> Callable[[Tensor], Cut]:
    cut = cut_of(call.x)
    return lambda out: cut if out.dim() == call.x.dim() else call.refuse_unknown()


def _along(place: int, default: Any = None) -> Rule:
    """Return the rule of a function with a `dim` or `dims` that it looks along."""

    def rule(call: Call) -> Callable[[Tensor], Cut]:
        # torch.max(a, b) is no reduction
        if any(isinstance(x, Tensor) for x in (*call.args[1:], call.kwargs.get("other"))):
            return _pointwise(call) if call.name in ("max", "min") else call.refuse_unknown()
        x = call.x
        every = call.check_along(call.given(place, "dim", "axis", "dims", default=default))
        kept = {d: d - sum(gone < d for gone in every) for d in cut_of(x)}
        return lambda out: cut_of(x) if out.dim() == x.dim() else frozenset(kept.values())

    return rule


_MARK = 1009
"""Stride of a split dim 0 in a probe; no small multiple of one is another."""


def _moved(call: Call) -> Callable[[Tensor], Cut]:
    """Find split dims behind a view by their strides in a probe without data."""
    x, cut = call.x, cut_of(call.x)
    if any(cut_of(y) for y in call.tensors if y is not x):
        call.refuse_unknown()
    # as long as no number among the arguments reaches: what is done must not depend on it
    long = 7 + 2 * max(map(abs, [*x.shape, *_numbers((call.args[1:], call.kwargs))]))
    sizes = [long if d in cut else n for d, n in enumerate(x.shape)]
    marks = [_MARK + d if d in cut else 0 for d in range(x.dim())]
    probe = torch.empty_strided(sizes, marks, device="meta")
    rest = call.args[1:]
    if call.name == "__getitem__":
        rest = (_basic(call, rest[0]),)
    elif call.name == "squeeze":  # of a block of one point on some rank
        call.check_along(call.given(1, "dim"))
    try:
        results = list(tensors_in(call.func(probe, *rest, **call.kwargs)))
    except (RuntimeError, IndexError, TypeError):  # torch says it better, of the tensor itself
        return lambda _: call.refuse_unknown()
    found: list[Cut] = []
    for y in results:
        at = {d: y.stride(d) for d in range(y.dim()) if y.stride(d) in marks and y.stride(d)}
        whole = all(y.shape[d] == long for d in at) and not y.storage_offset()
        if sorted(at.values()) != sorted(m for m in marks if m) or not whole:
            lost = set(marks) - {at[d] for d in at if y.shape[d] == long} - {0}
            call.refuse_dim(x, min((marks.index(m) for m in lost), default=min(cut)))
        found.append(frozenset(at))
    places = iter(found)
    dims = iter(y.dim() for y in results)

    def placed(out: Tensor) -> Cut:
        return next(places) if next(dims, -1) == out.dim() else call.refuse_unknown()

    return placed


def _numbers(value: Any) -> Iterator[int]:
    """Yield the whole numbers among arguments."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, slice):
        yield from _numbers((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(tuple(value.values()))


def _basic(call: Call, index: Any) -> Any:
    """Return an index with slices in place of one list or vector of numbers, in an unsplit dim."""
    items = list(index) if isinstance(index, tuple) else [index]
    lists = [i for i, item in enumerate(items) if isinstance(item, Tensor | list)]
    if not lists:
        return index
    used = sum(item is not None and item is not Ellipsis for item in items)
    at = lists[0]
    chosen = torch.as_tensor(items[at])
    if len(lists) > 1 or chosen.dim() != 1 or chosen.dtype == torch.bool:
        call.refuse_unknown()
    before = sum(item is not None and item is not Ellipsis for item in items[:at])
    is_behind = any(item is Ellipsis for item in items[:at])
    call.check_along(before + (call.x.dim() - used if is_behind else 0))
    items[at] = slice(None)
    return tuple(items)


def _written(call: Call) -> Callable[[Tensor], Cut]:
    """`x[index] = value`: the value must fit the part of `x` that it replaces."""
    x, index, value = call.args
    part = torch.Tensor.__getitem__(x, index)
    if cut_of(x):
        read = Call(call.by, torch.Tensor.__getitem__, "__getitem__", (x, index), {})
        cuts[part] = _moved(read)(part)
    if isinstance(value, Tensor):
        meeting = _together(call, [part, value])
        if meeting != cut_of(part):
            call.refuse_unknown()
    return lambda _: WHOLE


def _reshaped(call: Call) -> Callable[[Tensor], Cut]:
    """A split dim stays a dim of its own, with the same elements before and behind it."""
    x = call.x

    def found(out: Tensor) -> Cut:
        places: set[int] = set()
        for d in cut_of(x):
            before, behind = math.prod(x.shape[:d]), math.prod(x.shape[d + 1 :])
            for at in range(out.dim()):
                ahead, after = math.prod(out.shape[:at]), math.prod(out.shape[at + 1 :])
                if (out.shape[at], ahead, after) == (x.shape[d], before, behind):
                    places.add(at)
                    break
            else:
                call.refuse(
                    f"{list(x.shape)} -> {list(out.shape)} joins dim {d} with others or cuts it, "
                    "and that dim is split over ranks",
                    hint_for("flatten"),
                )
        return frozenset(places)

    return found


def _expanded(call: Call) -> Callable[[Tensor], Cut]:
    x = call.x

    def found(out: Tensor) -> Cut:
        more = out.dim() - x.dim()
        for d in cut_of(x):
            if out.shape[d + more] != x.shape[d]:
                call.refuse_dim(x, d)
        return frozenset(d + more for d in cut_of(x))

    return found


def _repeated(call: Call) -> Callable[[Tensor], Cut]:
    x, times = call.x, call.several("repeats", "dims")
    more = max(0, len(times) - x.dim())
    for d in cut_of(x):
        if times[d + more] != 1:
            call.refuse_dim(x, d)
    return lambda _: frozenset(d + more for d in cut_of(x))


def _flipped(call: Call) -> Callable[[Tensor], Cut]:
    call.check_along(call.several("dims"))
    return lambda _: cut_of(call.x)


def _joined(call: Call) -> Callable[[Tensor], Cut]:
    """`cat` along an unsplit dim, `stack` along a new one."""
    parts = list(tensors_in(call.given(0, "tensors")))
    cut = _together(call, parts, spreads=False)
    dim = call.given(1, "dim", "axis", default=0)
    is_new = call.name == "stack"
    at = dim % (parts[0].dim() + is_new)
    if is_new:
        return lambda _: frozenset(d + (d >= at) for d in cut)
    if at in cut:
        call.refuse_dim(parts[0], at)
    return lambda _: cut


def _linear(call: Call) -> Callable[[Tensor], Cut]:
    x = call.x
    call.check_along(-1)
    if any(cut_of(y) for y in call.tensors if y is not x):
        call.refuse_unknown()
    return lambda _: cut_of(x)


def _product(call: Call) -> Callable[[Tensor], Cut]:
    """A matrix product: not over a split dim, and not of all own points with all others."""
    a, b = (x for x in call.tensors[:2])
    if call.name == "__rmatmul__":
        a, b = b, a
    if len(call.tensors) != 2 or min(a.dim(), b.dim()) < 2:
        call.refuse_unknown()
    call.check_along(-1, a)
    call.check_along(-2, b)
    rows, columns = a.dim() - 2 in cut_of(a), b.dim() - 1 in cut_of(b)
    if rows and columns:
        call.refuse_dim(b, b.dim() - 1)
    dims = max(a.dim(), b.dim())
    outer = [(x, {d for d in cut_of(x) if d < x.dim() - 2}) for x in (a, b)]
    split = {d + dims - x.dim() for x, own in outer for d in own}
    for d in sorted(split):
        for x, own in outer:
            at = d - dims + x.dim()
            if at >= 0 and at not in own and x.shape[at] != 1:
                call.refuse_unknown()
    split |= {dims - 2} if rows else set()
    split |= {dims - 1} if columns else set()
    return lambda _: frozenset(split)


def _einsum(call: Call) -> Callable[[Tensor], Cut]:
    """Letters that are split must stay, and be those of every tensor that is split."""
    text = call.given(0, "equation")
    parts = list(tensors_in((call.args[1:], call.kwargs)))
    if not isinstance(text, str) or "->" not in text or "." in text:
        call.refuse_unknown()
    left, after = (side.strip() for side in text.replace(" ", "").split("->"))
    letters = left.split(",")
    split = [
        {names[d] for d in cut_of(x)} for names, x in zip(letters, parts, strict=True) if cut_of(x)
    ]
    every = set[str]().union(*split)
    for names, x in zip(letters, parts, strict=True):
        mine = {names[d] for d in cut_of(x)}
        if (
            len(set(names)) < len(names)
            or every & set(names) - mine
            or (mine and mine != every)
            or every - set(after)
        ):
            call.refuse_unknown()
    return lambda _: frozenset(after.index(letter) for letter in every)


def _per_sample(call: Call) -> Callable[[Tensor], Cut]:
    """What keeps samples (dim 0) apart and looks at everything else."""
    x, kind = call.x, re.search(r"conv.*(\d)d", call.name)
    is_sample = kind is not None and x.dim() != int(kind[1]) + 2  # dim 0 is then the channels
    is_sample |= call.name == "fold" and x.dim() != 3
    call.check_along(None if is_sample else range(1, x.dim()))
    if any(cut_of(y) for y in call.tensors if y is not x):
        call.refuse_unknown()
    return lambda _: frozenset({0})


def _attended(call: Call) -> Callable[[Tensor], Cut]:
    """Attention looks along the last two dims of each; the mask may be whole."""
    parts = [x for x in call.tensors if x.dim() > 2 or cut_of(x)]
    for x in parts:
        call.check_along([-2, -1], x)
    split = _together(call, parts)
    return lambda _: split


def _normed(call: Call) -> Callable[[Tensor], Cut]:
    shape = call.given(1, "normalized_shape")
    count = 1 if isinstance(shape, int) else len(shape)
    call.check_along([-1 - i for i in range(count)])
    return _same(call)


def _padded(call: Call) -> Callable[[Tensor], Cut]:
    widths = call.given(1, "pad")
    call.check_along([-1 - i // 2 for i, width in enumerate(widths) if width])
    return _same(call)


def _looked_up(call: Call) -> Callable[[Tensor], Cut]:
    """`embedding(index, table)`: points one by one, with a new last dim."""
    if any(cut_of(x) for x in call.tensors if x is not call.x):
        call.refuse_unknown()
    return lambda _: cut_of(call.x)


def _chosen(call: Call) -> Callable[[Tensor], Cut]:
    """`where(condition, a, b)`; with the condition alone it lists places."""
    return _pointwise(call) if len(call.args) + len(call.kwargs) > 1 else call.refuse_unknown()


def _unknown(call: Call) -> NoReturn:
    call.refuse_unknown()


_QUESTIONS = frozenset(
    names_in("""
        dim size numel nelement ndimension stride __len__ element_size storage_offset get_device
        is_floating_point is_complex is_signed is_contiguous requires_grad_ retain_grad
        register_hook __hash__ __repr__ __format__ is_same_size result_type _set_grad_enabled
    """)
    + ["__set__ requires_grad"]
    + [
        f"__get__ {name}"
        for name in names_in("""
        shape ndim dtype device layout requires_grad is_leaf grad_fn is_cuda is_cpu is_meta
        is_sparse is_quantized is_mps is_nested _version itemsize nbytes
    """)
    ]
)
"""Answered without values. Sizes are those of the own block."""
_OPERATORS = frozenset(
    names_in("""
        add sub mul div truediv floordiv mod pow and or xor lshift rshift neg pos abs invert eq ne
        lt le gt ge
    """)
)
"""As in `__add__`, `__radd__` and `__iadd__`."""
_ONE_BY_ONE = frozenset(
    names_in("""
        abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bfloat16
        bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_tensors ceil celu clamp clamp_max
        clamp_min clip clone complex conj conj_physical contiguous copy copysign cos cosh deg2rad
        detach digamma div divide double elu empty_like eq erf erfc erfinv exp exp2 expand_as
        expm1 fill floor floor_divide fmax fmin fmod frac full_like ge gelu greater greater_equal
        gt half hardshrink hardsigmoid hardswish hardtanh heaviside hypot isclose isfinite isinf
        isnan ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp
        logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt masked_fill
        maximum minimum mish mul multiply nan_to_num ne neg negative not_equal ones_like polar
        positive pow rad2deg real imag reciprocal relu relu6 remainder resolve_conj round rrelu
        rsqrt rsub selu sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink
        softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc xlogy
        zero zeros_like dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
    """)
)
"""Also in place: `add_`. Those of dropout are reached in `eval()` only."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(names_in("float int bool long type to type_as"), _same),
    "pixel_shuffle": lambda call: (call.check_along(-3), _same(call))[1],
    **dict.fromkeys(("__get__ data", "__get__ real", "__get__ imag"), _same),
    **dict.fromkeys(("view_as_real", "view_as_complex"), lambda call: lambda _: cut_of(call.x)),
    "where": _chosen,
    **dict.fromkeys(
        names_in("""
        sum mean nansum nanmean amax amin max min argmax argmin prod any all logsumexp softmax
        log_softmax softmin var std var_mean std_mean median cumsum cumprod logcumsumexp aminmax
        count_nonzero
    """),
        _along(1),
    ),
    **dict.fromkeys(("glu", "sort", "argsort"), _along(1, -1)),
    **dict.fromkeys(("norm", "linalg_vector_norm", "vector_norm", "roll"), _along(2)),
    **dict.fromkeys(("topk", "kthvalue"), _along(2, -1)),
    "repeat_interleave": _along(2),
    **{f"fft_{kind}": _along(2, -1) for kind in ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]},
    **{f"fft_{kind}2": _along(2, (-2, -1)) for kind in ["fft", "ifft", "rfft", "irfft"]},
    **{f"fft_{kind}n": _along(2) for kind in ["fft", "ifft", "rfft", "irfft"]},
    "normalize": _along(2, 1),
    **dict.fromkeys(
        names_in("""
        permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze select narrow
        unbind chunk split tensor_split split_with_sizes t adjoint __getitem__
    """),
        _moved,
    ),
    **dict.fromkeys(("__get__ T", "__get__ mT", "__get__ H", "__get__ mH"), _moved),
    "index_select": lambda call: (call.check_along(call.given(1, "dim")), _same(call))[1],
    **dict.fromkeys(
        ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as"), _reshaped
    ),
    **dict.fromkeys(("expand", "broadcast_to"), _expanded),
    **dict.fromkeys(("repeat", "tile"), _repeated),
    "flip": _flipped,
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _joined),
    "__setitem__": _written,
    "linear": _linear,
    **dict.fromkeys(("matmul", "bmm", "mm", "__matmul__", "__rmatmul__"), _product),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attended,
    "embedding": _looked_up,
    **dict.fromkeys(("layer_norm", "rms_norm"), _normed),
    "pad": _padded,
    **dict.fromkeys(
        names_in("""
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d interpolate
        max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d group_norm fold pixel_unshuffle
    """),
        _per_sample,
    ),
}


def _rule(name: str) -> Rule:
    """Return the rule of a torch function by its name, in place (`add_`, `__iadd__`) or not."""
    if name in _RULES:
        return _RULES[name]
    if name.startswith("__"):
        plain = name[2:-2]
        is_operator = plain in _OPERATORS or (plain[:1] in ("r", "i") and plain[1:] in _OPERATORS)
        return _pointwise if is_operator else _unknown
    return _pointwise if name.removesuffix("_") in _ONE_BY_ONE else _unknown

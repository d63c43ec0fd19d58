"""Rules for what happens point by point: queries, arithmetic with broadcasting, dropout, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.accelerator import is_accelerator
from unisono.errors import PartitionError, UnisonoError
from unisono.nn.precision import sum_dtype, wide
from unisono.nn.split_tensors.blocks import (
    Layout,
    fitted,
    layout_of,
    own_copy,
    pointwise,
    sliced,
    whole_smaller,
)
from unisono.nn.split_tensors.reductions import added, reduced
from unisono.nn.split_tensors.rules import NOT_PREVIEWED, QUERIES, RULES, rule
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Run,
    Split,
    like,
    mapped,
)
from unisono.operators import sum_to_replicated

_SHOWN_BY_WRAPPER = """shape ndim dtype device layout is_sparse is_quantized is_meta is_cuda is_cpu
    is_nested is_mps is_xpu itemsize nbytes names""".split()  # noqa: SIM905
_ASKED_OF_WRAPPER = """size dim numel nelement is_floating_point is_complex ndimension __len__
    get_device element_size is_signed is_inference stride is_contiguous""".split()  # noqa: SIM905
_POINTWISE = """add subtract multiply divide true_divide floor_divide negative absolute hardswish
    tanhshrink softsign log_sigmoid logsigmoid where eq ne not_equal less less_equal greater
    greater_equal rsub masked_fill fill copy zero zeros_like ones_like full_like empty_like float
    double half bfloat16 int long bool alias detach conj _conj _neg_view real imag abs relu6 gelu
    threshold mish lt gt le ge xlogy _prelu_kernel
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__
    __rfloordiv__ __div__ __rdiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __abs__ __eq__ __ne__
    __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__ __lshift__ __rshift__ __iadd__
    __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__
    __irshift__""".split()  # noqa: SIM905
"""Functions that torch does not tag as pointwise in all their forms."""


# -- queries --------------------------------------------------------------------------------------


QUERIES.update([f"{_name}.get" for _name in _SHOWN_BY_WRAPPER], _ASKED_OF_WRAPPER)
NOT_PREVIEWED.update(
    ["requires_grad_", "retain_grad", "register_hook", "backward", "grad"],
    ["__repr__", "__str__", "__format__", "__deepcopy__", "__reduce_ex__", "__setstate__"],
    ["register_post_accumulate_grad_hook", "__iter__", "__contains__", "tolist", "item"],
)


@rule("grad.get")
def _slope_of_block(func: Callable[..., Any], x: Split) -> Tensor | None:
    grad = func(x.local)
    return None if grad is None else like(x, grad)


@rule("requires_grad.get", "requires_grad.set", "requires_grad_", "grad.set",
      "is_leaf.get", "_base.get", "_version.get", "retain_grad")  # fmt: skip
def _of_block(func: Callable[..., Any], x: Split, *args: Any, **kwargs: Any) -> Any:
    result = func(x.local, *mapped(_block, args), **kwargs)
    return x if result is x.local else result


@rule("register_hook")
def _hook(func: Callable[..., Any], x: Split, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Show a hook the gradient of the own block as a split tensor."""

    def of_block(grad: Tensor) -> Tensor | None:
        changed = hook(like(x, grad))
        return changed.local if isinstance(changed, Split) else changed

    return func(x.local, of_block)


@rule("__repr__", "__str__", "__format__")
def _text(func: Callable[..., Any], x: Split, *args: Any, **kwargs: Any) -> str:
    return Split.__repr__(x)


@rule("backward")
def _backward(
    func: Callable[..., Any],
    x: Split,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Go back from own blocks; the gradient is whole, or cut as any other argument."""
    if gradient is None:
        raise RuntimeError(
            "backward() of a split tensor: reduce it to one number first, or give its gradient"
        )
    seed = fitted(gradient, layout_of([x]), x.run)
    func(x.local, seed, retain_graph, create_graph, mapped(_block, inputs))


@rule("grad")
def _grad(
    func: Callable[..., Any],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    **kwargs: Any,
) -> tuple[Tensor | None, ...]:
    """Return gradients of blocks, cut as they are; of replicated tensors as after `backward()`."""
    gradients = [grad_outputs] * len(outputs) if grad_outputs is None else grad_outputs
    seeds = [gradients] if isinstance(gradients, Tensor) else list(gradients)
    for i, (y, seed) in enumerate(zip(outputs, seeds, strict=True)):
        if isinstance(y, Split):
            if seed is None:
                raise RuntimeError("grad of a split tensor: reduce it first, or give grad_outputs")
            seeds[i] = fitted(seed, layout_of([y]), y.run)
    slopes = func(*mapped(_block, (outputs, inputs)), mapped(_block, seeds), **kwargs)
    return tuple(
        like(x, slope) if isinstance(x, Split) and slope is not None else slope
        for x, slope in zip(inputs, slopes, strict=True)
    )


# -- arithmetic -----------------------------------------------------------------------------------


for _name in _POINTWISE:
    RULES[_name] = pointwise
    if not _name.startswith("__"):
        RULES[f"{_name}_"] = pointwise
for _name in ("data.get", "real.get", "imag.get"):
    RULES[_name] = pointwise


@rule("contiguous", "to", "type_as", "type")
def _converted(func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keep the points; of another tensor only dtype and device are asked, however it is cut."""
    args, kwargs = mapped(_block, (args, kwargs))
    if not isinstance(x, Split):
        return func(x, *args, **kwargs)
    local = func(x.local, *args, **kwargs)
    return x if local is x.local else like(x, local) if isinstance(local, Tensor) else local


def _block(x: Split) -> Tensor:
    return x.local


@rule("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
def _made_alike(func: Callable[..., Any], x: Split, *args: Any, **kwargs: Any) -> Any:
    """Make a plain tensor of a given shape; what is asked of `x` is its dtype and device."""
    return func(x.local, *args, **kwargs)


# -- random ---------------------------------------------------------------------------------------


@rule("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
      "alpha_dropout", "feature_alpha_dropout")  # fmt: skip
def _dropout(
    func: Callable[..., Any],
    input: Split,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    name = func.__name__
    if not 0 <= p <= 1:
        raise NoRule("no probability")
    if not training or p == 0:
        return input
    if "alpha" in name:
        raise NoRule("a layer that draws for whole tensors")
    # Dims of which each index is drawn for by itself: all, or batch and channels, or channels.
    is_sample = (name, input.ndim) in (("dropout1d", 2), ("dropout3d", 4))
    count = input.ndim if name in ("dropout", "dropout_") else 1 if is_sample else 2
    shape = (*input.shape[:count], *(1,) * (input.ndim - count))
    # Every rank draws for the whole, as one process would, and keeps what falls on its points: a
    # byte for each of all points, for the time of the call.
    kept = torch.zeros(shape, dtype=torch.bool, device=input.device)
    if p < 1:
        kept.bernoulli_(1 - p)
    for dim, cut in input.cuts.items():
        if dim < count:
            kept = sliced(kept, dim, cut)
    scale = kept.to(input.local.dtype)
    if p < 1:
        scale.div_(1 - p)
    if inplace or name == "dropout_":
        input.local.mul_(scale)
        return input
    return like(input, input.local * scale)


@rule("uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_",
      "rand_like", "randn_like", "randint_like")  # fmt: skip
def _drawn(func: Callable[..., Any], input: Split, *args: Any, **kwargs: Any) -> Tensor:
    """Draw for the whole, as one process would, and keep what falls on own points."""
    if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
        raise NoRule("arguments of an unusual form")
    drawn = func(torch.empty(input.shape, dtype=input.dtype, device=input.device), *args, **kwargs)
    for dim, cut in input.cuts.items():
        drawn = sliced(drawn, dim, cut)
    if func.__name__.endswith("_"):
        input.local.copy_(drawn)
        return input
    return like(input, drawn.contiguous())


# -- losses ---------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
      "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss")  # fmt: skip
def _loss(
    func: Callable[..., Any],
    input: Tensor,
    target: Tensor,
    *args: Any,
    reduction: str = "mean",
    **kwargs: Any,
) -> Tensor:
    if args or kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
        raise NoRule("arguments of an unusual form")
    weight = kwargs.get("weight") if func.__name__ == "mse_loss" else None
    shapes = [x.shape for x in (input, target, weight) if x is not None]
    if len(set(shapes)) > 1:
        raise NoRule("arguments of unlike shapes")
    if reduction not in _REDUCTIONS and (reduction, func.__name__) != ("batchmean", "kl_div"):
        raise NoRule("an unknown reduction")
    terms = pointwise(func, input, target, reduction="none", **kwargs)
    if reduction == "none":
        return terms
    if reduction == "batchmean":
        return reduced(terms, "mean") * (terms.numel() / input.shape[0])
    if weight is not None and reduction == "mean":
        return reduced(terms, "sum") / reduced(weight, "sum")
    return reduced(terms, reduction)


@rule("cross_entropy", "nll_loss", "nll_loss2d")
def _class_loss(
    func: Callable[..., Any],
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if (
        size_average is not None
        or reduce is not None
        or input.ndim < 2
        or reduction not in _REDUCTIONS
    ):
        raise NoRule("arguments of an unusual form")
    if target.is_floating_point():
        raise NoRule("labels that are probabilities")
    if isinstance(weight, Split):
        weight = whole_smaller(weight, func.__name__)
    layout: Layout = {}
    run: Run | None = None
    classes: Cut | None = None
    # Labels have no dim of classes: dims behind it count from the end, the batch from the start.
    spatial = input.ndim - 2
    for x in (input, target):
        if isinstance(x, Split):
            run = x.run
            for dim, cut in x.cuts.items():
                if x is input and dim == 1:
                    classes = cut
                else:
                    layout.setdefault(-spatial - 1 if dim == 0 else dim - x.ndim, cut)
    cuts = [*layout.values(), *([] if classes is None else [classes])]
    if run is None or len({cut.comm for cut in cuts}) != len(cuts):
        raise NoRule("input and target cut along different dims")
    of_input = {(-input.ndim if place == -spatial - 1 else place): c for place, c in layout.items()}
    if classes is not None:
        if classes.outer != 1:
            raise NeedsWhole(1, "the cut lies inside merged dims")
        of_input[1 - input.ndim] = classes
    logits, labels = fitted(input, of_input, run), fitted(target, layout, run)
    scale = None if weight is None else own_copy(weight, cuts, run)
    if classes is None:
        smooth = {"label_smoothing": label_smoothing} if label_smoothing else {}
        logits = logits.contiguous()  # torch cannot differentiate single terms of others
        terms = func(logits, labels, scale, ignore_index=ignore_index, reduction="none", **smooth)
    else:
        has_logits = func.__name__ == "cross_entropy"
        terms = _over_cut_classes(
            logits, labels, scale, classes, ignore_index, label_smoothing, has_logits
        )
    if reduction == "none":
        cuts_of_labels = {target.ndim + place: cut for place, cut in layout.items()}
        return Split(terms, cuts_of_labels, run) if layout else terms
    total = terms.sum(dtype=sum_dtype(terms))
    if reduction == "mean":
        counts = label_weights(labels, scale, ignore_index, total).sum().detach()
        total = torch.stack([total, counts])
    total = added(total, [*layout.values()], run)
    return (total[0] / total[1] if reduction == "mean" else total).to(terms.dtype)


def _over_cut_classes(
    x: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    cut: Cut,
    ignore_index: int,
    smoothing: float,
    has_logits: bool,
) -> Tensor:
    """Return the loss of each label where each rank has some of the classes: one sum over ranks."""
    if problem := stray_label(labels, cut.length, ignore_index):
        raise problem
    dtype = wide(x).dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
    comm, x, start, count = cut.comm, wide(x), cut.bounds[cut.comm.rank], x.shape[1]
    none = x.sum(1)  # of a rank without classes
    is_here = (labels >= start) & (labels < start + count)
    place = (labels - start).clamp(0, max(count - 1, 0)).unsqueeze(1)
    picked = x.gather(1, place).squeeze(1) if count else none
    parts, top = [torch.where(is_here, picked, torch.zeros_like(picked))], none
    every = x.new_ones(cut.length) if weight is None else weight.to(x)
    if has_logits:
        lowest = torch.full_like(none, torch.finfo(x.dtype).min)
        top = comm.all_reduce(x.detach().amax(1) if count else lowest.detach(), "max")
        parts.append((x - top.unsqueeze(1)).exp().sum(1))
        if smoothing:
            shape = (1, -1, *(1,) * (x.ndim - 2))
            parts.append((x * every[start : start + count].view(shape)).sum(1))
    sums = sum_to_replicated(torch.stack(parts), comm=comm)
    normaliser = top + sums[1].log() if has_logits else torch.zeros_like(none)
    losses = normaliser - sums[0]
    weights = label_weights(labels, weight, ignore_index, losses)
    terms = torch.where(weights != 0, losses * weights, torch.zeros_like(losses))
    if smoothing and has_logits:
        spread = (every.sum() * normaliser - sums[2]) * (labels != ignore_index)
        terms = (1 - smoothing) * terms + smoothing / cut.length * spread
    return terms.to(dtype)


def stray_label(labels: Tensor, classes: int | None, ignore_index: int) -> UnisonoError | None:
    """Return the error for a label that is none of the classes, if there is one. Local.

    On an accelerator, where the host does not wait, the device reports it, as for torch's losses.
    `classes` is None where their number is not known.
    """
    if labels.is_floating_point() or labels.is_meta or not labels.numel():
        return None
    low, high = labels.masked_fill(labels == ignore_index, 0).aminmax()
    if is_accelerator(labels.device):
        is_class = low >= 0 if classes is None else (low >= 0) & (high < classes)
        private.assert_async(is_class, f"targets that are none of the {classes} classes")
        return None
    if low >= 0 and (classes is None or high < classes):
        return None
    return PartitionError.because(
        f"a class loss with targets from {int(low)} to {int(high)}",
        f"{'?' if classes is None else classes} classes",
        f"{int(low)} < 0" if low < 0 else f"{int(high)} >= {classes}",
        f"targets from 0 on, or ignore_index={int(low if low < 0 else high)}",
    )


def label_weights(labels: Tensor, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """Return how much each label counts, in the dtype of `like`: the weight of its class, or 0."""
    counted = labels != ignore_index
    weights = counted.to(like.dtype)
    return weights if weight is None else weights * weight.to(like)[labels * counted]

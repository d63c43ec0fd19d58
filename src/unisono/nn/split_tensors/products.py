"""Rules for products: by the labels of an einsum, and attention over a split sequence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono import torch_private as private
from unisono.comm import Communicator
from unisono.errors import UnisonoError
from unisono.expect import expect
from unisono.nn.attention import AttentionPlan, attended, by_heads, drawn_seed, scale_of
from unisono.nn.split_tensors.blocks import (
    fitted,
    own_copy,
    placed,
    sliced,
    unrolled,
)
from unisono.nn.split_tensors.dispatch import call
from unisono.nn.split_tensors.reductions import added
from unisono.nn.split_tensors.rules import rule
from unisono.nn.split_tensors.tensor import Cut, NeedsWhole, NoRule, Split, like
from unisono.operators import all_gather


def contracted(
    labels: Sequence[str],
    out: str,
    operands: Sequence[Tensor],
    compute: Callable[..., Tensor],
) -> Tensor:
    """Return a product, given a label for each dim of the operands and of the result.

    Each axis of ranks gets one label, that of the first operand which it cuts. Operands that have
    the label are cut along it; those without it are whole on the axis. A label that is not in the
    result is summed over.

    Args:
        labels: labels of each operand; a space is a dim of one point that is broadcast.
        out: labels of the result.
        operands: the tensors.
        compute: the product of blocks.
    """
    lead = next(x for x in operands if isinstance(x, Split))
    axes: dict[Communicator, tuple[str, Cut]] = {}
    for x, names in zip(operands, labels, strict=True):
        if isinstance(x, Split):
            for dim, cut in x.cuts.items():
                axes.setdefault(cut.comm, (names[dim], cut))
    if len({label for label, _ in axes.values()}) != len(axes):
        raise NoRule("two axes of ranks along one dim")
    blocks = [_block(x, names, axes, lead) for x, names in zip(operands, labels, strict=True)]
    result = compute(*blocks)
    summed = [cut for label, cut in axes.values() if label not in out]
    result = added(result, summed, lead.run)
    return like(
        lead, result, {out.index(label): cut for label, cut in axes.values() if label in out}
    )


def _block(x: Tensor, names: str, axes: dict[Communicator, tuple[str, Cut]], lead: Split) -> Tensor:
    """Return the part of an operand that this rank needs."""
    rest = [cut for label, cut in axes.values() if label not in names]
    for dim, cut in x.cuts.items() if isinstance(x, Split) else ():
        if any(cut.comm == other.comm for other in rest) and isinstance(x, Split):
            # Whole on every rank, each of which uses it for its own share of the work.
            whole = unrolled(
                x.local, dim, cut, lambda t, d, c: all_gather(t, d, c.sizes, comm=c.comm)
            )
            cuts = {d: c for d, c in x.cuts.items() if d != dim}
            x = Split(whole, cuts, x.run) if cuts else whole
            rest = [other for other in rest if other.comm != cut.comm]
    cuts = {names.index(label): cut for label, cut in axes.values() if label in names}
    return placed(x, cuts, rest, lead.run)


# -- products -------------------------------------------------------------------------------------


@rule("linear")
def _linear(
    func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if not isinstance(input, Split) or isinstance(weight, Split) or isinstance(bias, Split):
        raise NoRule("a split weight")
    if input.ndim - 1 in input.cuts:  # a sum over ranks
        product = call(torch.matmul, input, weight.t())
        return product if bias is None else call(torch.add, product, bias)
    affine = [
        None if t is None else own_copy(t, input.cuts.values(), input.run) for t in (weight, bias)
    ]
    return like(input, func(input.local, *affine))


def _batch_labels(a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Return labels of the dims before the last two, and of those of the result."""
    count = max(a.ndim, b.ndim) - 2
    letters = "abcdefghijklmnop"[:count]

    def named(x: Tensor) -> str:
        return _apart(letters[count - (x.ndim - 2) :] if x.ndim > 2 else "", x)

    return named(a), named(b), letters


def _apart(labels: str, x: Tensor) -> str:
    """Return the labels of the first dims, with a space for one point, which may be broadcast."""
    cuts = x.cuts if isinstance(x, Split) else ()
    return "".join(
        " " if x.shape[i] == 1 and i not in cuts else label for i, label in enumerate(labels)
    )


@rule("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
def _matmul(func: Callable[..., Any], input: Tensor, other: Tensor) -> Tensor:
    a, b = (other, input) if func.__name__ == "__rmatmul__" else (input, other)
    if a.ndim < 2 or b.ndim < 2:
        rows = call(torch.unsqueeze, a, 0) if a.ndim < 2 else a
        columns = call(torch.unsqueeze, b, 1) if b.ndim < 2 else b
        y = call(torch.matmul, rows, columns)
        y = call(torch.squeeze, y, -1) if b.ndim < 2 else y
        return call(torch.squeeze, y, -1 if b.ndim < 2 else -2) if a.ndim < 2 else y
    first, second, batch = _batch_labels(a, b)
    return contracted([f"{first}xy", f"{second}yz"], f"{batch}xz", [a, b], torch.matmul)


@rule("einsum")
def _einsum(func: Callable[..., Any], equation: str, *operands: Any) -> Tensor:
    items = (
        list(operands[0])
        if len(operands) == 1 and not isinstance(operands[0], Tensor)
        else list(operands)
    )
    spelled = equation.replace(" ", "") if isinstance(equation, str) else ""
    if "->" not in spelled or "." in spelled:
        raise NoRule("an equation with dots, or without ->")
    labels, out = spelled.split("->")
    names = labels.split(",")
    if any(len(set(name)) != len(name) for name in names):
        raise NoRule("a diagonal")
    names = [_apart(name, x) for name, x in zip(names, items, strict=True)]
    return contracted(names, out, items, lambda *blocks: func(spelled, *blocks))


@rule("bilinear")
def _bilinear(
    func: Callable[..., Any], x: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    batch = "abcdefghijklm"[: x.ndim - 1]
    y = _einsum(torch.einsum, f"{batch}x,{batch}y,zxy->{batch}z", x, other, weight)
    return y if bias is None else call(torch.add, y, bias)


@rule("addbmm")
def _add_sum(
    func: Callable[..., Any], input: Tensor, a: Tensor, b: Tensor, *, beta: float = 1,
    alpha: float = 1,
) -> Tensor:  # fmt: skip
    product = call(torch.mul, call(torch.sum, call(torch.bmm, a, b), 0), alpha)
    return product if beta == 0 else call(torch.add, call(torch.mul, input, beta), product)


@rule("linear_cross_entropy")
def _linear_cross_entropy(
    func: Callable[..., Any],
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: Any = None,
    **loss: Any,
) -> Tensor:
    """Keep the logits of own points; chunks of them are not needed where they are cut."""
    if linear_weight.ndim != 2:
        raise NoRule("features of several dims")
    logits = call(F.linear, input, linear_weight, linear_bias)
    ignored = {} if ignore_index is None else {"ignore_index": ignore_index}
    return call(F.cross_entropy, logits, target, **ignored, **loss)


# -- recurrent layers -----------------------------------------------------------------------------


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(
    func: Callable[..., Any],
    input: Split,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Run own sequences of a batch."""
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    batch = 0 if batch_first else 1
    if input.ndim != 3 or (dropout and train) or not isinstance(params, (list, tuple)):
        raise NoRule("packed sequences, or a dropout inside")
    for dim in input.cuts:
        if dim != batch:
            raise NeedsWhole(dim, "recurrent layers need whole sequences", input, {1 - batch, 2})
    cut = input.cuts[batch]
    state_blocks = [placed(state, {1: cut}, [], input.run) for state in states]
    weights = [own_copy(p, [cut], input.run) for p in params]
    numbers = has_biases, num_layers, dropout, train, bidirectional, batch_first
    y, *after = func(input.local, state_blocks if len(states) > 1 else state_blocks[0], weights,
                     *numbers)  # fmt: skip
    return like(input, y), *[Split(state, {1: cut}, input.run) for state in after]


# -- spectra --------------------------------------------------------------------------------------


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _transform(
    func: Callable[..., Any], input: Split, dim: Sequence[int], normalization: int, last: Any
) -> Tensor:
    """Transform one dim after the other, with the cut moved to another one meanwhile."""
    dims = [d % input.ndim for d in dim]
    if len(dims) < 2 or not any(d in input.cuts for d in dims):
        raise NoRule("one dim at a time")
    kind, y = func.__name__, input
    of_complex = dims if kind == "_fft_c2c" else dims[:-1]
    if kind == "_fft_r2c":
        y = call(func, y, dims[-1:], normalization, last)
    for d in sorted(of_complex, key=lambda d: d in input.cuts):
        is_forward = last if kind == "_fft_c2c" else kind == "_fft_r2c"
        y = call(private.fft_c2c, y, [d], normalization, is_forward)
    return call(func, y, dims[-1:], normalization, last) if kind == "_fft_c2r" else y


# -- attention ------------------------------------------------------------------------------------


GATHERED_BYTES = 64 * 2**20
"""Keys and values of at most this many bytes in all are gathered rather than sent around a ring."""


@rule("scaled_dot_product_attention")
def _attention(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    expect("is_causal", is_causal, bool)
    if not isinstance(query, Split):
        raise NoRule("queries that all ranks have")
    q, tokens = query, query.ndim - 2
    if q.ndim - 1 in q.cuts:
        raise NeedsWhole(q.ndim - 1, "features are cut")
    if enable_gqa and q.ndim - 3 in q.cuts:
        raise NeedsWhole(q.ndim - 3, "grouped heads are cut", q, {q.ndim - 1})
    if is_causal and attn_mask is not None:
        raise NoRule("a causal mask beside another one")
    layout = {d - q.ndim: cut for d, cut in q.cuts.items() if d != tokens}
    sequence = q.cuts.get(tokens)
    if is_causal and sequence is not None and sequence.outer != 1:
        raise NoRule("a causal mask of a sequence inside merged dims")
    mask = attn_mask
    if mask is not None:
        mask = fitted(mask, {**layout, **({} if sequence is None else {-2: sequence})}, q.run)
    plan = AttentionPlan((0, key.shape[-2]), None, 0, is_causal, scale_of(q, scale), dropout_p)
    way = _way(q, key, value, attn_mask, enable_gqa)
    if way != "gathered" and sequence is not None and isinstance(key, Split):
        cut, comm = key.cuts[tokens], sequence.comm
        keys, values = (fitted(x, {**layout, -2: cut}, q.run) for x in (key, value))
        plan = _dropping(plan, q, has_all_tokens=way == "ulysses")
        if way == "ulysses":
            y = by_heads(q.local, keys, values, mask, plan, sequence.sizes, cut.sizes, comm)
        else:
            first = sequence.bounds[comm.rank]
            ring = replace(plan, key_bounds=cut.bounds, comm=comm, first=first)
            y = attended(q.local, keys, values, mask, ring)
        return like(q, y)
    # Own queries against all keys and values: the softmax of a query needs every key.
    if key.ndim > q.ndim or value.ndim > q.ndim:
        raise NoRule("queries that are broadcast")
    keys, values = (_keys(x, q, sequence) for x in (key, value))
    batch = q.local.shape[: -3 if enable_gqa else -2]
    try:
        keys, values = (x.expand(*batch, *x.shape[len(batch) - q.ndim :]) for x in (keys, values))
    except RuntimeError as error:
        raise NoRule("queries that are broadcast") from error
    first = 0 if sequence is None else sequence.bounds[sequence.comm.rank]
    plan = replace(_dropping(plan, q), first=first)
    return like(q, attended(q.local, keys, values, mask, plan))


DRAWN_BYTES = 1 << 28
"""Weights of attention, in all, up to which ranks drop what one process drops, at a byte each."""


def _dropping(plan: AttentionPlan, q: Split, *, has_all_tokens: bool = False) -> AttentionPlan:
    """Return the plan with the weights that are dropped, drawn from the default generator.

    Every rank draws for the whole, as one process does, and keeps its part for the backward. For
    a very long sequence that is too much: each rank then draws for itself, and says so.

    Args:
        plan: the plan of a rank.
        q: the queries.
        has_all_tokens: whether the rank computes all tokens of some heads.
    """
    p, tokens = plan.dropout_p, q.ndim - 2
    shape = (*q.shape[:-1], plan.key_bounds[-1])
    if p == 0:
        return plan
    if math.prod(shape) > DRAWN_BYTES:
        warnings.warn(
            f"dropout of {math.prod(shape)} attention weights: each rank draws for its own part. "
            f"Up to {DRAWN_BYTES} of them are the same as in one process",
            UserWarning,
            stacklevel=2,
        )
        places = [dim * 7919 + cut.comm.rank for dim, cut in q.cuts.items()]
        return replace(plan, seed=drawn_seed(p, places))
    kept = torch.zeros(shape, dtype=torch.bool, device=q.device)
    if p < 1:
        kept.bernoulli_(1 - p)
    for dim, cut in sorted(q.cuts.items()):
        if dim == tokens and has_all_tokens:
            share = q.local.shape[-3] // cut.comm.size
            kept = kept.narrow(-3, cut.comm.rank * share, share)
        else:
            kept = sliced(kept, dim, cut)
    return replace(plan, kept=kept.clone())  # not a view of the whole


def _way(q: Split, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Return how own queries meet all keys: "gathered", "ulysses" or "ring"; alike on all ranks.

    `mask` is the whole one: rows of a rank's own part look like one for all where it has one query.

    Ulysses where heads divide by ranks and no rows of a mask would have to be gathered: it sends
    and keeps least. Else keys and values are gathered while they are small, and go around a ring
    otherwise. `split(..., attention=...)` says it explicitly.
    """
    choice, tokens = q.run.attention, q.ndim - 2
    sequence = q.cuts.get(tokens)
    if sequence is None:
        return "gathered"
    comms = [
        x.cuts[tokens].comm if isinstance(x, Split) and tokens in x.cuts else None
        for x in (key, value)
    ]
    why = ""
    if comms != [sequence.comm] * 2 or not q.ndim == key.ndim == value.ndim:
        why = "keys or values that are not cut as the queries are"
    elif q.shape[:-3] != key.shape[:-3] or key.shape[:-3] != value.shape[:-3]:
        why = "a batch that is broadcast"
    elif not enable_gqa and q.ndim > 2 and len({x.shape[-3] for x in (q, key, value)}) > 1:
        why = "heads that are broadcast"
    elif any(x.cuts[tokens].outer != 1 for x in (q, key, value) if isinstance(x, Split)):
        why = "a sequence inside merged dims"
    no_heads = why or _undivided(q, key, sequence.comm.size)
    has_rows = mask is not None and mask.shape[-2] != 1
    if choice == "auto":
        if not no_heads and not has_rows:
            return "ulysses"
        nbytes = (key.numel() + value.numel()) * key.element_size()
        return "gathered" if why or nbytes <= GATHERED_BYTES else "ring"
    refused = {"gathered": "", "ulysses": no_heads, "ring": why}[choice]
    if refused:
        raise UnisonoError.because(
            f"attention={choice!r} of queries {list(q.shape)} over a split sequence",
            refused,
            None,
            "attention='auto', which takes the way that serves",
        )
    return choice


def _undivided(q: Split, key: Tensor, ranks: int) -> str:
    """Return why heads cannot be dealt out to ranks, empty if they can."""
    heads = [
        (x.local if isinstance(x, Split) else x).shape[-3] if x.ndim > 2 else 1 for x in (q, key)
    ]
    if any(n % ranks for n in heads):
        return f"{heads[0]} heads (keys: {heads[1]}) for {ranks} ranks"
    return ""


def _keys(x: Tensor, q: Split, sequence: Cut | None) -> Tensor:
    """Return keys or values, whole along their tokens, for the own queries."""
    letters = "abcdefghijklmnop"[: q.ndim - 2]
    axes = {cut.comm: (letters[d], cut) for d, cut in q.cuts.items() if d < q.ndim - 2}
    if sequence is not None:  # a label that keys do not have
        axes[sequence.comm] = "z", sequence
    return _block(x, _apart(letters[q.ndim - x.ndim :], x) + "  ", axes, q)

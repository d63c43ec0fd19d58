"""Rules for products: by the labels of an einsum, and attention over a split sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.comm import Communicator
from unisono.nn.split_tensors.blocks import fitted, recut
from unisono.nn.split_tensors.reductions import added
from unisono.nn.split_tensors.tensor import (
    Cut,
    NeedsWhole,
    NoRule,
    Split,
    call,
    joined,
    like,
    own_copy,
    rule,
    sliced,
    unrolled,
)
from unisono.operators import all_gather


def everybodys(x: Tensor, dim: int, cut: Cut) -> Tensor:
    """Return a dim whole on every rank, each of which uses it for its own share of the work."""
    return unrolled(x, dim, cut, lambda t, d, c: all_gather(t, d, c.sizes, comm=c.comm))


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
    lead.run.moves += 1
    blocks = [_block(x, names, axes, lead) for x, names in zip(operands, labels, strict=True)]
    result = compute(*blocks)
    result = added(result, [cut for label, cut in axes.values() if label not in out])
    return like(
        lead, result, {out.index(label): cut for label, cut in axes.values() if label in out}
    )


def _block(x: Tensor, names: str, axes: dict[Communicator, tuple[str, Cut]], lead: Split) -> Tensor:
    """Return the part of an operand that this rank needs."""
    for comm, (label, cut) in axes.items():
        at = names.find(label)
        if isinstance(x, Split) and at in x.cuts and x.cuts[at].comm == comm:
            if x.cuts[at].outer != cut.outer:
                raise NoRule("arguments cut in different ways")
            x = recut(x, at, cut.sizes)
            continue
        elsewhere = [d for d, c in x.cuts.items() if c.comm == comm] if isinstance(x, Split) else []
        if at >= 0:
            if elsewhere and isinstance(x, Split):
                x = joined(x, elsewhere)
            local = x.local if isinstance(x, Split) else x
            x = _with(x, sliced(local, at, cut), {at: cut}, lead)
        elif elsewhere and isinstance(x, Split):
            whole = everybodys(x.local, elsewhere[0], x.cuts[elsewhere[0]])
            left = {d: c for d, c in x.cuts.items() if d != elsewhere[0]}
            x = Split(whole, left, x.run) if left else whole
        else:
            local = x.local if isinstance(x, Split) else x
            x = _with(x, own_copy(local, [cut], lead.run), {}, lead)
    return x.local if isinstance(x, Split) else x


def _with(x: Tensor, local: Tensor, more: dict[int, Cut], lead: Split) -> Tensor:
    cuts = {**(x.cuts if isinstance(x, Split) else {}), **more}
    return Split(local, cuts, lead.run) if cuts else local


# -- products -------------------------------------------------------------------------------------


@rule("linear")
def _linear(
    func: Callable[..., Any], input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    if not isinstance(input, Split) or isinstance(weight, Split) or isinstance(bias, Split):
        raise NoRule("a split weight")
    if input.ndim - 1 in input.cuts:
        raise NeedsWhole(input.ndim - 1, "features are cut")
    own = [
        None if t is None else own_copy(t, input.cuts.values(), input.run) for t in (weight, bias)
    ]
    return like(input, func(input.local, *own))


def _batch_labels(a: Tensor, b: Tensor) -> tuple[str, str, str]:
    """Return labels of the dims before the last two, and of those of the result."""
    count = max(a.ndim, b.ndim) - 2
    letters = "abcdefghijklmnop"[:count]

    def named(x: Tensor) -> str:
        own = letters[count - (x.ndim - 2) :] if x.ndim > 2 else ""
        return "".join(
            " " if x.shape[i] == 1 and not (isinstance(x, Split) and i in x.cuts) else letter
            for i, letter in enumerate(own)
        )

    return named(a), named(b), letters


@rule("matmul", "bmm", "mm", "__matmul__", "__rmatmul__")
def _matmul(func: Callable[..., Any], input: Tensor, other: Tensor) -> Tensor:
    a, b = (other, input) if func.__name__ == "__rmatmul__" else (input, other)
    if a.ndim < 2 or b.ndim < 2:
        raise NoRule("a product with a vector")
    first, second, batch = _batch_labels(a, b)
    return contracted([f"{first}xy", f"{second}yz"], f"{batch}xz", [a, b], torch.matmul)


@rule("baddbmm", "addmm")
def _add_product(
    func: Callable[..., Any],
    input: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    product = call(torch.mul, call(torch.matmul, a, b), alpha)
    return call(torch.add, call(torch.mul, input, beta), product)


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
    return contracted(names, out, items, lambda *blocks: func(spelled, *blocks))


# -- attention ------------------------------------------------------------------------------------


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
    if not isinstance(query, Split):
        raise NoRule("queries that all ranks have")
    q, tokens = query, query.ndim - 2
    if query.ndim - 1 in q.cuts or (enable_gqa and q.ndim - 3 in q.cuts):
        raise NoRule("features or grouped heads are cut")
    # Own queries against all keys and values: the softmax of a query needs every key.
    layout = {d - q.ndim: cut for d, cut in q.cuts.items() if d != tokens}
    sequence = q.cuts.get(tokens)
    keys, values = (_keys(x, layout, sequence, q) for x in (key, value))
    mask = attn_mask
    if mask is not None:
        rows = {**layout, **({-2: sequence} if sequence is not None else {})}
        mask = fitted(mask, rows, q.run)
    if is_causal and sequence is not None:
        if mask is not None or sequence.outer != 1:
            raise NoRule("a causal mask beside another one")
        low, high = sequence.bounds[sequence.comm.rank : sequence.comm.rank + 2]
        mask = torch.arange(low, high)[:, None] >= torch.arange(key.shape[-2])[None, :]
        mask, is_causal = mask.to(q.local.device), False
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if dropout_p == 0:
        return like(q, func(q.local, keys, values, mask, 0.0, is_causal, **options))
    if enable_gqa:
        raise NoRule("dropout with grouped heads")
    scores = q.local @ keys.transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = call(F.dropout, like(q, scores.softmax(-1)), dropout_p)
    return like(q, weights.local @ values)


def _keys(x: Tensor, layout: dict[int, Cut], sequence: Cut | None, q: Split) -> Tensor:
    """Return keys or values, whole along their tokens, for the own queries."""
    tokens = x.ndim - 2
    if isinstance(x, Split) and tokens in x.cuts:
        cut = x.cuts[tokens]
        if sequence is None or cut.comm != sequence.comm:
            raise NoRule("keys cut where queries are not")
        local = everybodys(x.local, tokens, cut)
        left = {d: c for d, c in x.cuts.items() if d != tokens}
        return fitted(Split(local, left, x.run) if left else local, layout, q.run)
    both = {**layout, **({-9: sequence} if sequence is not None else {})}
    return fitted(x, both, q.run)


@rule("multi_head_attention_forward")
def _multi_head(
    func: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    unusual = (bias_k, bias_v, static_k, static_v, key_padding_mask)
    if add_zero_attn or query.ndim != 3 or any(x is not None for x in unusual):
        raise NoRule("arguments of an unusual form")
    if need_weights or (attn_mask is not None and attn_mask.ndim != 2):
        raise NoRule("weights of the attention are wanted")
    if not all(isinstance(x, Split) for x in (query, key, value)):
        raise NoRule("arguments that all ranks have")
    weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and in_proj_weight is not None:
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    heads = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        if weight is None:
            raise NoRule("arguments of an unusual form")
        projected = _linear(F.linear, x, weight, bias)  # [tokens, batch, features]
        parted = call(torch.unflatten, projected, 2, (num_heads, -1))
        heads.append(call(torch.permute, parted, [1, 2, 0, 3]))
    p = dropout_p if training else 0.0
    causal = is_causal and attn_mask is None
    y = _attention(F.scaled_dot_product_attention, *heads, attn_mask, p, causal)
    merged = call(torch.flatten, call(torch.permute, y, [2, 0, 1, 3]), 2, 3)
    return _linear(F.linear, merged, out_proj_weight, out_proj_bias), None

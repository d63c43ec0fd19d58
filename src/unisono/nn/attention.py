"""Attention over a sequence that is cut over ranks: around a ring, or by heads (Ulysses).

One autograd function does the work of a rank: its queries against blocks of keys and values, one
block at a time, joined by their log-sum-exp (online softmax). Blocks come around the ring, or there
is one block, which is whole. Kept for the backward are own queries, keys, values, the result and
one number per query; scores never are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono import torch_private as private
from unisono.comm import Communicator
from unisono.comm.arguments import dense
from unisono.comm.perform import Pending
from unisono.operators import all_gather, move_cut
from unisono.operators.linear import slopes

_SCORES = 1 << 21
"""Scores that are computed at a time where torch's kernel does not serve."""
Messages = Pending[dict[int, Tensor]]
"""Blocks under way around the ring."""
_UNDER_WAY = 1 << 21
"""Bytes of keys and values that travel at a time, unless those of one head are more."""
_KERNEL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionPlan:
    """Which keys the queries of a rank meet, and how."""

    key_bounds: tuple[int, ...]
    """Where each block of keys begins in the sequence, and its end."""
    comm: Communicator | None = None
    """The ring, one block per rank; None: the one block is whole and here."""
    first: int = 0
    """Place of the first own query in the sequence (for a causal mask)."""
    is_causal: bool = False
    scale: float = 1.0
    dropout_p: float = 0.0
    seed: int = 0
    """Of the dropped weights of this rank; drawn again in the backward, not kept."""
    kept: Tensor | None = None
    """Which weights of own queries and all keys are not dropped; None: `seed` says it."""

    def tiles(self, block: int, queries: int) -> list[Tile]:
        """Return the parts of a block of keys that own queries see."""
        start, stop = self.key_bounds[block : block + 2]
        if start == stop or queries == 0:
            return []
        if not self.is_causal:
            return [Tile(0, queries, start, start, stop, False)]
        tiles: list[Tile] = []
        seen_by_all = min(stop, self.first)
        if start < seen_by_all:
            tiles.append(Tile(0, queries, start, start, seen_by_all, False))
        low, high = max(start, self.first), min(stop, self.first + queries)
        if low < high:  # from here on query i meets key i first: a triangle
            tiles.append(Tile(low - self.first, queries, start, low, high, True))
        return tiles


@dataclass(frozen=True)
class Tile:
    """Own queries `[top, bottom)` against keys `[low, high)` of the sequence."""

    top: int
    bottom: int
    start: int
    """Where the block begins that the keys are in."""
    low: int
    high: int
    is_triangle: bool
    """Whether query i sees keys up to i alone, both counted from the corner."""

    def rows(self, x: Tensor) -> Tensor:
        """Return the part of a tensor of own queries."""
        return x if x.shape[2] == self.bottom - self.top else x[:, :, self.top : self.bottom]

    def keys(self, x: Tensor) -> Tensor:
        """Return the part of a block of keys or values."""
        if x.shape[2] == self.high - self.low:
            return x
        return x[:, :, self.low - self.start : self.high - self.start]

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return the part of a mask over own queries and all keys."""
        if mask is None:
            return None
        mask = mask if mask.shape[2] == 1 else mask[:, :, self.top : self.bottom]
        return mask if mask.shape[3] == 1 else mask[..., self.low : self.high]


class Attention(torch.autograd.Function):
    """Own queries, keys and values of shape [batch, heads, tokens, features] -> own results."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan
    ) -> Tensor:
        """Join what each block of keys gives."""
        wide = _wide(q.dtype)
        shape = (*q.shape[:3], v.shape[3])
        total: Tensor | None = None
        sums = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
        for block, keys, values in _blocks(k, v, plan):
            for tile in plan.tiles(block, q.shape[2]):
                part, tile_sums = _tile(tile, q, keys, values, mask, plan)
                if total is None and part.shape == shape:
                    total, sums = part, tile_sums
                    continue
                if total is None:
                    total = torch.zeros(shape, dtype=wide, device=q.device)
                total = total.to(wide)
                _join(tile.rows(total), tile.rows(sums[..., None])[..., 0], part, tile_sums)
        out = q.new_zeros(shape) if total is None else total.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients of keys and values around with their blocks, and home."""
        with torch.autocast(grads[0].device.type, enabled=False):
            return *_gradients(ctx, grads[0]), None


def _gradients(ctx: Any, dout: Tensor) -> list[Tensor | None]:
    """Return the gradients of queries, keys, values and mask."""
    q, k, v, mask, out, sums = ctx.saved_tensors
    plan: AttentionPlan = ctx.plan
    needs = ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():  # a derivative of this is needed: let autograd write it
        return slopes(partial(_composed, plan=plan), (q, k, v, mask), needs, dout)
    wide = _wide(q.dtype)
    # exp(-inf - 0) = 0: a query that sees no key has no gradient.
    sums = sums.masked_fill(sums == -math.inf, 0.0)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dmask = torch.zeros_like(mask) if mask is not None and needs[3] else None
    home = _Homeward(plan, k, v) if needs[1] or needs[2] else None
    for block, keys, values in _blocks(k, v, plan):
        dk = torch.zeros(keys.shape, dtype=wide, device=q.device)
        dv = torch.zeros(values.shape, dtype=wide, device=q.device)
        for tile in plan.tiles(block, q.shape[2]):
            gradients = _tile_backward(tile, dout, q, keys, values, mask, out, sums, plan, dmask)
            for target, part in zip(
                (tile.rows(dq), tile.keys(dk), tile.keys(dv)), gradients, strict=True
            ):
                target += part
        if home is not None:
            home.add(block, dk, dv)
    dk, dv = home.arrived() if home is not None else (None, None)
    return [
        dq.to(q.dtype) if needs[0] else None,
        dk.to(k.dtype) if needs[1] and dk is not None else None,
        dv.to(v.dtype) if needs[2] and dv is not None else None,
        dmask,
    ]


# -- around the ring ------------------------------------------------------------------------------


def _blocks(k: Tensor, v: Tensor, plan: AttentionPlan) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each block's number, keys and values, the own first; the next one travels meanwhile."""
    comm = plan.comm
    if comm is None or comm.size == 1:
        yield 0, k, v
        return
    travelling = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(comm.size):
        block = (comm.rank - step) % comm.size
        flight: Messages | None = None
        if step + 1 < comm.size:
            coming = _elements(k, v, plan, (block - 1) % comm.size)
            flight = _passed_on(comm, travelling, coming, k.dtype)
        yield block, *_unpacked(travelling, k, v, plan, block)
        if flight is not None:
            travelling = next(iter(flight.wait().values()), travelling[:0])


class _Homeward:
    """Gradients of blocks, which follow their keys and values around the ring.

    A block's gradient is begun by its owner and grows on each rank in turn, so its sum has one
    order in every run.
    """

    def __init__(self, plan: AttentionPlan, k: Tensor, v: Tensor) -> None:
        self._plan, self._like = plan, (k, v)
        self._flight: Messages | None = None
        self._local_gradients: tuple[Tensor, Tensor] | None = None

    def add(self, block: int, dk: Tensor, dv: Tensor) -> None:
        """Add to the gradient of a block, and send it on."""
        comm = self._plan.comm
        if comm is None or comm.size == 1:
            self._local_gradients = dk, dv
            return
        total = torch.cat([dk.reshape(-1), dv.reshape(-1)])
        if self._flight is not None:
            for came in self._flight.wait().values():
                total += came
        coming = _elements(*self._like, self._plan, (block - 1) % comm.size)
        self._flight = _passed_on(comm, total, coming, total.dtype)

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of own keys and values."""
        if self._local_gradients is not None:
            return self._local_gradients
        k, v = self._like
        plan, comm = self._plan, self._plan.comm
        landed = {} if self._flight is None else self._flight.wait()
        came = next(iter(landed.values()), k.new_empty(0))
        return _unpacked(came, k, v, plan, 0 if comm is None else comm.rank)


def _passed_on(comm: Communicator, tensor: Tensor, coming: int, dtype: torch.dtype) -> Messages:
    """Start to send a flat block to the next rank, and to receive that of the rank before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return comm._post(
        {after: dense(tensor)} if tensor.numel() else {},
        {before: torch.empty(coming, dtype=dtype, device=tensor.device)} if coming else {},
    )


def _elements(k: Tensor, v: Tensor, plan: AttentionPlan, block: int) -> int:
    tokens = plan.key_bounds[block + 1] - plan.key_bounds[block]
    return k.shape[0] * k.shape[1] * tokens * (k.shape[3] + v.shape[3])


def _unpacked(
    flat: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, block: int
) -> tuple[Tensor, Tensor]:
    tokens = plan.key_bounds[block + 1] - plan.key_bounds[block]
    of_k, of_v = ((*t.shape[:2], tokens, t.shape[3]) for t in (k, v))
    size = math.prod(of_k)
    return flat[:size].view(of_k), flat[size:].view(of_v)


# -- queries against one block --------------------------------------------------------------------


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _join(total: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Add the result of further keys, in place; `sums` is the log-sum-exp of the scores so far."""
    joint = torch.logaddexp(sums, part_sums)
    finite = joint.masked_fill(joint == -math.inf, 0.0)  # no key so far: both weights are 0
    total *= (sums - finite).exp_()[..., None]
    total += part * (part_sums - finite).exp_()[..., None]
    sums.copy_(joint)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Return keys or values once for each head of the queries that shares them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _grouped(grad: Tensor, like: Tensor) -> Tensor:
    """Return the sum over the heads that share keys or values."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _kernel_serves(q: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan) -> bool:
    """Whether torch's own kernel takes this.

    It is the one `scaled_dot_product_attention` runs on a CPU, called below it because only there
    it tells the log-sum-exp by which blocks are joined. Seen with torch 2.13.
    """
    return (
        q.device.type == "cpu"
        and q.dtype in _KERNEL_DTYPES
        and q.shape[3] == v.shape[3]
        and plan.dropout_p == 0
        and (mask is None or not mask.requires_grad)
        and 0 not in q.shape
    )


def _shaped(mask: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
    """Return a mask as torch's kernel takes it: numbers to add, as many as there are scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
            ~mask, -math.inf
        )
    return mask.to(q.dtype).expand(-1, -1, q.shape[2], keys)


def _tile(
    tile: Tile, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """Return the result of a tile, and the log-sum-exp of its scores."""
    q, mask = tile.rows(q), tile.of_mask(mask)
    k, v = (_repeated(tile.keys(t), q.shape[1]) for t in (k, v))
    if _kernel_serves(q, v, mask, plan):
        added = _shaped(mask, q, k.shape[2])
        out, sums = private.flash_attention(
            q, k, v, 0.0, tile.is_triangle, attn_mask=added, scale=plan.scale
        )
        if added is not None:  # the kernel gives 0 where no key is seen
            sums = sums.masked_fill((added == -math.inf).all(-1), -math.inf)
        return out, sums
    wide = _wide(q.dtype)
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device)
    sums = torch.empty(q.shape[:3], dtype=wide, device=q.device)
    for top, bottom in _chunks(q, k):
        scores = _scores(tile, top, bottom, q, k, mask, plan)
        log_sum = torch.logsumexp(scores, -1)
        weights = (scores - log_sum.masked_fill(log_sum == -math.inf, 0.0)[..., None]).exp_()
        kept = _kept(tile, top, weights, plan)
        weights = weights if kept is None else weights.mul_(kept)
        out[:, :, top:bottom] = weights @ v.to(wide)
        sums[:, :, top:bottom] = log_sum
    return out, sums


def _tile_backward(
    tile: Tile,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    sums: Tensor,
    plan: AttentionPlan,
    dmask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a tile adds to the gradients of its queries, keys and values.

    `out` and `sums` are those of all keys: with them each block's part is exact.
    """
    own_k, own_v = tile.keys(k), tile.keys(v)
    dout, q, out, mask = tile.rows(dout), tile.rows(q), tile.rows(out), tile.of_mask(mask)
    sums, part_of_mask = tile.rows(sums[..., None])[..., 0], tile.of_mask(dmask)
    k, v = (_repeated(t, q.shape[1]) for t in (own_k, own_v))
    if _kernel_serves(q, v, mask, plan):
        dq, dk, dv = private.flash_attention_backward(
            dout, q, k, v, out, sums, 0.0, tile.is_triangle,
            attn_mask=_shaped(mask, q, k.shape[2]), scale=plan.scale,
        )  # fmt: skip
        return dq, _grouped(dk, own_k), _grouped(dv, own_v)
    wide = _wide(q.dtype)
    dout, wide_q, wide_k, wide_v = (t.to(wide) for t in (dout, q, k, v))
    dq, dk, dv = torch.empty_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    share = (dout * out.to(wide)).sum(-1, keepdim=True)
    for top, bottom in _chunks(q, k):
        rows = slice(top, bottom)
        scores = _scores(tile, top, bottom, q, k, mask, plan)
        weights = scores.sub_(sums[:, :, rows, None]).exp_()
        slope = dout[:, :, rows] @ wide_v.mT
        kept = _kept(tile, top, weights, plan)
        if kept is not None:
            slope *= kept
        dv += (weights if kept is None else weights * kept).mT @ dout[:, :, rows]
        slope = slope.sub_(share[:, :, rows]).mul_(weights)
        dq[:, :, rows] = slope @ wide_k * plan.scale
        dk += slope.mT @ wide_q[:, :, rows] * plan.scale
        if part_of_mask is not None:
            target = part_of_mask if part_of_mask.shape[2] == 1 else part_of_mask[:, :, rows]
            target += slope.sum_to_size(target.shape).to(target.dtype)
    return dq, _grouped(dk, own_k), _grouped(dv, own_v)


def _chunks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Return runs of queries whose scores fit into memory, the same in forward and backward."""
    step = max(1, _SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [(top, min(top + step, q.shape[2])) for top in range(0, q.shape[2], step)]


def _scores(
    tile: Tile, top: int, bottom: int, q: Tensor, k: Tensor, mask: Tensor | None,
    plan: AttentionPlan,
) -> Tensor:  # fmt: skip
    """Return the masked scores of some queries of a tile."""
    wide = _wide(q.dtype)
    scores = (q[:, :, top:bottom].to(wide) @ k.to(wide).mT).mul_(plan.scale)
    if tile.is_triangle:
        rows = torch.arange(top, bottom, device=q.device)
        hidden = rows[:, None] < torch.arange(k.shape[2], device=q.device)
        scores.masked_fill_(hidden, -math.inf)
    if mask is None:
        return scores
    mask = mask if mask.shape[2] == 1 else mask[:, :, top:bottom]
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)


def _kept(tile: Tile, top: int, weights: Tensor, plan: AttentionPlan) -> Tensor | None:
    """Return the factors of dropout for some rows of a tile: always the same for the same rows."""
    p = plan.dropout_p
    if p == 0:
        return None
    if plan.kept is not None:
        first = tile.top + top
        rows = plan.kept[:, :, first : first + weights.shape[2], tile.low : tile.high]
        return rows.to(weights.dtype).div_(1 - p if p < 1 else 1)
    place = (tile.low * 1_000_003 + tile.top + top) * 7919
    generator = torch.Generator(weights.device).manual_seed((plan.seed + place) % 2**62)
    drawn = torch.rand(
        weights.shape, generator=generator, device=weights.device, dtype=weights.dtype
    )
    return (drawn >= p).to(weights.dtype) * (0.0 if p == 1 else 1 / (1 - p))


def _composed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan) -> Tensor:
    """Return the same from operations that autograd differentiates to any order.

    All keys and scores are held at once here.
    """
    wide = _wide(q.dtype)
    if plan.comm is not None:
        sizes = [stop - start for start, stop in itertools.pairwise(plan.key_bounds)]
        k, v = (all_gather(t, 2, sizes, comm=plan.comm) for t in (k, v))
    k, v = (_repeated(t, q.shape[1]).to(wide) for t in (k, v))
    scores = q.to(wide) @ k.mT * plan.scale
    if plan.is_causal:
        rows = torch.arange(plan.first, plan.first + q.shape[2], device=q.device)
        hidden = rows[:, None] < torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if plan.dropout_p:
        kept = torch.zeros_like(weights)
        for block in range(len(plan.key_bounds) - 1):
            for tile in plan.tiles(block, q.shape[2]):
                kept_tile = kept[:, :, tile.top : tile.bottom, tile.low : tile.high]
                for top, bottom in _chunks(kept_tile, kept_tile.mT):
                    drawn = _kept(tile, top, kept_tile[:, :, top:bottom], plan)
                    if drawn is not None:
                        kept_tile[:, :, top:bottom] = drawn
        weights = weights * kept
    return (weights @ v).to(q.dtype)


# -- the ways of a sequence ------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan) -> Tensor:
    """Return the attention of own queries, for tensors of any number of batch dims."""
    shape = (*q.shape[:-1], v.shape[-1])
    batch = q.shape[:-3]
    if q.ndim != 4:
        if mask is not None and mask.ndim > 3:
            mask = mask.expand(*batch, *mask.shape[-3:])
        if mask is not None:
            mask = mask[(None,) * (3 - mask.ndim)] if mask.ndim < 3 else mask
            mask = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
        q, k, v = (t[(None,) * max(0, 3 - t.ndim)] for t in (q, k, v))
        q, k, v = (t.reshape(math.prod(batch), *t.shape[-3:]) for t in (q, k, v))
        if plan.kept is not None:
            plan = replace(plan, kept=plan.kept.reshape(*q.shape[:3], -1))
    elif mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    kind = q.device.type
    if not torch.is_autocast_enabled(kind):
        return _by_groups(q, k, v, mask, plan).reshape(shape)
    if q.dtype == torch.float32:  # as autocast treats torch's own attention
        q, k, v = (t.to(torch.get_autocast_dtype(kind)) for t in (q, k, v))
    with torch.autocast(kind, enabled=False):
        return _by_groups(q, k, v, mask, plan).reshape(shape)


def _by_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: AttentionPlan) -> Tensor:
    """Return the attention; around a ring some heads at a time, so that little is under way."""
    if plan.comm is None or plan.comm.size == 1 or k.shape[1] < 2:
        return Attention.apply(q, k, v, mask, plan)
    tokens = max(stop - start for start, stop in itertools.pairwise(plan.key_bounds))
    a_head = k.shape[0] * tokens * (k.shape[3] + v.shape[3]) * k.element_size()
    heads = max(1, _UNDER_WAY // max(1, a_head))
    if heads >= k.shape[1]:
        return Attention.apply(q, k, v, mask, plan)
    shared = q.shape[1] // k.shape[1]
    own_heads = mask is not None and mask.shape[1] != 1
    masks = mask.split(heads * shared, 1) if mask is not None and own_heads else None
    parts = zip(q.split(heads * shared, 1), k.split(heads, 1), v.split(heads, 1), strict=True)
    kept = None if plan.kept is None else plan.kept.split(heads * shared, 1)
    results = [
        Attention.apply(
            *part,
            masks[i] if masks is not None else mask,
            replace(plan, seed=plan.seed + i, kept=None if kept is None else kept[i]),
        )
        for i, part in enumerate(parts)
    ]
    return torch.cat(results, 1)


def by_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: AttentionPlan,
    sizes: Sequence[int],
    key_sizes: Sequence[int],
    comm: Communicator,
) -> Tensor:
    """Return the attention of own queries by way of all tokens of some heads (Ulysses).

    Args:
        q: own queries.
        k: own keys.
        v: own values.
        mask: of own queries and all keys.
        plan: for all tokens: one block of keys.
        sizes: queries of each rank.
        key_sizes: keys of each rank.
        comm: the ranks.
    """
    heads = q.shape[-3]
    if mask is not None:
        has_heads = mask.ndim > 2 and mask.shape[-3] != 1
        # Where a rank has one query, one row may be its own or for all: then it is taken as its
        # own everywhere, for ranks must decide alike.
        has_rows = mask.shape[-2] != 1 or 1 in sizes
        if has_rows:
            mask = mask.expand(*mask.shape[:-2], q.shape[-2], mask.shape[-1])
        if has_heads and has_rows:
            mask = move_cut(mask, -2, -3, sizes, comm=comm)
        elif has_heads:
            share = heads // comm.size
            mask = mask.narrow(-3, comm.rank * share, share)
        elif has_rows:
            mask = all_gather(mask, -2, sizes, comm=comm)
    q = move_cut(q, -2, -3, sizes, comm=comm)
    k, v = (move_cut(t, -2, -3, key_sizes, comm=comm) for t in (k, v))
    y = attended(q, k, v, mask, plan)
    each = [heads // comm.size] * comm.size
    return move_cut(y, -3, -2, each, sizes, comm=comm)


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor of the scores."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def drawn_seed(dropout_p: float, places: Sequence[int]) -> int:
    """Return the seed of a rank's dropped weights, of one number from the default generator.

    Args:
        dropout_p: nothing is drawn if it is 0.
        places: what makes this rank's weights other than those of ranks that draw the same number.
    """
    if dropout_p == 0:
        return 0
    seed = int(torch.randint(2**40, ()))
    for place in places:
        seed = (seed * 1_000_003 + place + 1) % 2**62
    return seed

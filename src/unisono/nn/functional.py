"""Functions without a layer: operators between partitions, and attention over a cut sequence.

Of the operators, who talks to whom follows from the grids of ranks. `TABLE` lists them with their
adjoints.

Plain linear maps on the direct sum of the ranks' blocks: `broadcast`, `sum_reduce`,
`all_sum_reduce`, `all_gather`, `reduce_scatter`. For values that every rank holds equal and whose
backward every rank seeds alike: `replicate`, `sum_to_replicated`, `gather_to_replicated`, `split`.

`ring_attention` and `ulysses_attention` are torch's `scaled_dot_product_attention` of a sequence of
which each rank holds a block of tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.arguments import check_sizes
from unisono.errors import CollectiveMismatch, PartitionError
from unisono.expect import expect
from unisono.nn.agreement import raise_together
from unisono.nn.attention import AttentionPlan, attended, by_heads, drawn_seed, scale_of
from unisono.operators.partitioned import (
    all_gather,
    all_sum_reduce,
    broadcast,
    gather_to_replicated,
    reduce_scatter,
    replicate,
    split,
    sum_reduce,
    sum_to_replicated,
)
from unisono.operators.plans import check_call
from unisono.operators.table import PARTITION_TABLE as TABLE
from unisono.topology.decompose import bounds

__all__ = [
    "TABLE",
    "all_gather",
    "all_sum_reduce",
    "broadcast",
    "gather_to_replicated",
    "reduce_scatter",
    "replicate",
    "ring_attention",
    "split",
    "sum_reduce",
    "sum_to_replicated",
    "ulysses_attention",
]

_MASK = "the rows of the mask that belong to own queries, with columns for all keys"


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sizes: Sequence[int] | None = None,
    key_sizes: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return `scaled_dot_product_attention` of a sequence that is cut over ranks, around a ring.

    Each rank holds a block of the tokens (of any length, also none). Keys and values travel from
    rank to rank while queries meet those that are here, so memory is linear in the own block.
    Collective over `comm`; the result, its gradients and second derivatives are those of one
    process (for second derivatives keys are gathered). With a causal mask later ranks have more
    work than earlier ones.

    Args:
        query: own queries, [..., heads, tokens, features]; heads and batch are optional.
        key: own keys, with the batch of the queries.
        value: own values.
        attn_mask: of own queries and *all* keys, broadcast to [..., heads, own tokens, all keys]:
            True where a key counts, or numbers to add to the scores.
        dropout_p: part of the weights that is dropped. One number is drawn from the default
            generator; from it follow the weights that this rank drops.
        is_causal: query i of the sequence sees keys up to i.
        scale: factor of the scores; default 1 / sqrt(features).
        enable_gqa: heads of keys and values divide those of the queries and are shared by them.
        sizes: queries of each rank. Without them one small exchange learns them, and compares
            what ranks ask for.
        key_sizes: keys of each rank; default: `sizes`.
        comm: the ranks; default the world.

    Raises:
        PartitionError: shapes that do not fit each other.
        CollectiveMismatch: ranks ask for different things.

    >>> import torch
    >>> from unisono.nn.functional import ring_attention
    >>> q, k, v = torch.ones(3, 1, 8, 6, 4).unbind()
    >>> ring_attention(q, k, v, is_causal=True).shape
    torch.Size([1, 8, 6, 4])
    """
    call = _Call("ring_attention", query, key, value, attn_mask, dropout_p, is_causal, scale,
                 enable_gqa, world() if comm is None else comm)  # fmt: skip
    sizes, key_sizes = call.agreed(sizes, key_sizes)
    plan = call.plan(bounds(key_sizes), call.comm, bounds(sizes)[call.comm.rank])
    return attended(query, key, value, attn_mask, plan)


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sizes: Sequence[int] | None = None,
    key_sizes: Sequence[int] | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return `scaled_dot_product_attention` of a sequence that is cut over ranks, by heads.

    Each rank gets all tokens of its share of the heads, attends, and gets its tokens of all heads
    back: `unisono.operators.move_cut` there and back. Heads (those of the keys too) must divide by
    the number of ranks. Work is balanced also with a causal mask; otherwise as `ring_attention`.

    Arguments and errors are those of `ring_attention`; of a mask, rows travel too.
    """
    call = _Call("ulysses_attention", query, key, value, attn_mask, dropout_p, is_causal, scale,
                 enable_gqa, world() if comm is None else comm)  # fmt: skip
    sizes, key_sizes = call.agreed(sizes, key_sizes)
    plan = call.plan((0, sum(key_sizes)), None, 0)
    return by_heads(query, key, value, attn_mask, plan, sizes, key_sizes, call.comm)


@dataclass(frozen=True)
class _Call:
    """A call as the user made it, and the checks of it."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    comm: Communicator

    def plan(
        self, key_bounds: tuple[int, ...], ring: Communicator | None, first: int
    ) -> AttentionPlan:
        """Return what the own queries meet; draws where weights are dropped."""
        seed = drawn_seed(self.dropout_p, [self.comm.rank])
        scale = scale_of(self.query, self.scale)
        return AttentionPlan(key_bounds, ring, first, self.is_causal, scale, self.dropout_p, seed)

    def agreed(
        self, sizes: Sequence[int] | None, key_sizes: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the queries and keys of each rank; raise, on all ranks alike, if they do not fit.

        Collective where sizes are not given.
        """
        comm, name, tokens = self.comm, self.name, [0, 0]
        for what in ("query", "key", "value"):
            x = getattr(self, what)
            expect(what, x, Tensor, f"{what}=torch.zeros(batch, heads, tokens, features)")
            check_call(x, comm, name)
        problem = None
        for wrong, hint in self._refusals():
            shapes = [list(x.shape) for x in (self.query, self.key, self.value)]
            call = "{} of query {}, key {}, value {}".format(name, *shapes)
            problem = PartitionError.because(call, wrong, None, hint)
            break
        else:
            tokens = [self.query.shape[-2], self.key.shape[-2]]
        columns = 1 if self.mask is None or not self.mask.ndim else self.mask.shape[-1]
        if sizes is None:
            numbers = [0] * 8 if problem is not None else self._alike()
            records = comm.all_gather_ints([int(problem is not None), *tokens, columns, *numbers])
            if any(record[0] for record in records):
                raise_together(comm, problem)
            if len({tuple(record[4:]) for record in records}) > 1:
                raise CollectiveMismatch(
                    f"{name}: batch, heads, features, dtype, mask, dropout, causality, scale "
                    "and requires_grad must be equal on all ranks",
                    {rank: f"numbers {list(rec[4:])}" for rank, rec in enumerate(records)},
                )
            counts, keys = (tuple(record[i] for record in records) for i in (1, 2))
            for rank, record in enumerate(records):
                self._check_columns(rank, record[3], sum(keys))
            return counts, keys
        if problem is not None:
            raise problem
        key_sizes = sizes if key_sizes is None else key_sizes
        counts = check_sizes(sizes, comm.size, name)
        keys = check_sizes(key_sizes, comm.size, name, what="key_sizes")
        for what, count, each in (
            ("sizes", tokens[0], counts),
            ("key_sizes", tokens[1], keys),
        ):
            if each[comm.rank] != count:
                raise PartitionError.because(
                    f"{name}({what}={list(each)}) on rank {comm.rank}",
                    f"{count} tokens",
                    f"{what}[{comm.rank}] = {each[comm.rank]} != {count}",
                    f"{what}=None to learn them",
                )
        self._check_columns(comm.rank, columns, sum(keys))
        return counts, keys

    def _alike(self) -> list[int]:
        """Return numbers that must be equal on all ranks."""
        q, v, inputs = self.query, self.value, [self.query, self.key, self.value]
        masks = [] if self.mask is None else [self.mask]
        needs = [int(x.requires_grad and torch.is_grad_enabled()) for x in inputs + masks]
        options = (q.dtype, self.dropout_p, self.is_causal, self.scale, self.enable_gqa)
        flags = int("".join(map(str, needs)), 2) * 2 + len(masks)
        heads = [_heads(x) for x in inputs]
        digest = zlib.crc32(repr(options).encode())
        return [math.prod(q.shape[:-3]), *heads, q.shape[-1], v.shape[-1], flags, digest]

    def _refusals(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with own arguments, and what to do."""
        q, k, v, mask = self.query, self.key, self.value, self.mask
        if min(q.ndim, k.ndim, v.ndim) < 2 or not q.ndim == k.ndim == v.ndim:
            yield (
                "as many dims of each are needed, two at least",
                "[batch, heads, tokens, features]",
            )
        if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
            yield "one floating-point dtype is needed", "key.to(query.dtype)"
        if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
            yield "features or tokens differ", "keys with the features of queries, a value for each"
        heads, ranks = [_heads(x) for x in (q, k, v)], self.comm.size
        is_shared = self.enable_gqa and heads[1] == heads[2] > 0 and heads[0] % heads[1] == 0
        if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3] or not (
            heads[0] == heads[1] == heads[2] or is_shared
        ):
            hint = "key.expand(...); enable_gqa=True for heads of keys that divide those of queries"
            yield f"heads {heads}, or batches, differ", hint
        if not isinstance(self.is_causal, bool):
            yield f"is_causal={self.is_causal!r}: True or False is needed", "is_causal=True"
        if not 0 <= self.dropout_p <= 1:
            yield f"dropout_p={self.dropout_p} is no part of the weights", "dropout_p=0.1"
        if self.is_causal and mask is not None:
            yield "attn_mask and is_causal=True", f"a mask that is causal itself: {_MASK}"
        if mask is not None and (
            not 2 <= mask.ndim <= max(q.ndim, 2)
            or not (mask.dtype == torch.bool or mask.is_floating_point())
            or any(n not in (1, m) for n, m in zip(mask.shape[-2::-1], q.shape[-2::-1]))  # noqa: B905
        ):
            yield f"a mask of {mask.dtype}, {list(mask.shape)}", f"True, or numbers to add: {_MASK}"
        if self.name == "ulysses_attention" and any(n % ranks for n in heads):
            rest = ", ".join(f"{n} % {ranks} = {n % ranks}" for n in heads[:2])
            yield f"heads over {ranks} ranks: {rest}", "ring_attention, for any number of heads"

    def _check_columns(self, rank: int, columns: int, keys: int) -> None:
        """Raise unless the mask of a rank has a column for each key."""
        if columns not in (1, keys):
            raise PartitionError.because(
                f"{self.name} with a mask of {columns} columns on rank {rank}",
                f"{keys} keys on all ranks together",
                f"{columns} != {keys}",
                _MASK,
            )


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1

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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.comm import Communicator, world
from unisono.comm.arguments import check_sizes
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError
from unisono.expect import expect
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
    comm = world() if comm is None else comm
    asked = _Call("ring_attention", (query, key, value), attn_mask, dropout_p, is_causal, scale,
                  enable_gqa, comm)  # fmt: skip
    sizes, key_sizes = asked.agreed(sizes, key_sizes)
    plan = AttentionPlan(
        bounds(key_sizes), comm, bounds(sizes)[comm.rank], is_causal, scale_of(query, scale),
        dropout_p, drawn_seed(dropout_p, [comm.rank]),
    )  # fmt: skip
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

    Args:
        query: own queries, [..., heads, tokens, features].
        key: own keys, with the batch of the queries.
        value: own values.
        attn_mask: of own queries and *all* keys, broadcast to [..., heads, own tokens, all keys];
            its rows travel too.
        dropout_p: part of the weights that is dropped; see `ring_attention`.
        is_causal: query i of the sequence sees keys up to i.
        scale: factor of the scores; default 1 / sqrt(features).
        enable_gqa: heads of keys and values divide those of the queries and are shared by them.
        sizes: queries of each rank; without them one small exchange learns them.
        key_sizes: keys of each rank; default: `sizes`.
        comm: the ranks; default the world.

    Raises:
        PartitionError: shapes that do not fit each other, or heads that do not divide.
        CollectiveMismatch: ranks ask for different things.
    """
    comm = world() if comm is None else comm
    asked = _Call("ulysses_attention", (query, key, value), attn_mask, dropout_p, is_causal, scale,
                  enable_gqa, comm)  # fmt: skip
    sizes, key_sizes = asked.agreed(sizes, key_sizes)
    plan = AttentionPlan(
        (0, sum(key_sizes)), None, 0, is_causal, scale_of(query, scale),
        dropout_p, drawn_seed(dropout_p, [comm.rank]),
    )  # fmt: skip
    return by_heads(query, key, value, attn_mask, plan, sizes, key_sizes, comm)


@dataclass(frozen=True)
class _Call:
    """A call as the user made it, and the checks of it."""

    name: str
    tensors: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    comm: Communicator

    def agreed(
        self, sizes: Sequence[int] | None, key_sizes: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the queries and keys of each rank; raise, on all ranks alike, if they do not fit.

        Collective where sizes are not given.
        """
        comm = self.comm
        for what, x in zip(("query", "key", "value"), self.tensors, strict=True):
            expect(what, x, Tensor, f"{what}=torch.zeros(batch, heads, tokens, features)")
            check_call(x, comm, self.name)
        problem = self._problem()
        tokens = [x.shape[-2] if x.ndim > 1 else 0 for x in self.tensors[:2]]
        if sizes is not None:
            if problem is not None:
                raise problem
            found = check_sizes(sizes, comm.size, self.name)
            given = check_sizes(
                sizes if key_sizes is None else key_sizes, comm.size, self.name, what="key_sizes"
            )
            for what, own, each in (("sizes", tokens[0], found), ("key_sizes", tokens[1], given)):
                if each[comm.rank] != own:
                    raise PartitionError.because(
                        f"{self.name}({what}={list(each)}) on rank {comm.rank}",
                        f"{own} tokens",
                        f"{what}[{comm.rank}] = {each[comm.rank]} != {own}",
                        f"{what}=None to learn them",
                    )
        else:
            columns = 1 if self.mask is None or not self.mask.ndim else self.mask.shape[-1]
            record = (int(problem is not None), *tokens, columns, *self._alike())
            records = comm.all_gather_ints(record)
            if problem is not None:
                raise problem
            wrong = next((r for r, rec in enumerate(records) if rec[0]), None)
            if wrong is not None:
                raise PartitionError.because(
                    f"{self.name} over {comm.size} ranks",
                    f"rank {wrong} refused its arguments; its own error says why",
                )
            if len({tuple(rec[4:]) for rec in records}) > 1:
                raise CollectiveMismatch(
                    f"{self.name}: batch, heads, features, dtype, mask, dropout, causality, scale "
                    "and requires_grad must be equal on all ranks",
                    {r: f"numbers {list(rec[4:])}" for r, rec in enumerate(records)},
                )
            found = tuple(rec[1] for rec in records)
            given = tuple(rec[2] for rec in records)
            for rank, rec in enumerate(records):
                self._check_columns(rank, rec[3], sum(given))
            return found, given
        if self.mask is not None:
            self._check_columns(comm.rank, self.mask.shape[-1], sum(given))
        return found, given

    def _alike(self) -> list[int]:
        """Return numbers that must be equal on all ranks."""
        q, _, v = self.tensors
        inputs = [*self.tensors] if self.mask is None else [*self.tensors, self.mask]
        needs = [int(x.requires_grad and torch.is_grad_enabled()) for x in inputs]
        heads = [x.shape[-3] if x.ndim > 2 else 1 for x in self.tensors]
        options = (q.dtype, self.dropout_p, self.is_causal, self.scale, self.enable_gqa)
        flags = int("".join(map(str, needs)), 2) * 2 + int(self.mask is not None)
        batch = math.prod(q.shape[:-3])
        return [batch, *heads, q.shape[-1], v.shape[-1], flags, zlib.crc32(repr(options).encode())]

    def _problem(self) -> UnisonoError | None:
        """Return what is wrong with own arguments."""
        (q, k, v), name = self.tensors, self.name
        shapes = f"query {list(q.shape)}, key {list(k.shape)}, value {list(v.shape)}"
        if min(q.ndim, k.ndim, v.ndim) < 2 or not q.ndim == k.ndim == v.ndim:
            return PartitionError.because(
                f"{name} of {shapes}", "as many dims of each are needed, two at least", None,
                "[batch, heads, tokens, features]",
            )  # fmt: skip
        if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
            return PartitionError.because(
                f"{name} of {q.dtype}, {k.dtype} and {v.dtype}",
                "one floating-point dtype is needed", None, "key.to(query.dtype)",
            )  # fmt: skip
        if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
            return PartitionError.because(
                f"{name} of {shapes}",
                None,
                f"features of queries and keys {q.shape[-1]}, {k.shape[-1]}; "
                f"tokens of keys and values {k.shape[-2]}, {v.shape[-2]}",
                "keys with the features of the queries, a value for each key",
            )
        heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
        fits = heads[0] == heads[1] == heads[2] or (
            self.enable_gqa and heads[1] == heads[2] > 0 and heads[0] % heads[1] == 0
        )
        if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3] or not fits:
            return PartitionError.because(
                f"{name} of {shapes}",
                f"batches {list(q.shape[:-3])}, {list(k.shape[:-3])}, {list(v.shape[:-3])}, "
                f"heads {heads}",
                None,
                "key.expand(...) to the batch of the queries; enable_gqa=True for heads of keys "
                "that divide those of queries",
            )
        if not isinstance(self.is_causal, bool):
            return PartitionError.because(
                f"{name}(is_causal={self.is_causal!r})", "True or False", None, "is_causal=True"
            )
        if not 0 <= self.dropout_p <= 1:
            return PartitionError.because(
                f"{name}(dropout_p={self.dropout_p})", "a part of the weights", None,
                "dropout_p=0.1",
            )  # fmt: skip
        if self.is_causal and self.mask is not None:
            return PartitionError.because(
                f"{name}(attn_mask=..., is_causal=True)",
                "one mask or the other, as in scaled_dot_product_attention",
                None,
                "a mask that is causal itself: rows of own queries, columns of all keys",
            )
        mask = self.mask
        if mask is not None and (
            not 2 <= mask.ndim <= max(q.ndim, 2)
            or not (mask.dtype == torch.bool or mask.is_floating_point())
            or any(n not in (1, m) for n, m in zip(mask.shape[-2::-1], q.shape[-2::-1]))  # noqa: B905
        ):
            return PartitionError.because(
                f"{name} with a mask of shape {list(mask.shape)} and {mask.dtype}",
                f"scores of shape {[*q.shape[:-1], 'all keys']}",
                None,
                "True and False, or numbers to add: the rows that belong to own queries, with "
                "columns for all keys",
            )
        if name == "ulysses_attention" and any(n % self.comm.size for n in heads):
            return PartitionError.because(
                f"{name} of {heads[0]} heads (keys: {heads[1]}) over {self.comm.size} ranks",
                "each rank takes the same number of heads",
                f"{heads[0]} % {self.comm.size} = {heads[0] % self.comm.size}, "
                f"{heads[1]} % {self.comm.size} = {heads[1] % self.comm.size}",
                "ring_attention, which takes any number of heads",
            )
        return None

    def _check_columns(self, rank: int, columns: int, keys: int) -> None:
        """Raise unless the mask of a rank has a column for each key."""
        if columns not in (1, keys):
            raise PartitionError.because(
                f"{self.name} with a mask of {columns} columns on rank {rank}",
                f"{keys} keys on all ranks together",
                f"{columns} != {keys}",
                "the rows of the mask that belong to own queries, with columns for all keys",
            )

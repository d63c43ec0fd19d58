"""The collectives of a communicator: what is added up, what is copied, and Python objects.

Each verb prepares a `PreparedCall`. `Collectives` performs it and returns the result; `comm.start`
leaves it under way and returns a `Pending`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from unisono.comm import seal
from unisono.comm.arguments import (
    bytes_of,
    check_dim,
    check_rank,
    check_sizes,
    check_target,
    check_tensor,
    dense,
    do_not_fit,
    pack_shape,
    rows_back,
    rows_first,
    split_evenly,
    unpack_shape,
)
from unisono.comm.health.watchdog import seal_of
from unisono.comm.perform import Performer, PreparedCall, verb
from unisono.comm.reductions import check_op, decode, encode
from unisono.errors import PartitionError, UnisonoError
from unisono.torch_private import increment_version

Like = Tensor | tuple[Sequence[int], torch.dtype]
"""A tensor to imitate, or its shape and dtype."""


class Collectives(Performer):
    """Collectives over the ranks of a communicator."""

    # -- reductions -----------------------------------------------------------------------------

    @verb
    def all_reduce(
        self, x: Tensor, op: str = "sum", *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor]:
        """Return the reduction of `x` over all ranks. Collective over the communicator.

        Args:
            x: tensor of the same shape and dtype on every rank.
            op: sum, mean, product, min, max, and, or, xor, or sum64 (float32 added in float64).
            timeout_s: deadline of this call.

        Returns:
            The same bits on every rank; `x` is unchanged.
        """
        check_tensor(x, self._device_for(x), "all_reduce")
        out = x.detach().clone(memory_format=torch.contiguous_format)
        return self._reduced(out, x, op, timeout_s)

    @verb
    def all_reduce_(
        self, x: Tensor, op: str = "sum", *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor]:
        """Replace `x` by its reduction over all ranks; see `all_reduce`. Returns `x`."""
        check_target(x, self._device_for(x), "all_reduce_")
        return self._reduced(x, x, op, timeout_s)

    def _reduced(
        self, out: Tensor, x: Tensor, op: str, timeout_s: float | None
    ) -> PreparedCall[Tensor]:
        """Prepare the reduction of `out`, which is `x` or a copy of it."""
        check_op(op, x.dtype)
        is_usual = x.device.type == self.device.type
        engine = self._engine if is_usual else self._engine_for(x.device)
        target = out.detach() if out.requires_grad else out
        is_plain = target.is_contiguous() and target.dtype in engine.reduces and not target.is_neg()
        work = target if is_plain else dense(encode(target, op))
        leaves = out is x and leaves_graph(x, "all_reduce_")
        call = self._described("all_reduce", x, op)
        call.sent = call.received = work.nbytes

        def finish() -> Tensor:
            if work is not target:
                target.copy_(decode(work, op, target.dtype))
            if out is x:
                replaced(out, leaves)
            return out

        kernel = partial(engine.all_reduce_, work, op)
        end = [out].pop if is_plain and out is not x else finish
        return PreparedCall(call, kernel, end, timeout_s, verify=target)

    @verb
    def reduce(
        self, x: Tensor, dst: int = 0, op: str = "sum", *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor | None]:
        """Return the reduction of `x` on rank `dst` of the communicator, None on the others.

        Collective over the communicator. `x` is unchanged everywhere.
        """
        check_tensor(x, self._device_for(x), "reduce")
        check_op(op, x.dtype)
        dst = check_rank(dst, self.size, "dst", "reduce")
        # A private copy: backends use the tensor as scratch space on the other ranks.
        work = dense(encode(x.detach(), op).clone())
        call = self._described("reduce", x, op, root=dst)
        call.sent = work.nbytes

        def finish() -> Tensor | None:
            return decode(work, op, x.dtype) if self.rank == dst else None

        kernel = partial(self._engine_for(x.device).reduce_, work, dst, op)
        return PreparedCall(call, kernel, finish, timeout_s)

    @verb
    def reduce_scatter(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        op: str = "sum",
        *,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Return this rank's block along `dim` of the reduction over all ranks.

        Collective over the communicator. `x` has the same shape on every rank; `sizes` are the W
        block sizes along `dim`, balanced when None.
        """
        check_tensor(x, self._device_for(x), "reduce_scatter")
        check_op(op, x.dtype)
        dim = check_dim(dim, x, "reduce_scatter")
        lengths = self._block_sizes(sizes, x.shape[dim] if x.dim() else 1, "reduce_scatter")
        return self._reduced_block(x, dim, lengths, op, timeout_s)

    def _reduced_block(
        self,
        x: Tensor,
        dim: int,
        lengths: tuple[int, ...],
        op: str = "sum",
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Prepare `reduce_scatter` with arguments that were checked before."""
        rows = rows_first(x, dim)
        work = encode(rows, op)
        out = work.new_empty((lengths[self.rank], *work.shape[1:]))
        call = self._described("reduce_scatter", x, op, dim=dim, sizes=lengths)
        call.sent, call.received = work.nbytes, out.nbytes
        alike = hash((dim, rows.shape))

        def finish() -> Tensor:
            return rows_back(decode(out, op, x.dtype), dim)

        ins = work.split_with_sizes(lengths)
        engine = self._engine_for(x.device)
        kernel = partial(engine.reduce_scatter, out, ins, op, alike=alike)
        return PreparedCall(call, kernel, finish, timeout_s)

    # -- copies ---------------------------------------------------------------------------------

    @verb
    def broadcast(
        self,
        x: Tensor | None,
        src: int = 0,
        *,
        like: Like | None = None,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Return the tensor of rank `src` on every rank. Collective over the communicator.

        Receivers pass a tensor of the same shape and dtype, or None with `like=(shape, dtype)`.
        """
        src = check_rank(src, self.size, "src", "broadcast")
        if self.rank == src:
            x = self._at_source(x, src, "broadcast")
            out = x.detach().clone(memory_format=torch.contiguous_format)
            return self._broadcast_into(out, out, x, src, timeout_s)
        if x is not None:
            check_tensor(x, self.device, "broadcast")
        out = self._empty(x if x is not None else like, "broadcast")
        return self._broadcast_into(out, out, out, src, timeout_s)

    @verb
    def broadcast_(
        self, x: Tensor, src: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[Tensor]:
        """Replace `x` on every rank by the tensor of rank `src`; returns `x`."""
        src = check_rank(src, self.size, "src", "broadcast_")
        check_target(x, self._device_for(x), "broadcast_")
        return self._broadcast_into(x, dense(x.detach()), x, src, timeout_s)

    def _broadcast_into(
        self, out: Tensor, work: Tensor, x: Tensor | None, src: int, timeout_s: float | None
    ) -> PreparedCall[Tensor]:
        leaves = out is x and self.rank != src and leaves_graph(out, "broadcast_")
        call = self._described("broadcast", x, root=src)
        nbytes = work.nbytes
        call.sent, call.received = (nbytes, 0) if self.rank == src else (0, nbytes)

        def finish() -> Tensor:
            if work.data_ptr() != out.data_ptr() and self.rank != src:
                out.detach().copy_(work)
            if out is x and self.rank != src:
                replaced(out, leaves)
            return out

        kernel = partial(self._engine_for(work.device).broadcast_, work, src)
        return PreparedCall(call, kernel, finish, timeout_s)

    @verb
    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Return the blocks of all ranks joined along `dim`, on every rank.

        Collective over the communicator. Blocks may differ along `dim` and may be empty there;
        `sizes` are their W lengths, learned by one small exchange when None.
        """
        check_tensor(x, self._device_for(x), "all_gather")
        dim = check_dim(dim, x, "all_gather")
        lengths = self._lengths_or(sizes, x, dim, "all_gather", timeout_s)
        return self._joined(x, dim, lengths, timeout_s)

    def _joined(
        self,
        x: Tensor,
        dim: int,
        lengths: Sequence[int],
        timeout_s: float | None = None,
        dst: int | None = None,
    ) -> PreparedCall[Any]:
        """Prepare `all_gather`, or `gather` at `dst`, with arguments that were checked before."""
        rows = rows_first(x, dim)
        op = "all_gather" if dst is None else "gather"
        call = self._described(op, x, root=dst, dim=dim, sizes=lengths)
        call.sent = rows.nbytes
        engine = self._engine_for(x.device)
        if dst not in (None, self.rank):
            return PreparedCall(
                call, partial(engine.gather, None, rows, dst), lambda: None, timeout_s
            )
        out = rows.new_empty((sum(lengths), *rows.shape[1:]))
        call.received = out.nbytes - (call.sent if dst is None else 0)
        if dst is None:
            kernel = partial(engine.all_gather_rows, out, lengths, rows, alike=dim)
        else:
            kernel = partial(engine.gather, out.split_with_sizes(lengths), rows, dst)
        return PreparedCall(call, kernel, partial(rows_back, out, dim), timeout_s)

    @verb
    def gather(
        self,
        x: Tensor,
        dst: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor | None]:
        """Return the blocks of all ranks joined along `dim` on rank `dst`, None on the others.

        Collective over the communicator; sizes as in `all_gather`.
        """
        dst = check_rank(dst, self.size, "dst", "gather")
        check_tensor(x, self._device_for(x), "gather")
        dim = check_dim(dim, x, "gather")
        lengths = self._lengths_or(sizes, x, dim, "gather", timeout_s)
        return self._joined(x, dim, lengths, timeout_s, dst)

    @verb
    def scatter(
        self,
        x: Tensor | None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        like: Like | None = None,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Return this rank's block along `dim` of the tensor of rank `src`.

        Collective over the communicator. Only `src` needs a tensor; the others pass None. `sizes`
        (on `src`) are the W block lengths along `dim`, balanced when None. With `sizes` and `like`
        (the own block: a tensor like it, or its shape and dtype) on every rank, nothing has to be
        told beforehand.
        """
        src = check_rank(src, self.size, "src", "scatter")
        refused: UnisonoError | None = None
        rows: Tensor | None = None
        lengths: tuple[int, ...] = (0,) * self.size
        if self.rank == src:
            try:
                x = self._at_source(x, src, "scatter")
                dim = check_dim(dim, x, "scatter")
                rows = rows_first(x, dim)
                lengths = self._block_sizes(sizes, rows.shape[0], "scatter")
            except UnisonoError as error:
                refused = error
        if like is not None and sizes is not None:
            if refused is not None:
                raise refused
            block = self._empty(like, "scatter")
            dim = check_dim(dim, block, "scatter")
            block = rows_first(block, dim)
            lengths = check_sizes(sizes, self.size, "scatter")
            shape, dtype = tuple(block.shape), block.dtype
            if rows is not None and (rows.shape[1:], rows.dtype) != (block.shape[1:], dtype):
                raise PartitionError.because(
                    f"scatter of rows of {list(rows.shape[1:])}, {rows.dtype}",
                    f"like has rows of {list(shape[1:])}, {dtype}",
                    None,
                    "like is what this rank is to get: a block of the tensor of the source",
                )
        else:
            # Shape, dtype, lengths and dim of what is scattered, and whether `src` refuses.
            whole = rows if rows is not None else torch.empty(0, device="cpu")
            record = [refused is not None, dim, *lengths, *pack_shape(whole.shape, whole.dtype)]
            is_refused, dim, *rest = self._agree("scatter", record, timeout_s, root=src)[src]
            if is_refused:
                raise refused or PartitionError.because(
                    f"scatter from rank {src} of the group",
                    "the source refused its arguments; its own error says why",
                )
            lengths = tuple(rest[: self.size])
            shape, dtype = unpack_shape(rest[self.size :])
        call = self._described("scatter", x, root=src, dim=dim, sizes=lengths)
        out = torch.empty((lengths[self.rank], *shape[1:]), dtype=dtype, device=self.device)
        call.received = out.nbytes
        ins = None if rows is None else rows.split_with_sizes(lengths)
        kernel = partial(self._engine.scatter, out, ins, src)
        return PreparedCall(call, kernel, lambda: rows_back(out, dim), timeout_s)

    def _at_source(self, x: Tensor | None, src: int, verb: str) -> Tensor:
        """Return the tensor that this rank, the source, sends."""
        if x is None:
            request, problem = f"{verb}(None)", f"rank {src} is the source"
            raise UnisonoError.because(request, problem, None, "pass the tensor there")
        return check_tensor(x, self.device, verb)

    @verb
    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> PreparedCall[Tensor]:
        """Send a block of rows to every rank and return the rows received, in rank order.

        Collective over the communicator.

        Args:
            x: rows for rank 0, 1, ... along dim 0.
            send_sizes: rows for each rank; equal shares when None.
            recv_sizes: rows from each rank; learned by one small exchange when None.
            timeout_s: deadline of this call.
        """
        rows = rows_first(check_tensor(x, self._device_for(x), "all_to_all"), 0)
        if send_sizes is None and rows.shape[0] % self.size:
            raise PartitionError.because(
                f"all_to_all of {rows.shape[0]} rows in equal shares",
                f"{self.size} ranks",
                f"{rows.shape[0]} / {self.size} = {rows.shape[0] / self.size:.2f}",
                "send_sizes=[...] with one entry per rank",
            )
        sent = self._block_sizes(send_sizes, rows.shape[0], "all_to_all", what="send_sizes")
        if recv_sizes is None:
            got = tuple(row[self.rank] for row in self._agree("all_to_all", sent, timeout_s))
        else:
            got = check_sizes(recv_sizes, self.size, "all_to_all", what="recv_sizes")
        out = rows.new_empty((sum(got), *rows.shape[1:]))
        call = self._described("all_to_all", x, dim=0, sizes=sent, recv_sizes=got)
        call.sent, call.received = rows.nbytes, out.nbytes
        outs, ins = out.split_with_sizes(got), rows.split_with_sizes(sent)
        kernel = partial(self._engine_for(rows.device).all_to_all, outs, ins)
        return PreparedCall(call, kernel, lambda: out, timeout_s)

    @verb
    def barrier(self, *, timeout_s: float | None = None) -> PreparedCall[None]:
        """Return when every rank has called it; on time-out the error names the missing ranks."""
        call = self._described("barrier", None)
        return PreparedCall(call, self._engine.barrier, lambda: None, timeout_s)

    def block_lengths(
        self, x: Tensor, dim: int = 0, *, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Return the lengths along `dim` of the blocks of all ranks. Collective.

        Raises:
            PartitionError: on all ranks, if the blocks could not be joined along `dim`.
        """
        dim = check_dim(dim, check_tensor(x, self._device_for(x), "block_lengths"), "block_lengths")
        return self._lengths(x, dim, "block_lengths", timeout_s)

    def _lengths(
        self, x: Tensor, dim: int, verb: str, timeout_s: float | None = None
    ) -> tuple[int, ...]:
        """Learn the block lengths of all ranks; what cannot be joined is refused on all alike."""
        shape = x.shape or (1,)
        rest = (*shape[:dim], *shape[dim + 1 :])
        record = (*pack_shape((shape[dim], *rest), x.dtype), dim)
        records = self._agree(verb, record, timeout_s)
        if any(other[1:] != records[0][1:] for other in records):
            raise do_not_fit(verb, self.ranks, records)
        return tuple(other[0] for other in records)

    def _lengths_or(
        self,
        sizes: Sequence[int] | None,
        x: Tensor,
        dim: int,
        verb: str,
        timeout_s: float | None,
    ) -> tuple[int, ...]:
        """Return the block lengths of all ranks: those given, else learned."""
        if sizes is None:
            return self._lengths(x, dim, verb, timeout_s)
        lengths, rows = check_sizes(sizes, self.size, verb), x.shape[dim] if x.dim() else 1
        if lengths[self.rank] != rows:
            raise PartitionError.because(
                f"{verb}(sizes={list(lengths)}) on rank {self.rank}",
                f"this rank's block has {rows} rows",
                f"sizes[{self.rank}] = {lengths[self.rank]} != {rows}",
            )
        return lengths

    def _block_sizes(
        self, sizes: Sequence[int] | None, rows: int, verb: str, what: str = "sizes"
    ) -> tuple[int, ...]:
        if sizes is None:
            return split_evenly(rows, self.size)
        return check_sizes(sizes, self.size, verb, total=rows, what=what)

    def _empty(self, like: Like | None, verb: str) -> Tensor:
        if isinstance(like, Tensor):
            return torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if isinstance(like, tuple) and len(like) == 2 and isinstance(like[1], torch.dtype):
            return torch.empty(tuple(like[0]), dtype=like[1], device=self.device)
        raise UnisonoError.because(
            f"{verb} on rank {self.rank} of something like {like!r}",
            "neither a tensor nor (shape, dtype) to know what arrives",
            None,
            f"{verb}(..., like=((3, 4), torch.float32))",
        )

    # -- Python objects: pickled by cloudpickle, small things only -------------------------------

    @verb
    def all_gather_object(
        self, obj: Any, *, timeout_s: float | None = None
    ) -> PreparedCall[list[Any]]:
        """Return the objects of all ranks, in rank order, on every rank. Collective."""
        pickled = self._pickled(obj)
        sizes = self._byte_counts("all_gather_object", pickled, timeout_s)
        gathered = self._joined(pickled, 0, sizes, timeout_s)
        return gathered.then(lambda raw: self._unpickled(raw, sizes))

    @verb
    def gather_object(
        self, obj: Any, dst: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[list[Any] | None]:
        """Return the objects of all ranks on rank `dst`, None on the others. Collective."""
        dst = check_rank(dst, self.size, "dst", "gather_object")
        pickled = self._pickled(obj)
        sizes = self._byte_counts("gather_object", pickled, timeout_s)
        gathered = self._joined(pickled, 0, sizes, timeout_s, dst)
        return gathered.then(lambda raw: None if raw is None else self._unpickled(raw, sizes))

    @verb
    def broadcast_object(
        self, obj: Any, src: int = 0, *, timeout_s: float | None = None
    ) -> PreparedCall[Any]:
        """Return the object of rank `src` on every rank; the others' is ignored. Collective."""
        src = check_rank(src, self.size, "src", "broadcast_object")
        raw = self._pickled(obj) if self.rank == src else None
        count = self._byte_counts("broadcast_object", raw, timeout_s)[src]
        if raw is None:
            raw = torch.empty(count, dtype=torch.uint8, device="cpu")
        sent = self._broadcast_into(raw, raw, raw, src, timeout_s)
        return sent.then(lambda raw: self._unpickled(raw, [count], src)[0])

    @verb
    def all_equal(self, value: Any, *, timeout_s: float | None = None) -> PreparedCall[bool]:
        """Return whether all ranks hold an equal value: same type and content. Collective.

        Tensors are compared by dtype, shape and bits, dicts and sets in any order, other values by
        their pickled form; only a digest travels.
        """
        digest = torch.tensor([_digest(value)], dtype=torch.int64, device="cpu")
        gathered = replace(self._joined(digest, 0, [1] * self.size, timeout_s), is_quiet=True)
        return gathered.then(lambda rows: bool((rows == rows[0]).all()))

    def _pickled(self, obj: Any) -> Tensor:
        """Return an object as bytes, signed by this rank: nothing else is unpickled by others."""
        data = cloudpickle.dumps(obj)
        if self.size > 1:
            signer = seal_of(self._entry.key)
            signer.check_alike(self.ranks, self.timeout_s)
            data = signer.sign(data, f"object/{self._entry.key}/{self.rank}")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _unpickled(self, raw: Tensor, sizes: Sequence[int], first: int = 0) -> list[Any]:
        """Undo `_pickled` of the ranks from `first` on; nothing unsigned is unpickled."""
        objects: list[Any] = []
        for source, part in enumerate(raw.split(list(sizes)), first):
            data: bytes | None = part.numpy().tobytes()
            if self.size > 1:
                place = f"object/{self._entry.key}/{source}"
                data = seal_of(self._entry.key).verified(data, place)
            if data is None:
                raise seal.refused(f"an object of rank {source} in {self._entry.name}")
            objects.append(pickle.loads(data))
        return objects

    def _byte_counts(self, verb: str, pickled: Tensor | None, timeout_s: float | None) -> list[int]:
        count = 0 if pickled is None else pickled.numel()
        return [n for (n,) in self._agree(verb, [count], timeout_s, is_pollable=True)]


def all_reduce_together(
    comm: Collectives, tensors: Sequence[Tensor], op: str = "sum", max_mb: float = 1.0
) -> None:
    """Replace tensors by their reductions: one call for each `max_mb` of small ones of a dtype.

    Collective over the communicator. No two of the tensors may share memory.
    """
    batches: dict[torch.dtype, list[Tensor]] = {}

    def flush(batch: list[Tensor]) -> None:
        flat = torch.cat([x.reshape(-1) for x in batch])
        comm.all_reduce_(flat, op)
        for x, part in zip(batch, flat.split([x.numel() for x in batch]), strict=True):
            x.copy_(part.view(x.shape))

    for x in tensors:
        if x.nbytes > max_mb * 2**20:
            comm.all_reduce_(x, op)
            continue
        batch = batches.setdefault(x.dtype, [])
        if sum(other.nbytes for other in batch) + x.nbytes > max_mb * 2**20:
            flush(batch)
            batch.clear()
        batch.append(x)
    for batch in batches.values():
        if batch:
            flush(batch)


def leaves_graph(x: Tensor, verb: str) -> bool:
    """Whether a tensor whose values a verb replaces is part of a graph, which it then leaves."""
    if x.grad_fn is None or not torch.is_grad_enabled():
        return False
    if x._is_view():
        raise UnisonoError.because(
            f"{verb} of a view of a tensor in a graph of autograd",
            "what is replaced has no gradient, and a view cannot leave the graph alone",
            None,
            f"{verb}(x.detach()), or {verb.removesuffix('_')}(x), which returns a new tensor",
        )
    return True


def replaced(x: Tensor, leaves: bool) -> None:
    """Tell autograd that the values of `x` are new: what it saved of them must not be used."""
    increment_version((x,))
    if leaves:
        x.detach_()


def _digest(value: Any) -> list[int]:
    digest = hashlib.sha256(_canonical(value)).digest()
    return [int.from_bytes(digest[i : i + 7], "big") for i in range(0, 28, 7)]


def _canonical(value: Any) -> bytes:
    if isinstance(value, Tensor):
        flat = bytes_of(dense(value.detach().cpu()))
        return f"{value.dtype}{list(value.shape)}".encode() + flat.numpy().tobytes()
    if isinstance(value, dict):
        items = sorted(_canonical(k) + b":" + _canonical(v) for k, v in value.items())
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, set | frozenset):  # iterated in another order in each process
        return b"set{" + b",".join(sorted(map(_canonical, value))) + b"}"
    if isinstance(value, list | tuple):
        return type(value).__name__.encode() + b"[" + b",".join(map(_canonical, value)) + b"]"
    return cloudpickle.dumps(value)

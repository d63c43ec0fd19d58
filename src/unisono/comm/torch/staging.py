"""From the tensors torch.distributed passes to those an engine takes: contiguous, detached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.arguments import check_sizes, check_writable, dense, is_dense
from unisono.comm.engines.base import Blocks, Engine
from unisono.comm.reductions import check_op
from unisono.errors import CollectiveMismatch, PartitionError, UnisonoError

OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}


def op_name(options: Any) -> str:
    """Return our name of the reduction in an options object of torch.distributed."""
    op = options.reduceOp.op
    if op not in OPS:
        names = ", ".join(OPS.values())
        raise UnisonoError.because(f"a reduction with {op}", f"known here: {names}")
    return OPS[op]


def source(x: Tensor) -> Tensor:
    """Return the values of `x` as an engine reads them; `x` itself where that is possible."""
    check_dense(x)
    return dense(x.detach() if x.requires_grad else x)


class Targets:
    """Tensors an engine writes to, standing in for those the caller wants filled.

    Args:
        originals: the caller's tensors.
        keep: whether their present values matter (in-place collectives).
    """

    def __init__(self, originals: Sequence[Tensor], *, keep: bool = False) -> None:
        self.originals = list(originals)
        self.tensors: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        for x in originals:
            check_dense(x)
            check_writable(x, "a collective")
            if x.requires_grad:
                x = x.detach()
            if is_dense(x):
                self.tensors.append(x)
                continue
            stand_in = torch.empty_like(x, memory_format=torch.contiguous_format)
            if keep:
                stand_in.copy_(x)
            self._copies.append((x, stand_in))
            self.tensors.append(stand_in)

    def deliver(self) -> None:
        """Copy what stand-ins received to the caller's tensors."""
        for x, stand_in in self._copies:
            x.copy_(stand_in)


def check_dense(x: Tensor) -> None:
    """Refuse what has no plain memory."""
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        kind = "quantised" if x.is_quantized else f"{x.layout} {x.device.type}"
        raise UnisonoError.because(
            f"a collective on a {kind} tensor",
            "only dense tensors with memory can travel",
            None,
            "x.to_dense(), or x.dequantize(), first",
        )


def cut_evenly(x: Tensor, parts: int, what: str) -> list[Tensor]:
    """Return `parts` equal flat pieces of a contiguous tensor."""
    return list(x.view(-1).split_with_sizes(_equal(x.numel(), parts, what, "elements")))


def cut_rows(x: Tensor, sizes: Sequence[int], parts: int, what: str) -> list[Tensor]:
    """Return the blocks of rows of a contiguous tensor; no sizes means equal ones."""
    rows = x if x.dim() else x.view(1)
    if not sizes:
        return list(rows.split_with_sizes(_equal(len(rows), parts, what, "rows")))
    checked = check_sizes(sizes, parts, what, total=len(rows), what="split sizes")
    return list(rows.split_with_sizes(checked))


def _equal(count: int, parts: int, what: str, things: str) -> list[int]:
    if count % parts:
        raise PartitionError.because(
            f"{what} of a tensor with {count} {things} over {parts} ranks",
            f"the {things} do not divide",
            f"{count} % {parts} = {count % parts}",
            "pad the tensor, or use the form with one size or tensor per rank",
        )
    return [count // parts] * parts


def check_count(tensors: Sequence[object], expected: int, what: str, call: str) -> None:
    """Refuse a list that does not hold `wanted` tensors: one per rank, or per input."""
    if len(tensors) != expected:
        raise PartitionError.because(
            f"torch.distributed.{call} with a list of {len(tensors)} {what} tensors",
            f"{expected} are needed: one per rank of the group, or one output per input",
            f"{len(tensors)} != {expected}",
            "one tensor for each, in order",
        )


def check_one_dtype(tensors: Iterable[Tensor], what: str) -> None:
    """Refuse inputs and outputs of unlike dtypes: a transport moves bytes as they are."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UnisonoError.because(
            f"torch.distributed.{what} with tensors of {' and '.join(names)}",
            "its input and output must have one dtype; bytes are moved, not converted",
            f"{' != '.join(names)}",
            "out = torch.empty(shape, dtype=x.dtype), or x.to(out.dtype) first",
        )


def check_same_bytes(out: Tensor, x: Tensor, what: str, times: int = 1) -> None:
    """Refuse an output that does not hold `times` the bytes of its input."""
    if times * x.nbytes != out.nbytes:
        factor = f"{times} * " if times > 1 else ""
        raise PartitionError.because(
            f"{what} of {list(x.shape)} {x.dtype} into {list(out.shape)} {out.dtype}",
            "input and output of this rank have different sizes",
            f"{factor}{x.nbytes} bytes != {out.nbytes} bytes",
        )


def wrong_message(
    x: Tensor, sender: int, nbytes: int | None, tag: int, sent: torch.dtype | None = None
) -> UnisonoError:
    """Return the error for a message that was to fill `x` and cannot.

    Args:
        x: what it was received into.
        sender: world rank that sent it.
        nbytes: its length; None: more than `x` has.
        tag: its tag.
        sent: its dtype, where it is known.
    """
    name, sent = str(x.dtype).removeprefix("torch."), sent or x.dtype
    expected = f"{x.numel()} * {x.element_size()} = {x.nbytes} bytes"
    problem, arithmetic = "the message is longer", f"more than {expected}"
    if nbytes is not None:
        sent_name = str(sent).removeprefix("torch.")
        problem = f"the message has {nbytes / sent.itemsize:g} elements of {sent_name}"
        arithmetic = f"{nbytes} != {expected}" if sent == x.dtype else f"{sent_name} != {name}"
    return CollectiveMismatch.because(
        f"recv of {name} {list(x.shape)} (tag {tag}) from rank {sender}",
        problem,
        arithmetic,
        "recv with the shape and dtype of the tensor that is sent; messages of one tag are taken "
        "in the order in which they were sent",
    )


def check_sparse(xs: Blocks, op: str) -> None:
    """Refuse what has no meaning for elements that are not there."""
    for x in xs:
        if x.layout is not torch.sparse_coo or op not in ("sum", "mean"):
            raise UnisonoError.because(
                f"all_reduce({op}) of {[str(x.layout).removeprefix('torch.') for x in xs]} tensors",
                "of sparse tensors there are sums and means, of all of them or of none",
                None,
                "x.to_dense() first",
            )
        check_op(op, x.dtype)


def all_reduce_sparse_(x: Tensor, op: str, engine: Engine, timeout_s: float) -> None:
    """Replace `x` on every rank by the sum, coalesced; the same bits on all ranks. Blocking."""
    part = x.detach().coalesce()
    indices, values = part.indices().contiguous(), part.values().contiguous()
    shapes = engine.all_gather_ints((values.shape[0], len(indices), *x.shape), timeout_s=timeout_s)
    if len({shape[1:] for shape in shapes}) > 1:
        raise CollectiveMismatch.because(
            "all_reduce of sparse tensors",
            f"elements, sparse dims and shape on each rank: {shapes}",
        )
    counts = [count for count, *_ in shapes]
    every_index = [indices.new_empty(len(indices), count) for count in counts]
    every_value = [values.new_empty(count, *values.shape[1:]) for count in counts]
    for outs, block in ((every_index, indices), (every_value, values)):
        ticket = engine.all_gather(outs, block, async_op=False, timeout_s=timeout_s)
        if ticket is not None:
            ticket.wait(timeout_s)
    total = torch.sparse_coo_tensor(
        torch.cat(every_index, 1), torch.cat(every_value), x.shape, check_invariants=False
    ).coalesce()
    x.copy_(total / engine.size if op == "mean" else total)  # of another length: not detached

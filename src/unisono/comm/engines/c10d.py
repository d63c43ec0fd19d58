"""All calls of torch.distributed on a process group, over the kernels of an engine.

Kernels see contiguous, detached tensors; what is not, is staged. Both our transports look like this
to torch.
"""

# torch's stubs disagree with torch about the names of these arguments; callers pass them by place.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from unisono.comm.arguments import check_no_overlap
from unisono.comm.call import Call
from unisono.comm.engine import PLAIN_DTYPES
from unisono.comm.engines import staging
from unisono.comm.engines.c10d_calls import CallingGroup, How, Tickets
from unisono.comm.engines.queued import TransportEngine
from unisono.comm.engines.staging import OPS, Targets, cut_evenly, cut_rows, source
from unisono.comm.engines.work import DoneWork
from unisono.comm.perform import Transfer
from unisono.comm.reductions import check_op
from unisono.errors import UnisonoError

Method = TypeVar("Method", bound=Callable[..., Any])


def _by_device(method: Method) -> Method:
    """Send calls with tensors of another device to the inner group for that device."""

    @functools.wraps(method)
    def routed(self: TransportProcessGroup, *args: Any, **kwargs: Any) -> Any:
        x = args[0]
        while isinstance(x, (list, tuple)) and x:
            x = x[0]
        if isinstance(x, Tensor) and not x.is_cpu:
            return getattr(self.inner_group(x.device), method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return routed  # type: ignore[return-value]


class TransportProcessGroup(CallingGroup):
    """What torch.distributed calls on a group."""

    # -- reductions -----------------------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        if opts is None:
            return self._reduce("all_reduce", _listed(tensors), opts)
        x, calls, op = tensors[0], self._calls, OPS.get(opts.reduceOp.op)
        is_usual = len(tensors) == 1 and x.dtype in PLAIN_DTYPES and x.layout is torch.strided
        if calls is None or op is None or opts.asyncOp or not is_usual or not x.is_contiguous():
            return self._reduce("all_reduce", _listed(tensors), opts)
        # One plain tensor that the caller waits for: the shortest way, for small ones.
        check_op(op, x.dtype)
        engine, entry, nbytes = self.unisono_engine, calls._entry, x.numel() * x.element_size()
        call = Call("all_reduce", entry.name, entry.key, 0, x.shape, x.dtype, op)
        call.sent = call.received = nbytes
        timeout_s: float = opts.timeout.total_seconds()
        transfer = Transfer(
            call,
            lambda async_op, deadline: engine.all_reduce_(
                x, op, async_op=async_op, timeout_s=deadline
            ),
            lambda: None,
        )
        own_s = self._deadline_s or self.options._timeout.total_seconds()  # may have been changed
        calls._perform(transfer, timeout_s if timeout_s > 0 else own_s)
        return DoneWork(tensors)

    @_by_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Replace each tensor by its reduction over all ranks."""
        return self._reduce("all_reduce", _listed(tensors), opts)

    @_by_device
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor on the root by its reduction; leaves the others' as they are."""
        root = staging.check_member(int(opts.rootRank), self.size(), "dst", "reduce")
        return self._reduce("reduce", _listed(tensors), opts, root)

    def _reduce(self, name: str, xs: list[Tensor], opts: Any, root: int | None = None) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        for x in xs:
            staging.check_dense(x)
            check_no_overlap(x, name)
            check_op(op, x.dtype)

        targets = Targets(xs, keep=True)

        def kernel(how: How) -> Tickets:
            if root is None:
                return [engine.all_reduce_(x, op, **how) for x in targets.tensors]
            return [engine.reduce_(x, root, op, **how) for x in targets.tensors]

        return self._submit(name, kernel, targets, opts, kind=op, root=root, brought=xs)

    @_by_device
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> Work:
        """Fill each output with the reduction of this rank's input over all ranks."""
        return self._reduce_scatter(list(outputs), inputs, opts)

    @_by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the reduction of this rank's piece of `input` over all ranks."""
        pieces = cut_evenly(source(input), self.size(), "reduce_scatter")
        return self._reduce_scatter([output], [pieces], opts)

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `reduce_scatter_single` for each pair."""
        pieces = [cut_evenly(source(x), self.size(), "reduce_scatter") for x in inputs]
        return self._reduce_scatter(list(outputs), pieces, opts)

    def _reduce_scatter(
        self, outs: list[Tensor], ins: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        op, engine = staging.op_name(opts), self.unisono_engine
        staging.check_pairs(outs, ins, "reduce_scatter")
        for out, blocks in zip(outs, ins, strict=True):
            check_op(op, out.dtype)
            staging.check_one_each(blocks, self.size(), "input", "reduce_scatter")
            staging.check_one_dtype((out, *blocks), "reduce_scatter")
            staging.check_same_bytes([out], [blocks[self.rank()]], "reduce_scatter")

        targets = Targets(outs)
        dense = [[source(block) for block in blocks] for blocks in ins]

        def kernel(how: How) -> Tickets:
            pairs = zip(targets.tensors, dense, strict=True)
            return [engine.reduce_scatter(out, blocks, op, **how) for out, blocks in pairs]

        brought = [block for blocks in ins for block in blocks]
        return self._submit("reduce_scatter", kernel, targets, opts, kind=op, brought=brought)

    # -- moves ----------------------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        """Replace each tensor by the root's."""
        xs, engine = _listed(tensors), self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "src", "broadcast")
        for x in xs:
            check_no_overlap(x, "broadcast")

        targets = Targets(xs, keep=True)

        def kernel(how: How) -> Tickets:
            return [engine.broadcast_(x, root, **how) for x in targets.tensors]

        return self._submit("broadcast", kernel, targets, opts, root=root, brought=xs)

    @_by_device
    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill the outputs with the inputs of all ranks."""
        return self._all_gather(outputs, list(inputs), opts)

    @_by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Fill `output` with the inputs of all ranks, one after the other."""
        return self._all_gather_into([output], [input], opts)

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Do `all_gather_single` for each pair."""
        return self._all_gather_into(list(outputs), list(inputs), opts)

    @_by_device
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill `output_lists[q][i]` with input `i` of rank `q`."""
        for row in output_lists:
            staging.check_pairs(row, inputs, "all_gather_coalesced")
        outputs = [[row[i] for row in output_lists] for i in range(len(inputs))]
        return self._all_gather(outputs, list(inputs), opts)

    def _all_gather(self, outputs: Sequence[Sequence[Tensor]], xs: list[Tensor], opts: Any) -> Work:
        engine = self.unisono_engine
        staging.check_pairs(outputs, xs, "all_gather")
        for outs, x in zip(outputs, xs, strict=True):
            staging.check_one_each(outs, self.size(), "output", "all_gather")
            staging.check_one_dtype((x, *outs), "all_gather")
            staging.check_same_bytes([outs[self.rank()]], [x], "all_gather")

        targets = Targets([out for outs in outputs for out in outs])
        rows = [targets.tensors[i * self.size() : (i + 1) * self.size()] for i in range(len(xs))]
        dense = [source(x) for x in xs]

        def kernel(how: How) -> Tickets:
            pairs = zip(rows, dense, strict=True)
            return [engine.all_gather(outs, x, **how) for outs, x in pairs]

        return self._submit("all_gather", kernel, targets, opts, brought=xs)

    def _all_gather_into(self, outs: list[Tensor], xs: list[Tensor], opts: Any) -> Work:
        engine, size = self.unisono_engine, self.size()
        staging.check_pairs(outs, xs, "all_gather")
        for out, x in zip(outs, xs, strict=True):
            staging.check_joined(out, x, size, "all_gather")

        targets = Targets(outs)
        rows = [cut_evenly(out, size, "all_gather") for out in targets.tensors]
        dense = [source(x) for x in xs]

        def kernel(how: How) -> Tickets:
            pairs = zip(rows, dense, strict=True)
            return [engine.all_gather(pieces, x, **how) for pieces, x in pairs]

        return self._submit("all_gather", kernel, targets, opts, brought=xs)

    @_by_device
    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Fill the outputs of the root with the inputs of all ranks."""
        x, engine = inputs[0], self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "dst", "gather")
        outs = list(outputs[0]) if self.rank() == root else None
        if outs is not None:
            staging.check_one_each(outs, self.size(), "output", "gather")
            staging.check_one_dtype((x, *outs), "gather")

        targets, dense = Targets(outs or []), source(x)
        received = targets.tensors if outs is not None else None

        def kernel(how: How) -> Tickets:
            return [engine.gather(received, dense, root, **how)]

        return self._submit("gather", kernel, targets, opts, root=root, brought=[x])

    @_by_device
    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> Work:
        """Fill the output of each rank with its input on the root."""
        out, engine = outputs[0], self.unisono_engine
        root = staging.check_member(int(opts.rootRank), self.size(), "src", "scatter")
        ins = list(inputs[0]) if self.rank() == root else None
        if ins is not None:
            staging.check_one_each(ins, self.size(), "input", "scatter")
            staging.check_one_dtype((out, *ins), "scatter")

        targets = Targets([out])
        sent = [source(block) for block in ins] if ins is not None else None

        def kernel(how: How) -> Tickets:
            return [engine.scatter(targets.tensors[0], sent, root, **how)]

        return self._submit("scatter", kernel, targets, opts, root=root, brought=ins or [])

    @_by_device
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Fill output `q` with what rank `q` has for this rank."""
        engine, outs, ins = self.unisono_engine, list(outputs), list(inputs)
        staging.check_one_each(outs, self.size(), "output", "all_to_all")
        staging.check_one_each(ins, self.size(), "input", "all_to_all")
        staging.check_one_dtype((*outs, *ins), "all_to_all")

        targets, dense = Targets(outs), [source(block) for block in ins]

        def kernel(how: How) -> Tickets:
            return [engine.all_to_all(targets.tensors, dense, **how)]

        return self._submit("all_to_all", kernel, targets, opts, brought=ins)

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Exchange blocks of rows; no sizes means equal blocks."""
        engine, size, x = self.unisono_engine, self.size(), source(input)
        staging.check_one_dtype((output, x), "all_to_all_single")
        ins = cut_rows(x, input_split_sizes, size, "all_to_all_single input")
        staging.row_sizes(output, output_split_sizes, size, "all_to_all_single output")

        targets = Targets([output])
        outs = cut_rows(targets.tensors[0], output_split_sizes, size, "output")

        def kernel(how: How) -> Tickets:
            return [engine.all_to_all(outs, ins, **how)]

        return self._submit("all_to_all", kernel, targets, opts, brought=[x])

    def barrier(self, opts: Any = None) -> Work:
        """Return when all ranks have come."""
        engine = self.unisono_engine

        def kernel(how: How) -> Tickets:
            return [engine.barrier(**how)]

        return self._submit("barrier", kernel, Targets([]), opts)

    # Names of the same calls in other releases of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- messages -------------------------------------------------------------------------------

    @_by_device
    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group."""
        staging.check_member(dst, self.size(), "dst", "send")
        x = source(tensors[0])
        note = self._message("send", x, to=(dst,))
        ticket = self.unisono_engine.exchange(
            [(dst, x)], [], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        return self._under_way(note, [ticket], Targets([x]))

    @_by_device
    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group."""
        staging.check_member(src, self.size(), "src", "recv")
        targets = Targets(tensors[:1])
        note = self._message("recv", tensors[0], source=(src,))
        ticket = self.unisono_engine.exchange(
            [], [(src, targets.tensors[0])], tag, async_op=True, timeout_s=self._timeout_s(None)
        )
        return self._under_way(note, [ticket], targets)

    @_by_device
    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from whoever sends one first."""
        if not isinstance(self.unisono_engine, TransportEngine):
            raise UnisonoError("a receive in a group of one rank: there is nobody to send")
        targets = Targets(tensors[:1])
        anybody = tuple(rank for rank in range(self.size()) if rank != self.rank())
        note = self._message("recv", tensors[0], source=anybody)
        ticket = self.unisono_engine.receive_any(targets.tensors[0], tag)
        return self._under_way(note, [ticket], targets)


def _listed(tensors: Sequence[Tensor] | Tensor) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)

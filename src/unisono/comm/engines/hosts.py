"""The kernels of a group that spans several hosts: shared memory inside a host, gloo between.

Where every host has as many ranks, each place of a host carries its share over the network; else
the first rank of each host speaks for it. Sums run over the ranks of a host, then over the hosts,
in order; all ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.arguments import bytes_of
from unisono.comm.engines.base import Blocks, Engine, How, Messages, Ticket
from unisono.comm.engines.gloo import MessageTicket, TorchTicket
from unisono.comm.engines.queued import JobQueue, QueuedEngine, SourceTicket, TransportEngine
from unisono.comm.reductions import accumulation_dtype, check_op, reduce_in_rank_order
from unisono.errors import RankFailed, RankTimeout

_SMALL_BYTES = 64 * 1024
"""Up to here hosts exchange whole tensors at once; above, each reduces a share of them."""


class Network:
    """Gloo groups among ranks of one group, whose connections are made when first used.

    Everything travels as bytes, so every dtype does. Errors of gloo become ours.

    Args:
        store: store of the group.
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        timeout_s: deadline of making a connection.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], Any] = {}
        self._making = threading.Lock()
        self.waited_ns = 0
        """Time spent in waits so far, the transfers themselves included."""

    def group(self, members: tuple[int, ...]) -> Any:
        """Return the gloo group of these ranks; each must ask for it before they can talk."""
        with self._making:
            if members not in self._groups:
                name = "gloo/" + "_".join(map(str, members))
                options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = self._timeout
                options._devices = _devices()
                self._groups[members] = dist.ProcessGroupGloo(
                    dist.PrefixStore(name, self._store),
                    members.index(self._rank),
                    len(members),
                    options,
                )
            return self._groups[members]

    def swap(self, members: tuple[int, ...], outs: Blocks, ins: Blocks, timeout_s: float) -> None:
        """All-to-all among `members`: `outs[i]` becomes what member `i` has for this rank."""
        received = [out.nbytes for out in outs]
        sent = [block.nbytes for block in ins]
        send = torch.cat([bytes_of(block) for block in ins])
        receive = send.new_empty(sum(received))
        with self.translating("exchange between hosts", members, timeout_s):
            work = self.group(members).alltoall_base(
                receive, send, received, sent, dist.AllToAllOptions()
            )
            self._wait(work, timeout_s)
        for out, block in zip(outs, receive.split(received), strict=True):
            if out.numel():
                bytes_of(out).copy_(block)

    def spread(self, members: tuple[int, ...], x: Tensor, src: int, timeout_s: float) -> None:
        """Broadcast `x` of `members[src]` to all `members`."""
        if x.numel() == 0:
            return
        with self.translating("broadcast between hosts", members, timeout_s):
            options = dist.BroadcastOptions()
            options.rootRank = src
            self._wait(self.group(members).broadcast([bytes_of(x)], options), timeout_s)

    def _wait(self, work: dist.Work, timeout_s: float) -> None:
        before = time.perf_counter_ns()
        TorchTicket([work]).wait(timeout_s)
        self.waited_ns += time.perf_counter_ns() - before

    @contextlib.contextmanager
    def translating(self, what: str, members: Sequence[int], timeout_s: float) -> Iterator[None]:
        """Turn errors of gloo into ours."""
        me, others = self._ranks[self._rank], [self._ranks[r] for r in members if r != self._rank]
        try:
            yield
        except (RankFailed, RankTimeout):
            raise
        except TimeoutError as error:
            raise RankTimeout(
                f"{what} on rank {me} timed out after {timeout_s:g} s\n  with ranks {others}",
                missing=others,
                op=what,
            ) from error
        except RuntimeError as error:
            raise RankFailed(
                f"{what} on rank {me} broke off: one of ranks {others} has gone\n"
                f"  gloo says: {error}",
                rank=others[0] if len(others) == 1 else None,
            ) from error

    def close(self) -> None:
        """Close all connections."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()


def _devices() -> list[Any]:
    """Return the network devices that torch would take, set to connect two ranks at first use."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device(lazy_init=True)]
    return [gloo.create_device(interface=name, lazy_init=True) for name in names]


class AnyTicket(MessageTicket):
    """A receive from anybody, by gloo."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__([work])
        self._work = work

    @property
    def source(self) -> int:
        """See `SourceTicket`."""
        return self._work._source_rank()


class HostsEngine(QueuedEngine):
    """Kernels of ranks on several hosts.

    Args:
        local: kernels of the ranks of the own host.
        hosts: ranks of each host, in order of their first ranks.
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        network: the way to the other hosts.
        jobs: order of calls, of this rank.
    """

    backend = "shm"
    last_algorithm = "hosts"

    def __init__(
        self,
        local: Engine,
        hosts: tuple[tuple[int, ...], ...],
        rank: int,
        ranks: Sequence[int],
        network: Network,
        jobs: JobQueue,
    ) -> None:
        super().__init__(rank, ranks, jobs)
        self.local = local
        self.network = network
        self._hosts = hosts
        self._here = next(i for i, members in enumerate(hosts) if rank in members)
        self._mine = hosts[self._here]
        self._leaders = tuple(members[0] for members in hosts)
        self._is_even = len({len(members) for members in hosts}) == 1
        self._everybody = tuple(range(len(ranks)))
        self._peers = (
            tuple(members[local.rank] for members in hosts) if self._is_even else self._leaders
        )
        """Ranks of the other hosts that this rank talks to, one a host."""
        # Connects nobody yet, but tells where this rank is to be found: one that waits for its
        # message must not have to ask for the group first.
        network.group(self._everybody)

    # -- reductions -----------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`."""
        check_op(op, x.dtype)
        return self._call("all_reduce", partial(self._all_reduce, x, op), how)

    def _all_reduce(self, x: Tensor, op: str, timeout_s: float) -> None:
        here: How = {"async_op": False, "timeout_s": timeout_s}
        add, wide = _carried(op, x.dtype)
        y = x if wide == x.dtype else x.to(wide)
        flat = y.view(-1)
        if self._is_even:
            shares = list(flat.tensor_split(self.local.size))
            mine = shares[self.local.rank].clone()
            self.local.reduce_scatter(mine, shares, add, **here)
            self._across(mine, add, timeout_s)
            self.local.all_gather(shares, mine, **here)
        else:
            self.local.reduce_(flat, 0, add, **here)
            if self.rank in self._leaders:
                self._across(flat, add, timeout_s)
            self.local.broadcast_(flat, 0, **here)
        if op == "mean":
            y.div_(self.size)
        if y is not x:
            x.copy_(y)

    def _across(self, x: Tensor, op: str, timeout_s: float) -> None:
        """Reduce `x` over the hosts, in their order."""
        count = len(self._peers)
        if x.nbytes <= _SMALL_BYTES:
            blocks = [torch.empty_like(x) for _ in range(count)]
            self.network.swap(self._peers, blocks, [x] * count, timeout_s)
            reduce_in_rank_order(x, blocks, op)
            return
        shares = list(x.tensor_split(count))
        blocks = [torch.empty_like(shares[self._here]) for _ in range(count)]
        self.network.swap(self._peers, blocks, shares, timeout_s)
        reduced = torch.empty_like(blocks[0])
        reduce_in_rank_order(reduced, blocks, op)
        self.network.swap(self._peers, shares, [reduced] * count, timeout_s)

    def reduce_scatter(
        self, out: Tensor, ins: Blocks, op: str, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`."""
        check_op(op, out.dtype)
        return self._call("reduce_scatter", partial(self._scatter_sums, out, ins, op, alike), how)

    def _scatter_sums(
        self, out: Tensor, ins: Blocks, op: str, alike: int, timeout_s: float
    ) -> None:
        if not self._is_even:
            whole = torch.cat([block.reshape(-1) for block in ins])
            self._all_reduce(whole, op, timeout_s)
            sizes = [block.numel() for block in ins]
            out.view(-1).copy_(whole.split(sizes)[self.rank])
            return
        add, wide = _carried(op, out.dtype)
        # To each place of this host: the blocks of that place on all hosts.
        columns = [
            torch.cat([ins[members[place]].reshape(-1) for members in self._hosts]).to(wide)
            for place in range(self.local.size)
        ]
        sums = torch.empty_like(columns[self.local.rank])
        self.local.reduce_scatter(
            sums, columns, add, alike=alike, async_op=False, timeout_s=timeout_s
        )
        lengths = [ins[members[self.local.rank]].numel() for members in self._hosts]
        blocks = [torch.empty(out.numel(), dtype=wide) for _ in self._hosts]
        self.network.swap(self._peers, blocks, sums.split(lengths), timeout_s)
        result = torch.empty(out.numel(), dtype=wide)
        reduce_in_rank_order(result, blocks, add)
        if op == "mean":
            result.div_(self.size)
        out.view(-1).copy_(result)

    # -- moves ----------------------------------------------------------------------------------

    def broadcast_(self, x: Tensor, src: int, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`."""

        def kernel(timeout_s: float) -> None:
            origin = next(i for i, members in enumerate(self._hosts) if src in members)
            place = self._mine.index(src) if origin == self._here else 0
            if origin == self._here:
                self.local.broadcast_(x, place, async_op=False, timeout_s=timeout_s)
            if self.rank in self._leaders:
                self.network.spread(self._leaders, x, origin, timeout_s)
            if origin != self._here:
                self.local.broadcast_(x, place, async_op=False, timeout_s=timeout_s)

        return self._call("broadcast", kernel, how)

    def all_gather(
        self, outs: Blocks, x: Tensor, *, alike: int = 0, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. Leaders exchange the blocks of their hosts."""

        def kernel(timeout_s: float) -> None:
            here: How = {"async_op": False, "timeout_s": timeout_s}
            self.local.all_gather([outs[r] for r in self._mine], x, alike=alike, **here)
            host_outs = [[bytes_of(outs[r]) for r in members] for members in self._hosts]
            sizes = [sum(len(block) for block in blocks) for blocks in host_outs]
            sizes[self._here] = 0
            foreign = torch.empty(sum(sizes), dtype=torch.uint8)
            parts = list(foreign.split(sizes))
            if self.rank in self._leaders:
                own = torch.cat(host_outs[self._here])
                ins = [own if host != self._here else own[:0] for host in range(len(sizes))]
                self.network.swap(self._leaders, parts, ins, timeout_s)
            self.local.broadcast_(foreign, 0, **here)
            for host, blocks in enumerate(host_outs):
                if host != self._here:
                    lengths = [len(block) for block in blocks]
                    for block, part in zip(blocks, parts[host].split(lengths), strict=True):
                        block.copy_(part)

        return self._call("all_gather", kernel, how)

    def all_to_all(self, outs: Blocks, ins: Blocks, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`."""

        def kernel(timeout_s: float) -> None:
            near = [[blocks[r] for r in self._mine] for blocks in (outs, ins)]
            self.local.all_to_all(near[0], near[1], async_op=False, timeout_s=timeout_s)
            nothing = torch.empty(0, dtype=torch.uint8)
            far = [
                [nothing if r in self._mine else block for r, block in enumerate(blocks)]
                for blocks in (outs, ins)
            ]
            self.network.swap(self._everybody, far[0], far[1], timeout_s)

        return self._call("all_to_all", kernel, how)

    def barrier(self, **how: Unpack[How]) -> Ticket | None:
        """See `Engine`."""

        def kernel(timeout_s: float) -> None:
            self.local.barrier(async_op=False, timeout_s=timeout_s)
            if self.rank in self._leaders:
                hosts = len(self._leaders)
                blocks = torch.zeros(hosts, 1, dtype=torch.uint8).unbind()
                self.network.swap(self._leaders, blocks, [blocks[0]] * hosts, timeout_s)
            self.local.barrier(async_op=False, timeout_s=timeout_s)

        return self._call("barrier", kernel, how)

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. All messages of such a group go over gloo, so that tags match anywhere."""
        self.check_usable()
        timeout_s = how["timeout_s"]
        with self.network.translating("exchange", self._everybody, timeout_s):
            group = self.network.group(self._everybody)
            works: list[dist.Work] = [
                *(group.recv([bytes_of(x)], src, tag) for src, x in recvs),
                *(group.send([bytes_of(x)], dst, tag) for dst, x in sends),
            ]
            ticket = MessageTicket(works, timeout_s)
            if how["async_op"]:
                return ticket
            ticket.wait(timeout_s)
        return None

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        """See `TransportEngine`."""
        self.check_usable()
        return AnyTicket(self.network.group(self._everybody).recv_anysource([bytes_of(x)], tag))

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """See `Engine`: shared among the ranks of a host. Collective over them."""
        return self.local.shared_buffer(shape, dtype, timeout_s=timeout_s)

    # -- life -----------------------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        """See `Engine`: in shared memory and between hosts."""
        return (self.local.waited_ns or 0) + self.network.waited_ns

    def _call(self, name: str, kernel: Callable[[float], None], how: How) -> Ticket | None:
        timeout_s = how["timeout_s"]
        return self.call(name, partial(kernel, timeout_s), how["async_op"], timeout_s)

    def tell_failure(self, error: BaseException) -> None:
        """See `TransportEngine`."""
        if isinstance(self.local, TransportEngine):
            self.local.fail(error)

    def abandon_after_fork(self) -> None:
        """See `TransportEngine`."""
        super().abandon_after_fork()
        if isinstance(self.local, TransportEngine):
            self.local.abandon_after_fork()

    def cancel(self, why: str) -> None:
        """See `TransportEngine`."""
        if isinstance(self.local, TransportEngine):
            self.local.cancel(why)

    def release(self) -> None:
        """See `TransportEngine`."""
        if isinstance(self.local, TransportEngine):
            self.local.close()
        self.network.close()


def _carried(op: str, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return what a step of a reduction does, and the dtype in which it is carried."""
    step = "sum" if op in ("mean", "sum64") else op
    return step, accumulation_dtype(dtype, "sum" if op == "mean" else op)

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
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.arguments import bytes_of
from unisono.comm.engines.algorithms import SMALL_BYTES
from unisono.comm.engines.base import Blocks, Engine, How, Messages, SourceTicket, Ticket
from unisono.comm.engines.gloo import TorchEngine
from unisono.comm.engines.queued import JobQueue, QueuedEngine
from unisono.comm.health.watchdog import own_connection
from unisono.comm.reductions import accumulation_dtype, reduce_among, reduce_in_rank_order
from unisono.errors import RankFailed, RankTimeout, UnisonoError


class Network:
    """Gloo among ranks of one group, whose connections are made when first used.

    Args:
        store: store of the group.
        rank: own rank in the group.
        timeout_s: deadline of making a connection.
    """

    def __init__(self, store: dist.Store, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._engines: dict[tuple[int, ...], TorchEngine] = {}
        self._making = threading.Lock()

    def among(self, members: tuple[int, ...]) -> TorchEngine:
        """Return the kernels among these ranks; each must ask for them before they can talk."""
        with self._making:
            if members not in self._engines:
                name = "gloo/" + "_".join(map(str, members))
                options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._timeout = self._timeout
                options._devices = _devices()
                # Two ranks that connect in threads of two groups, in different orders, would wait
                # for each other where these share a connection to the store.
                store = dist.PrefixStore(name, own_connection(self._store))
                place = members.index(self._rank)
                group: Any = dist.ProcessGroupGloo(store, place, len(members), options)
                self._engines[members] = TorchEngine(group, "gloo")
            return self._engines[members]

    def close(self) -> None:
        """Close all connections."""
        for engine in self._engines.values():
            engine.group.shutdown()
        self._engines.clear()


def _devices() -> list[Any]:
    """Return the network devices that torch would take, set to connect two ranks at first use."""
    gloo = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [gloo.create_default_device(lazy_init=True)]
    return [gloo.create_device(interface=name, lazy_init=True) for name in names]


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
        self._network_ns = 0
        self._hosts = hosts
        self._here = next(i for i, members in enumerate(hosts) if rank in members)
        self._mine = hosts[self._here]
        self._leaders = tuple(members[0] for members in hosts)
        self._is_even = len({len(members) for members in hosts}) == 1
        self._everybody = tuple(range(len(ranks)))
        self._peers = (
            tuple(members[local.rank] for members in hosts) if self._is_even else self._leaders
        )
        """Ranks of the other hosts that this rank talks to, one per host."""
        # Connects nobody yet, but tells where this rank is to be found: one that waits for its
        # message must not have to ask for the group first.
        network.among(self._everybody)

    @property
    def _how(self) -> How:
        return {"async_op": False, "timeout_s": self.timeout_s}

    def _over(self, members: tuple[int, ...], verb: str, *args: object) -> None:
        """Run a kernel among `members`, over the network."""
        began = time.perf_counter_ns()
        with self._translating(members, self.timeout_s):
            ticket = getattr(self.network.among(members), verb)(*args, **self._how)
            if ticket is not None:
                ticket.wait(self.timeout_s)
        self._network_ns += time.perf_counter_ns() - began

    def _swap(self, members: tuple[int, ...], outs: Blocks, ins: Blocks) -> None:
        """All-to-all among `members`: `outs[i]` becomes what member `i` has for this rank."""
        self._over(members, "all_to_all", outs, ins)

    @contextlib.contextmanager
    def _translating(self, members: Sequence[int], timeout_s: float) -> Iterator[None]:
        """Turn errors of gloo into ours."""
        me, others = self.ranks[self.rank], [self.ranks[r] for r in members if r != self.rank]
        try:
            yield
        except UnisonoError:
            raise
        except TimeoutError as error:
            raise RankTimeout(
                f"a transfer between hosts on rank {me} timed out after {timeout_s:g} s\n"
                f"  with ranks {others}",
                missing=others,
            ) from error
        except RuntimeError as error:
            raise RankFailed(
                f"a transfer between hosts on rank {me} broke off: one of ranks {others} has gone\n"
                f"  gloo says: {error}",
                rank=others[0] if len(others) == 1 else None,
            ) from error

    # -- reductions -----------------------------------------------------------------------------

    def _all_reduce(self, x: Tensor, op: str) -> None:
        how, (add, wide) = self._how, _carried(op, x.dtype)
        y = x if wide == x.dtype else x.to(wide)
        flat = y.view(-1)
        if self._is_even:
            shares = list(flat.tensor_split(self.local.size))
            mine = shares[self.local.rank].clone()
            self.local.reduce_scatter(mine, shares, add, **how)
            self._across(mine, add)
            self.local.all_gather(shares, mine, **how)
        else:
            self.local.reduce_(flat, 0, add, **how)
            if self.rank in self._leaders:
                self._across(flat, add)
            self.local.broadcast_(flat, 0, **how)
        if op == "mean":
            y.div_(self.size)
        if y is not x:
            x.copy_(y)

    def _across(self, x: Tensor, op: str) -> None:
        """Reduce `x` over the hosts, in their order; small tensors are exchanged whole."""
        swap, place = partial(self._swap, self._peers), (self._here, len(self._peers))
        reduce_among(x, op, swap, *place, is_whole=x.nbytes <= SMALL_BYTES)

    def _reduce_scatter(self, out: Tensor, ins: Blocks, op: str, alike: int) -> None:
        if not self._is_even:
            whole = torch.cat([block.reshape(-1) for block in ins])
            self._all_reduce(whole, op)
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
        self.local.reduce_scatter(sums, columns, add, alike=alike, **self._how)
        lengths = [ins[members[self.local.rank]].numel() for members in self._hosts]
        blocks = [torch.empty(out.numel(), dtype=wide) for _ in self._hosts]
        self._swap(self._peers, blocks, sums.split(lengths))
        result = torch.empty(out.numel(), dtype=wide)
        reduce_in_rank_order(result, blocks, add)
        if op == "mean":
            result.div_(self.size)
        out.view(-1).copy_(result)

    # -- moves ----------------------------------------------------------------------------------

    def _broadcast(self, x: Tensor, src: int) -> None:
        origin = next(i for i, members in enumerate(self._hosts) if src in members)
        if origin == self._here:
            self.local.broadcast_(x, self._mine.index(src), **self._how)
        if self.rank in self._leaders:
            self._over(self._leaders, "broadcast_", x, origin)
        if origin != self._here:
            self.local.broadcast_(x, 0, **self._how)

    def _all_gather(self, outs: Blocks, x: Tensor, alike: int = 0) -> None:
        """Leaders exchange the blocks of their hosts."""
        self.local.all_gather([outs[r] for r in self._mine], x, alike=alike, **self._how)
        host_outs = [[bytes_of(outs[r]) for r in members] for members in self._hosts]
        sizes = [sum(len(block) for block in blocks) for blocks in host_outs]
        sizes[self._here] = 0
        foreign = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = list(foreign.split(sizes))
        if self.rank in self._leaders:
            own = torch.cat(host_outs[self._here])
            ins = [own if host != self._here else own[:0] for host in range(len(sizes))]
            self._swap(self._leaders, parts, ins)
        self.local.broadcast_(foreign, 0, **self._how)
        for host, blocks in enumerate(host_outs):
            if host != self._here:
                lengths = [len(block) for block in blocks]
                for block, part in zip(blocks, parts[host].split(lengths), strict=True):
                    block.copy_(part)

    def _all_to_all(self, outs: Blocks, ins: Blocks) -> None:
        near = [[blocks[r] for r in self._mine] for blocks in (outs, ins)]
        self.local.all_to_all(near[0], near[1], **self._how)
        nothing = ins[0].new_empty(0)
        far = [
            [nothing if r in self._mine else block for r, block in enumerate(blocks)]
            for blocks in (outs, ins)
        ]
        self._swap(self._everybody, far[0], far[1])

    def _barrier(self) -> None:
        self.local.barrier(**self._how)
        if self.rank in self._leaders:
            hosts = len(self._leaders)
            blocks = torch.zeros(hosts, 1, dtype=torch.uint8).unbind()
            self._swap(self._leaders, blocks, [blocks[0]] * hosts)
        self.local.barrier(**self._how)

    def exchange(
        self, sends: Messages, recvs: Messages, tag: int, **how: Unpack[How]
    ) -> Ticket | None:
        """See `Engine`. All messages of such a group go over gloo, so that tags match anywhere."""
        self.check_usable()
        with self._translating(self._everybody, how["timeout_s"]):
            ticket = self.network.among(self._everybody).exchange(sends, recvs, tag, **how)
            if how["async_op"] or ticket is None:
                return ticket
            ticket.wait(how["timeout_s"])
        return None

    def receive_any(self, x: Tensor, tag: int) -> SourceTicket:
        self.check_usable()
        return self.network.among(self._everybody).receive_any(x, tag)

    def shared_buffer(
        self, shape: Sequence[int], dtype: torch.dtype, *, timeout_s: float
    ) -> Tensor:
        """See `Engine`: shared among the ranks of a host. Collective over them."""
        self.check_usable()
        make, made = partial(self.local.shared_buffer, shape, dtype, timeout_s=timeout_s), []
        self.jobs.run(lambda: made.append(make()))
        return made[0]

    # -- life -----------------------------------------------------------------------------------

    @property
    def waited_ns(self) -> int:  # type: ignore[override]
        """See `Engine`: in shared memory and between hosts."""
        return (self.local.waited_ns or 0) + self._network_ns

    def tell_failure(self, error: BaseException) -> None:
        self.local.fail(error)

    def abandon_after_fork(self) -> None:
        super().abandon_after_fork()
        self.local.abandon_after_fork()

    def cancel(self, why: str) -> None:
        self.local.cancel(why)

    def release(self) -> None:
        self.local.close()
        self.network.close()


def _carried(op: str, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return what a step of a reduction does, and the dtype in which it is carried."""
    step = "sum" if op in ("mean", "sum64") else op
    return step, accumulation_dtype(dtype, "sum" if op == "mean" else op)

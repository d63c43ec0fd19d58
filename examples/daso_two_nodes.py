"""DASO against torch's DDP on two nodes with a slow link between them, on real digits.

The link is a delay added to whatever passes between the halves of the ranks, for both alike.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.comm import Communicator, Pending, StartedVerbs
from unisono.data_parallel import DASO, DasoSchedule, DataParallelMultiGPU, shard

LINK_S, EPOCHS, BATCHES = 0.03, 8, 22
passed = {"messages": 0, "bytes": 0}


def on_the_link(nbytes):
    passed.update(messages=passed["messages"] + 1, bytes=passed["bytes"] + nbytes)
    return time.monotonic() + LINK_S


class Late(Pending):
    """What is under way, and arrives later."""

    def __init__(self, pending, arrives):
        self.pending, self.arrives = pending, arrives

    def wait(self, timeout_s=None):
        time.sleep(max(0.0, self.arrives - time.monotonic()))
        return self.pending.wait(timeout_s)

    def done(self):
        return time.monotonic() > self.arrives and self.pending.done()


class SlowVerbs(StartedVerbs):
    """What is reduced between nodes arrives later."""

    def all_reduce_(self, x, op="sum", *, timeout_s=None):
        pending = super().all_reduce_(x, op, timeout_s=timeout_s)
        if len({rank // (unisono.world().size // 2) for rank in self._comm.ranks}) == 1:
            return pending
        return Late(pending, on_the_link(x.nbytes))


class TwoNodes(Communicator):
    """Ranks of which each half is a node."""

    @property
    def start(self):
        return SlowVerbs(self)


def slow_hook(_, bucket):
    """The same link for DDP: its buckets arrive later too."""
    arrives = on_the_link(bucket.buffer().nbytes)
    mean = bucket.buffer() / dist.get_world_size()

    def wait(future):
        time.sleep(max(0.0, arrives - time.monotonic()))
        return future.value()[0]

    return dist.all_reduce(mean, async_op=True).get_future().then(wait)


def train(kind):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = TwoNodes.of(None)
    images, labels = load_digits(return_X_y=True)
    even = len(labels) // comm.size * comm.size
    x, y = torch.tensor(images[:even]).float() / 16, torch.tensor(labels[:even])
    mine_x, mine_y = shard(x), shard(y)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * BATCHES)
    if kind == "DASO":
        nodes = {"ranks_per_node": comm.size // 2, "max_global_skips": 4}
        stepper = DASO(optimizer, EPOCHS, comm, 1, 1, scheduler, **nodes)
        stepper.last_batch = BATCHES
        replica = DataParallelMultiGPU(model, stepper)
    else:
        stepper, replica = optimizer, DistributedDataParallel(model)
        replica.register_comm_hook(None, slow_hook)
    passed.update(messages=0, bytes=0)
    start = time.perf_counter()
    for epoch in range(EPOCHS):
        order = torch.randperm(len(mine_y), generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for rows in order.chunk(BATCHES):
            stepper.zero_grad()
            loss = cross_entropy(replica(mine_x[rows]), mine_y[rows])
            loss.backward()
            stepper.step()
            total += loss.item() / BATCHES
            if kind == "DDP":
                scheduler.step()  # DASO calls it itself
        if isinstance(stepper, DASO):
            stepper.epoch_loss_logic(total)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        return seconds, cross_entropy(model(x), y).item(), dict(passed)


def main():
    ranks = int(sys.argv[2]) if sys.argv[1:2] == ["--ranks"] else 4
    skips = DasoSchedule(EPOCHS, 1, 1, max_global_skips=4).preview([1.0] * EPOCHS)
    print("global skips if the loss never falls:", [s.global_skip for s in skips])
    measured = unisono.run(lambda: [train("DDP"), train("DASO")], ranks=ranks, timeout_s=300)[0]
    for kind, (seconds, loss, sent) in zip(("DDP", "DASO"), measured, strict=True):
        link = (
            f"{sent['messages']} messages and {sent['bytes'] / 1e6:.1f} MB between nodes (rank 0)"
        )
        print(f"{kind:4} {seconds:5.1f} s, final loss {loss:.4f}, {link}")


if __name__ == "__main__":
    main()

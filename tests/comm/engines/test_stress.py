"""Long random programs of collectives, against arithmetic."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

ROUNDS = 2000


def block(number, rank, n):
    """What a rank brings to a call: whole numbers, so that sums are exact."""
    return ((torch.arange(n) * 13 + number * 7 + rank * 5) % 9).float()


def run_call(number, verb, n, ranks, group, async_op):
    """Start one call; return its work and a function that checks its result."""
    rank = dist.get_rank()
    place, size = ranks.index(rank), len(ranks)
    everybody = [block(number, r, n) for r in ranks]
    if verb == "all_reduce":
        x = everybody[place].clone()
        work = dist.all_reduce(x, group=group, async_op=async_op)
        return work, lambda: torch.equal(x, sum(everybody))
    if verb == "all_gather":
        outs = [torch.empty(n) for _ in ranks]
        work = dist.all_gather(outs, everybody[place], group=group, async_op=async_op)
        return work, lambda: all(map(torch.equal, outs, everybody))
    if verb == "broadcast":
        x = everybody[place].clone()
        work = dist.broadcast(x, ranks[number % size], group=group, async_op=async_op)
        return work, lambda: torch.equal(x, everybody[number % size])
    if verb == "reduce_scatter":
        out = torch.empty(n)
        ins = [everybody[place] + q for q in range(size)]
        work = dist.reduce_scatter(out, ins, group=group, async_op=async_op)
        return work, lambda: torch.equal(out, sum(x + place for x in everybody))
    if verb == "all_to_all":
        out = torch.empty(n * size)
        joined = torch.cat([everybody[place] + q for q in range(size)])
        work = dist.all_to_all_single(out, joined, group=group, async_op=async_op)
        return work, lambda: torch.equal(out, torch.cat([x + place for x in everybody]))
    work = dist.barrier(group=group, async_op=async_op)
    return work, lambda: True


@pytest.mark.ranks(3, backend="shm", timeout=110)
@pytest.mark.parametrize("slot_kb", [1024, 4])
def test_two_thousand_random_calls_on_three_overlapping_groups(slot_kb, monkeypatch):
    monkeypatch.setenv("UNISONO_SHM_SLOT_KB", str(slot_kb))
    members = {"all": (0, 1, 2), "low": (0, 1), "high": (1, 2)}
    groups = {name: dist.new_group(list(ranks)) for name, ranks in members.items()}
    plan, own = random.Random(7), random.Random(dist.get_rank())
    verbs = ["all_reduce"] * 3 + [
        "all_gather",
        "broadcast",
        "reduce_scatter",
        "all_to_all",
        "barrier",
    ]
    pending = []
    for number in range(ROUNDS):
        name, verb = plan.choice(list(members)), plan.choice(verbs)
        n = plan.choice([0, 1, 5, 300, 1025, 4099, 20_000])
        async_op = plan.random() < 0.5
        if dist.get_rank() not in members[name]:
            continue
        work, is_right = run_call(number, verb, n, members[name], groups[name], async_op)
        if async_op:
            pending.append((number, verb, work, is_right))
        else:
            assert is_right(), (number, verb, n)
        if own.random() < 0.02:
            time.sleep(own.random() * 2e-3)
        while pending and own.random() < 0.4:
            at, what, work, is_right = pending.pop(own.randrange(len(pending)))
            work.wait()
            assert is_right(), (at, what)
    for at, what, work, is_right in pending:
        work.wait()
        assert is_right(), (at, what)

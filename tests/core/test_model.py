"""The meeting protocol of the core as a model, explored in every order of its steps.

Ranks are lists of steps, each a single access of shared memory, as in `sync`, `sleep_on` and `ring`
(src/core/sync.cpp) and in the kernels (src/core/collectives.cpp). Memory is sequentially consistent
here: the words of a meeting are accessed so in the core, and `make sanitize` sees to the rest. A
nap of the core ends by itself after a while; here it does not: a lost wake-up is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest


class Broken(Exception):
    """A property that does not hold in some order of the steps."""


@dataclass(frozen=True)
class Protocol:
    """What is explored; flags and numbers other than these take away what the core relies on."""

    size: int
    counts_itself_before_it_sleeps: bool = True
    looks_for_sleepers: bool = True
    kernel_compares: bool = True
    """Whether the system puts a thread to sleep only if the word is still what it has seen."""
    turns: int = 2
    halves: int = 4
    next_call_takes_the_other_slot: bool = True


class Rank(NamedTuple):
    """Where a rank stands: its step, its place in it, what it has seen, whom it sleeps on."""

    step: int = 0
    place: int = 0
    seen: int = 0
    asleep_on: int = -1


class Slot(NamedTuple):
    """A piece of memory of one rank: what it holds, and who is at it."""

    value: int = -1
    is_written: bool = False
    readers: int = 0


Step = tuple
Program = Sequence[Step]


# -- what ranks do ---------------------------------------------------------------------------------


def sync(p: Protocol, rank: int, met: int) -> list[Step]:
    """Come to meeting `met`, and wait for all others, the next one first."""
    peers = [(rank + i) % p.size for i in range(1, p.size)]
    return [("come", met), ("wake",), *(("meet", peer, met) for peer in peers)]


def access(kind: str, places: Sequence[tuple], value: int) -> list[Step]:
    """Read or write some places, which takes a while."""
    return [(f"begin {kind}", tuple(places), value), (f"end {kind}", tuple(places))]


def small_calls(p: Protocol, rank: int, calls: int) -> list[Step]:
    """One meeting a call: write the own slot, meet, read the slots of all."""
    steps: list[Step] = []
    for call in range(calls):
        turn = call % p.turns
        steps += access("write", [(turn, rank)], call)
        steps += sync(p, rank, call + 1)
        steps += access("read", [(turn, r) for r in range(p.size)], call)
    return steps


def large_all_reduce(p: Protocol, rank: int, chunks: int, calls: int) -> list[Step]:
    """One meeting a chunk: reduce the own piece, fill in the next chunk, meet, read the pieces.

    In the half of a slot lie what its owner fills in for others and the owner's result. Small calls
    follow, which use a whole slot (two halves) each.
    """
    others = [r for r in range(p.size) if r != rank]

    def half(k: int) -> int:
        return k % p.halves

    def fill(k: int) -> list[Step]:
        return access("write", [(half(k), rank, "filled")], k)

    steps = fill(0) + sync(p, rank, 1)
    for k in range(chunks):
        steps += access("read", [(half(k), r, "filled") for r in others], k)
        steps += access("write", [(half(k), rank, "result")], k)
        if k + 1 < chunks:
            steps += fill(k + 1)
        steps += sync(p, rank, k + 2)
        steps += access("read", [(half(k), r, "result") for r in others], k)
    last = half(chunks - 1) // 2
    for call in range(calls):
        turn = (last + call + p.next_call_takes_the_other_slot) % 2
        parts = [(2 * turn + h, part) for h in (0, 1) for part in ("filled", "result")]
        steps += access("write", [(h, rank, part) for h, part in parts], 100 + call)
        steps += sync(p, rank, chunks + 2 + call)
        steps += access("read", [(h, r, part) for r in others for h, part in parts], 100 + call)
    return steps


# -- the explorer ----------------------------------------------------------------------------------


class State(NamedTuple):
    """All there is: the ranks, the words they meet by, and the places they read and write."""

    ranks: tuple[Rank, ...]
    met: tuple[int, ...]
    sleepers: tuple[int, ...]
    slots: tuple[tuple[tuple, Slot], ...] = ()


def put(row: tuple, i: int, value: object) -> tuple:
    return (*row[:i], value, *row[i + 1 :])


def explore(p: Protocol, program: Callable[[int], Program]) -> int:
    """Visit every state that ranks can get to; return how many there are.

    Raises:
        Broken: a rank reads what is being written or is not what it came for, writes what is being
            read, or sleeps for ever.
    """
    programs = [program(rank) for rank in range(p.size)]
    zeros = (0,) * p.size
    start = State((Rank(),) * p.size, zeros, zeros)
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        following = [
            after(p, state, r, programs[r][at.step])
            for r, at in enumerate(state.ranks)
            if at.asleep_on < 0 and at.step < len(programs[r])
        ]
        if not following and any(at.asleep_on >= 0 for at in state.ranks):
            raise Broken(f"a lost wake-up: {state.ranks}")
        for each in following:
            if each not in seen:
                seen.add(each)
                stack.append(each)
    return len(seen)


def after(p: Protocol, state: State, rank: int, step: Step) -> State:
    """Return the state after a rank has taken its next step."""
    at, kind = state.ranks[rank], step[0]
    done = Rank(at.step + 1)
    if kind == "come":
        ranks = put(state.ranks, rank, done)
        return state._replace(ranks=ranks, met=put(state.met, rank, step[1]))
    if kind == "wake":
        wakes = p.looks_for_sleepers and state.sleepers[rank] > 0
        if wakes and at.place == 0:  # it has looked; the call to the system is a step of its own
            return state._replace(ranks=put(state.ranks, rank, at._replace(place=1)))
        ranks = put(state.ranks, rank, done)
        if at.place == 1:
            ranks = tuple(r._replace(asleep_on=-1) if r.asleep_on == rank else r for r in ranks)
        return state._replace(ranks=ranks)
    if kind == "meet":
        return after_meet(p, state, rank, *step[1:])
    return state._replace(ranks=put(state.ranks, rank, done), slots=after_access(state, rank, step))


def after_meet(p: Protocol, state: State, rank: int, peer: int, met: int) -> State:
    """Wait for a peer: look at its word, count oneself, look again, sleep, count oneself out."""
    at, word, sleepers = state.ranks[rank], state.met[peer], state.sleepers
    if at.place == 0:
        at = Rank(at.step + 1) if word >= met else at._replace(place=1, seen=word)
    elif at.place == 1:
        at = at._replace(place=2)
        if p.counts_itself_before_it_sleeps:
            sleepers = put(sleepers, peer, sleepers[peer] + 1)
    elif at.place == 2:
        at = at._replace(place=3 if word == at.seen else 4)
    elif at.place == 3:
        sleeps = word == at.seen or not p.kernel_compares
        at = at._replace(place=4, asleep_on=peer if sleeps else -1)
    else:
        at = Rank(at.step)
        if p.counts_itself_before_it_sleeps:
            sleepers = put(sleepers, peer, sleepers[peer] - 1)
    return state._replace(ranks=put(state.ranks, rank, at), sleepers=sleepers)


def after_access(state: State, rank: int, step: Step) -> tuple[tuple[tuple, Slot], ...]:
    """Return the places after a rank has begun or ended to read or write some."""
    slots = dict(state.slots)
    for place in step[1]:
        slot = slots.get(place, Slot())
        if step[0] == "begin write":
            if slot.readers:
                raise Broken(f"rank {rank} writes {place} while it is read")
            slot = Slot(step[2], True)
        elif step[0] == "end write":
            slot = slot._replace(is_written=False)
        elif step[0] == "begin read":
            if slot.is_written:
                raise Broken(f"rank {rank} reads {place} while it is written")
            if slot.value != step[2]:
                raise Broken(f"rank {rank} finds {slot.value} in {place} instead of {step[2]}")
            slot = slot._replace(readers=slot.readers + 1)
        else:
            slot = slot._replace(readers=slot.readers - 1)
        slots[place] = slot
    return tuple(sorted(slots.items()))


# -- tests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "calls"), [(2, 5), (3, 4)])
def test_two_slots_in_turns_are_safe_and_everybody_ends(size, calls):
    p = Protocol(size)
    assert explore(p, lambda rank: small_calls(p, rank, calls)) > 500


@pytest.mark.parametrize(
    ("size", "chunks", "calls"), [*((2, n, 2) for n in range(1, 7)), (3, 2, 1), (3, 5, 0)]
)
def test_the_four_halves_of_a_large_reduction_are_safe_and_everybody_ends(size, chunks, calls):
    p = Protocol(size)
    assert explore(p, lambda rank: large_all_reduce(p, rank, chunks, calls)) > 500


@pytest.mark.parametrize(
    "change",
    [
        {"looks_for_sleepers": False},
        {"counts_itself_before_it_sleeps": False},
        {"kernel_compares": False},
    ],
)
def test_the_model_finds_a_lost_wake_up(change):
    p = Protocol(2, **change)
    with pytest.raises(Broken, match="lost wake-up"):
        explore(p, lambda rank: small_calls(p, rank, 2))


def test_the_model_finds_a_slot_that_is_used_too_soon():
    one = Protocol(2, turns=1)
    with pytest.raises(Broken, match="rank"):
        explore(one, lambda rank: small_calls(one, rank, 3))
    one_half = Protocol(2, halves=1)
    with pytest.raises(Broken, match="rank"):
        explore(one_half, lambda rank: large_all_reduce(one_half, rank, 4, 0))
    same_slot = Protocol(2, next_call_takes_the_other_slot=False)
    with pytest.raises(Broken, match="rank"):
        explore(same_slot, lambda rank: large_all_reduce(same_slot, rank, 3, 1))

"""The coordinator, explored: every order of messages, deaths and joins, for two and three members.

A model of members stands in for processes. What they write on the board and into the result is the
number of the step it is for, so that anything out of turn is seen. With `UNISONO_EXPLORE=1` more
happens at once, and it takes minutes.
"""

from __future__ import annotations

import hashlib
import marshal
import os
from collections.abc import Callable

import pytest

from unisono.launch.elastic.coordinator import Coordinator, Member, split

STEPS = 3


class Broken(AssertionError):
    """Something that must not happen."""


class Reducing(Coordinator):
    """Has members add up pieces however few the sums are."""

    FEW = 0


class World:
    """Members, the coordinator and the memory between them, at one moment; all of it plain data."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: int,
        deaths: int,
        joins: int = 0,
        shards: int = 3,
        *,
        resizes: int = 0,
    ) -> None:
        self.coordinator, self.shards = coordinator, shards
        self.deaths, self.joins, self.resizes = deaths, joins, resizes
        self.applied: dict[int, int] = {}
        self.orders: dict[int, list[dict]] = {}
        self.words: dict[int, list[dict]] = {}
        self.has_left: list[int] = []
        self.board = [-1] * (2 * shards)
        self.result = [-1] * (members + joins)
        self.state = -1
        self.count = 0
        for _ in range(members):
            self.join()

    def frozen(self) -> bytes:
        """Return all that tells this moment from others."""
        members = {n: vars(m) for n, m in self.coordinator.members.items()}
        inside = {**vars(self.coordinator), "members": members}
        own = {name: value for name, value in vars(self).items() if name != "coordinator"}
        return marshal.dumps((inside, own), 2)

    @classmethod
    def thawed(cls, data: bytes, kind: type[Coordinator]) -> World:
        """Return that moment, to go on from."""
        inside, own = marshal.loads(data)
        world, coordinator = object.__new__(cls), object.__new__(kind)
        inside["members"] = {n: Member(**fields) for n, fields in inside["members"].items()}
        vars(coordinator).update(inside)
        vars(world).update(own, coordinator=coordinator)
        return world

    def join(self) -> None:
        number, self.count = self.count, self.count + 1
        self.applied[number], self.orders[number], self.words[number] = 0, [], []
        self.coordinator.joined(number, rank=number, shards=self.shards, step=0)
        self.deliver()

    def deliver(self) -> None:
        for number, order in self.coordinator.take_orders():
            if number in self.orders:
                self.orders[number].append(order)

    def moves(self) -> list[tuple[str, int]]:
        found = [("work", n) for n, orders in self.orders.items() if orders]
        found += [("hear", n) for n, words in self.words.items() if words]
        is_still, away = not found, {*self.has_left, *self.coordinator.retired}
        living = [n for n in self.orders if n not in away]
        if self.deaths and living:
            found += [("kill", n) for n in living]
        if self.resizes and len(self.coordinator.members) > 1:
            found.append(("resize", -1))
        if self.joins and self.coordinator.phase not in ("over", "lost"):
            found.append(("join", -1))
        elif is_still and living and len(living) < self.coordinator.target:
            found.append(("shrink", -1))  # whoever starts ranks says that no more will come
        return found

    def make(self, move: tuple[str, int]) -> None:
        what, number = move
        if what == "work":
            self.work(number, self.orders[number].pop(0))
        elif what == "hear":
            self.hear(number)
        elif what == "join":
            self.joins -= 1
            self.join()
        elif what == "resize":
            self.resizes -= 1
            self.coordinator.resize(len(self.coordinator.members) - 1)
            self.deliver()
        elif what == "shrink":
            away = {*self.has_left, *self.coordinator.retired}
            self.coordinator.resize(sum(n not in away for n in self.orders))
            self.deliver()
        else:
            self.kill(number)

    def hear(self, number: int) -> None:
        self.coordinator.told(number, self.words[number].pop(0))
        self.deliver()

    def kill(self, number: int) -> None:
        """A member dies in the midst of what it is at; what it said before is heard first."""
        self.deaths -= 1
        del self.applied[number]
        for order in self.orders.pop(number)[:1]:
            if order["kind"] == "compute":
                self.write(order, -1)
            elif order["kind"] == "reduce":
                for piece in order["pieces"]:
                    self.result[piece] = -1
            elif order["kind"] == "donate":
                self.state = -1
        for message in self.words.pop(number):
            self.coordinator.told(number, message)
        self.coordinator.died(number)
        self.deliver()

    def work(self, number: int, order: dict) -> None:
        kind, step = order["kind"], order["step"]
        if kind == "load":
            self.applied[number] = self.state
            if self.state != step:
                raise Broken(f"a newcomer gets the state {self.state} at step {step}")
            self.say(number, "loaded", step=step)
            self.leave_if_done(number)
            return
        if kind == "found":
            self.leave_if_done(number)
            return
        if number in self.has_left:
            return
        if self.applied[number] != step:
            raise Broken(f"{kind} of step {step} at {self.applied[number]}")
        if kind == "donate":
            self.state = step
            self.say(number, "donated", step=step, bytes=1)
        elif kind == "compute":
            self.write(order, step)
            self.say(number, "done", step=step, runs=order["runs"])
        elif kind == "reduce":
            self.check_sums(order)
            for piece in order["pieces"]:
                self.result[piece] = step
            self.say(number, "reduced", step=step, pieces=order["pieces"], cut=order["cut"])
        elif kind == "commit":
            if order["runs"] is not None:
                self.check_sums(order)
            elif any(self.result[piece] != step for piece in range(order["members"])):
                raise Broken(f"step {step} is applied from {self.result}")
            self.applied[number] = step + 1
            self.leave_if_done(number)

    def place(self, step: int, shard: int) -> int:
        """Where a sum lies on the board; those of two steps lie apart."""
        return step % 2 * self.shards + shard

    def write(self, order: dict, step: int) -> None:
        for run in order["runs"]:
            for shard in range(*run):
                self.board[self.place(order["step"], shard)] = step

    def check_sums(self, order: dict) -> None:
        step, shards = order["step"], [s for run in order["runs"] for s in range(*run)]
        if shards != list(range(self.shards)):
            raise Broken(f"step {step} adds up shards {shards}")
        if any(self.board[self.place(step, s)] != step for s in shards):
            raise Broken(f"step {step} adds up {self.board}")

    def leave_if_done(self, number: int) -> None:
        if self.applied[number] == STEPS:
            self.has_left.append(number)
            self.say(number, "left", step=STEPS)

    def say(self, number: int, kind: str, **rest: object) -> None:
        self.words[number].append({"kind": kind, **rest})


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def explore(world: World, limit: int = 400_000) -> int:
    """Make all moves in all orders; return how many different moments there are."""
    kind, thawed, first = type(world.coordinator), type(world).thawed, world.frozen()
    seen, heap = {digest(first)}, [first]
    while heap:
        now = heap.pop()
        at = thawed(now, kind)
        if at.coordinator.error:
            raise Broken(at.coordinator.error)
        moves = at.moves()
        if not any(what in ("work", "hear", "shrink") for what, _ in moves):
            end = at.coordinator.phase
            waits = at.orders.keys() - set(at.has_left) - set(at.coordinator.retired)
            if waits and not at.joins and end != "lost":
                raise Broken(f"{waits} wait for ever in {end}: {vars(at.coordinator)}")
        for move in moves:
            after = thawed(now, kind)
            after.make(move)
            data = after.frozen()
            if (key := digest(data)) not in seen:
                seen.add(key)
                heap.append(data)
        if len(seen) > limit:
            raise AssertionError(f"more than {limit} moments")
    return len(seen)


@pytest.mark.parametrize("kind", [Coordinator, Reducing])
@pytest.mark.parametrize(
    ("members", "deaths", "joins", "shards", "resizes"),
    [(2, 3, 2, 2, 1), (2, 1, 1, 1, 0), (3, 3, 0, 3, 0), (3, 1, 1, 4, 0), (3, 1, 0, 2, 1)],
)
def test_every_order_of_messages_deaths_joins_and_sizes_gives_one_result(
    kind, members, deaths, joins, shards, resizes
):
    assert explore(World(kind(members), members, deaths, joins, shards, resizes=resizes)) > 500


@pytest.mark.skipif("UNISONO_EXPLORE" not in os.environ, reason="UNISONO_EXPLORE=1: minutes")
@pytest.mark.parametrize("kind", [Coordinator, Reducing])
@pytest.mark.parametrize(("deaths", "joins", "resizes"), [(2, 1, 0), (3, 1, 1), (1, 2, 0)])
def test_three_members_and_all_that_can_happen_at_once(kind, deaths, joins, resizes):
    assert explore(World(kind(3), 3, deaths, joins, resizes=resizes), limit=10_000_000) > 10_000


class Mutant(Reducing):
    """A coordinator that is told to make a mistake."""


def forget_the_lost_shards(coordinator_class: type[Coordinator]) -> None:
    coordinator_class._give_away = lambda self, runs: None


def do_not_wait_for_all_to_begin(coordinator_class: type[Coordinator]) -> None:
    def after_compute(self: Coordinator) -> None:
        if self.phase == "compute" and not any(m.owes for m in self.members.values()):
            self.phase, self._cut = "reduce", len(self.members)
            for piece, number in enumerate(list(self.members)):
                self._reduce(number, [piece])

    coordinator_class._after_compute = after_compute


def commit_with_the_first_piece(coordinator_class: type[Coordinator]) -> None:
    original = coordinator_class._after_reduce

    def after_reduce(self: Coordinator) -> None:
        for member in self.members.values():
            member.pieces.clear()
        original(self)

    coordinator_class._after_reduce = after_reduce


def count_work_of_the_dead(coordinator_class: type[Coordinator]) -> None:
    original = coordinator_class.died

    def died(self: Coordinator, number: int) -> None:
        if self.phase == "compute" and number in self.members:
            self._done += self.members[number].owes
            self.members[number].owes = []
        original(self, number)

    coordinator_class.died = died


def admit_without_the_state(coordinator_class: type[Coordinator]) -> None:
    original = coordinator_class._at_boundary

    def at_boundary(self: Coordinator) -> None:
        if self.members and self.phase == "boundary":
            for number in list(self._newcomers):
                self._loading[number] = True
                self._order(number, "load", step=self.step, bytes=1)
            if self._loading:
                self._admit()
                return
        original(self)

    coordinator_class._at_boundary = at_boundary


@pytest.mark.parametrize(
    "mutate",
    [
        forget_the_lost_shards,
        do_not_wait_for_all_to_begin,
        commit_with_the_first_piece,
        count_work_of_the_dead,
        admit_without_the_state,
    ],
)
def test_mistakes_in_the_protocol_are_found(mutate: Callable[[type[Coordinator]], None]):
    for name in [name for name in vars(Mutant) if not name.startswith("__")]:
        delattr(Mutant, name)
    mutate(Mutant)

    def explore_both() -> None:
        for deaths, joins, shards in [(0, 0, 1), (1, 1, 3)]:
            explore(World(Mutant(2), 2, deaths, joins, shards))

    with pytest.raises((Broken, ValueError, KeyError)):
        explore_both()


class Cramped(World):
    """Has one place for the sums of all steps."""

    def place(self, step: int, shard: int) -> int:
        return shard


def test_sums_of_two_steps_have_to_lie_apart():
    with pytest.raises(Broken, match="step 0 adds up"):
        explore(Cramped(Coordinator(2), 2, deaths=0, shards=2))


def test_a_member_that_leaves_early_is_an_error():
    coordinator = Coordinator(2)
    for number in range(2):
        coordinator.joined(number, rank=number, shards=2, step=0)
    coordinator.told(0, {"kind": "donated", "step": 0, "bytes": 1})
    coordinator.told(1, {"kind": "loaded", "step": 0})
    coordinator.told(0, {"kind": "left", "step": 0})
    coordinator.told(1, {"kind": "done", "step": 0, "runs": [[1, 2]]})
    assert "ranks [0] ended their loop before step 0, ranks [1]" in (coordinator.error or "")


def test_resizing_happens_at_the_next_step():
    coordinator = Coordinator(3)
    for number in range(3):
        coordinator.joined(number, rank=number, shards=4, step=5)
    coordinator.told(0, {"kind": "donated", "step": 5, "bytes": 1})
    for number in (1, 2):
        coordinator.told(number, {"kind": "loaded", "step": 5})
    coordinator.resize(1)
    assert (coordinator.phase, len(coordinator.members)) == ("compute", 3)
    for number, run in enumerate(split(4, 3)):
        coordinator.told(number, {"kind": "done", "step": 5, "runs": [run]})
    for number in range(3):
        coordinator.told(number, {"kind": "reduced", "step": 5, "pieces": [number]})
    assert (coordinator.step, list(coordinator.members)) == (6, [0])
    assert coordinator.retired == [2, 1]

"""Coordinator and followers, explored: every order of messages, marks, deaths, joins and sizes.

Members are real followers; processes, connections and memory are a model. What members write on a
board is epoch and step it is for, so that anything out of turn is seen. Members share one board, or
each has its own, as on hosts of their own: then what they write travels, late, and is lost with a
connection. With `UNISONO_EXPLORE=1` more happens at once, and it takes minutes.
"""

from __future__ import annotations

import hashlib
import marshal
import os
from collections.abc import Callable, Sequence

import pytest

from unisono.launch.elastic import coordinator as coordinator_module
from unisono.launch.elastic.coordinator import Coordinator, ElasticMember, Follower

STEPS = 2
SPOILT: tuple[int, int] = (-1, -1)
IN_MINUTES = pytest.mark.skipif(
    "UNISONO_EXPLORE" not in os.environ, reason="UNISONO_EXPLORE=1: minutes"
)


class Broken(AssertionError):
    """Something that must not happen."""


class World:
    """Members, the coordinator and the memory between them, at one moment; all of it plain data."""

    def __init__(
        self,
        members: int,
        deaths: int,
        joins: int = 0,
        shards: int = 3,
        *,
        resizes: int = 0,
        parts: int = 0,
        is_spread: bool = False,
        is_blind: bool = False,
        coordinator: type[Coordinator] = Coordinator,
        follower: type[Follower] = Follower,
    ) -> None:
        self.kinds = coordinator, follower
        self.coordinator = coordinator(members)
        self.followers: dict[int, Follower] = {}
        self.shards, self.deaths, self.joins, self.resizes = shards, deaths, joins, resizes
        self.orders: dict[int, list[dict]] = {}
        self.messages: dict[int, list[dict]] = {}
        self.is_new: list[int] = []
        self.has_left: list[int] = []
        self.parts, self.is_spread, self.places = parts, is_spread, members + joins
        self.boards: dict[int, dict[str, list]] = {}
        self.wires: dict[tuple[int, int], list[tuple]] = {}
        self.state, self.count, self.is_blind = -1, 0, is_blind
        for _ in range(members):
            self.join()

    def frozen(self) -> bytes:
        """Return all that tells this moment from others."""
        members = {n: vars(m) for n, m in self.coordinator.members.items()}
        inside = {**vars(self.coordinator), "members": members}
        followers = {n: vars(follower) for n, follower in self.followers.items()}
        apart = ("coordinator", "followers", "kinds")
        own = {name: value for name, value in vars(self).items() if name not in apart}
        return marshal.dumps((inside, followers, own), 2)

    def thawed(self, data: bytes) -> World:
        """Return that moment, to go on from."""
        inside, followers, own = marshal.loads(data)
        inside["members"] = {n: ElasticMember(**fields) for n, fields in inside["members"].items()}
        world = object.__new__(type(self))
        vars(world).update(own, kinds=self.kinds)
        world.coordinator = object.__new__(self.kinds[0])
        vars(world.coordinator).update(inside)
        world.followers = {n: object.__new__(self.kinds[1]) for n in followers}
        for number, fields in followers.items():
            vars(world.followers[number]).update(fields)
        return world

    def join(self) -> None:
        number, self.count = self.count, self.count + 1
        self.followers[number] = self.kinds[1]()
        self.orders[number], self.messages[number] = [], []
        self.is_new.append(number)
        self.coordinator.reached = self.reached
        self.boards.setdefault(
            number if self.is_spread else 0,
            {
                "rows": [SPOILT] * self.shards,
                "result": [SPOILT] * self.places,
                "marks": [0] * self.places,
                "words": [SPOILT] * (2 * self.places),
            },
        )
        address = (number,) if self.is_spread else None
        self.coordinator.joined(number, rank=number, shards=self.shards, step=0, address=address)
        self.deliver()

    def deliver(self) -> None:
        for number, order in self.coordinator.take_orders():
            if number in self.orders:
                self.orders[number].append(order)

    @property
    def living(self) -> list[int]:
        away = {*self.has_left, *self.coordinator.retired}
        return [number for number in self.followers if number not in away]

    @property
    def reached(self) -> int:
        return 0 if self.is_blind else max((f.step for f in self.followers.values()), default=0)

    def board(self, number: int) -> dict[str, list]:
        """Return the memory that a member sees."""
        return self.boards[number if self.is_spread else 0]

    def marks_for(self, number: int) -> list[int]:
        return self.board(number)["marks"][: len(self.followers[number].order["ranks"])]

    def is_idle(self, number: int) -> bool:
        """Whether a member has nothing to do; asking must not change it."""
        follower = self.followers[number]
        before = {**vars(follower), "orders": list(follower.orders)}
        due = follower.due(lambda: self.marks_for(number))
        vars(follower).update(before)
        return due == "wait"

    def moves(self) -> list[tuple[str, object]]:
        found = [("receive", n) for n, orders in self.orders.items() if orders]
        found += [("hear", n) for n, messages in self.messages.items() if messages]
        found += [("work", n) for n in self.living if n not in self.is_new and not self.is_idle(n)]
        found += [("carry", ends) for ends in self.wires if self.may_carry(*ends)]
        is_still = not found
        if self.parts:
            running = [n for n in self.living if self.followers[n].order and n not in self.is_new]
            found += [("part", n) for n in running]
        if self.deaths:
            found += [("kill", n) for n in self.living]
        if self.resizes and len(self.coordinator.members) > 1:
            found.append(("resize", -1))
        if self.joins and self.coordinator.phase not in ("over", "lost"):
            found.append(("join", -1))
        elif is_still and self.living and len(self.living) < self.coordinator.target:
            found.append(("shrink", -1))  # whoever starts ranks says that no more will come
        return found

    def may_carry(self, source: int, target: int) -> bool:
        """Whether something arrives: what is for an epoch that the receiver does not know waits."""
        wire, follower = self.wires[source, target], self.followers.get(target)
        return bool(wire) and bool(follower) and wire[0][0] <= follower.order.get("epoch", 0)

    def make(self, move: tuple[str, object]) -> None:
        what, number = move
        if what == "receive":
            self.receive(number, self.orders[number].pop(0))
        elif what == "hear":
            self.coordinator.receive(number, self.messages[number].pop(0))
        elif what == "work":
            self.work(number)
        elif what == "carry":
            self.carry(*number)
        elif what == "part":
            self.parts -= 1
            epoch = self.followers[number].order["epoch"]
            self.say(number, "parted", epoch=epoch, why="cannot reach each other")
        elif what == "join":
            self.joins -= 1
            self.join()
        elif what == "resize":
            self.resizes -= 1
            self.coordinator.reached = self.reached
            self.coordinator.resize(len(self.coordinator.members) - 1)
        elif what == "shrink":
            self.coordinator.resize(len(self.living))
        else:
            self.kill(number)
        self.deliver()

    def kill(self, number: int) -> None:
        """A member dies in the midst of what it is at; what it said before is heard first."""
        self.deaths -= 1
        follower = self.followers[number]
        del self.orders[number]
        if number in self.is_new:
            self.is_new.remove(number)
        elif follower.order:
            due = follower.due(lambda: self.marks_for(number))
            if due in ("compute", "reduce"):
                self.push(number, due, SPOILT, None)
            elif due == "donate":
                self.state = -1
        del self.followers[number]
        for message in self.messages.pop(number):
            self.coordinator.receive(number, message)
        self.coordinator.died(number)

    def receive(self, number: int, order: dict) -> None:
        follower = self.followers[number]
        if number not in self.is_new:
            follower.orders.append(order)
            return
        if order["kind"] == "load" and self.is_spread and order["address"][0] not in self.followers:
            self.say(number, "missed")
            return
        self.is_new.remove(number)
        if order["kind"] == "load":
            if self.state != order["step"]:
                raise Broken(f"a newcomer gets the state {self.state} at step {order['step']}")
            follower.step = self.state
            self.say(number, "loaded")
        elif order["kind"] != "found":
            raise Broken(f"a newcomer is told {order}")
        self.leave_if_done(number)

    def work(self, number: int) -> None:
        follower = self.followers[number]
        due = follower.due(lambda: self.marks_for(number))
        now = (follower.order.get("epoch", 0), follower.step)
        if due == "held":
            self.say(number, "held", step=follower.step)
        elif due == "donate":
            self.state = follower.step
            self.say(number, "donated", bytes=1)
        elif due in ("compute", "reduce", "confirm"):
            if due == "reduce":
                self.check_rows(number, now)
            follower.has_done(due)
            self.push(number, due, now, follower.mark)
        elif due == "commit":
            self.commit(number, follower, now)
        else:
            raise Broken(f"{number} is told {due}")

    def push(self, number: int, what: str, value: tuple[int, int], mark: int | None) -> None:
        """Write for others to see: on the board, or on the boards of all members, later."""
        follower = self.followers[number]
        order = follower.order
        data = (order["epoch"], order["place"], what, follower.step, value, mark, order["runs"])
        self.put(number, data)
        for other in order["ranks"] if self.is_spread else ():
            if other != number:
                self.wires.setdefault((number, other), []).append(data)

    def put(self, number: int, data: tuple) -> None:
        _, place, what, step, value, mark, runs = data
        board = self.board(number)
        if what == "compute":
            for shard in range(*runs[place]):
                board["rows"][shard] = value
        elif what == "reduce":
            board["result"][place] = value
        if mark is not None:
            board["words"][2 * place + step % 2] = value
            board["marks"][place] = mark

    def carry(self, source: int, target: int) -> None:
        """Something arrives; it is dropped if it is old, or its receiver has closed connections."""
        data, follower = self.wires[source, target].pop(0), self.followers[target]
        if data[0] == follower.order["epoch"] and not follower.is_held:
            self.put(target, data)

    def commit(self, number: int, follower: Follower, now: tuple[int, int]) -> None:
        count, board = len(follower.order["ranks"]), self.board(number)
        # The mark of the end may be lost with its sender, but not what came before it.
        words = [board["words"][2 * place + follower.step % 2] for place in range(count)]
        if any(word != now for word in words):
            raise Broken(f"step {now} is applied with the words {words}")
        if any(board["result"][piece] != now for piece in range(count)):
            raise Broken(f"step {now} is applied from {board['result']}")
        follower.step += 1
        self.leave_if_done(number)

    def check_rows(self, number: int, now: tuple[int, int]) -> None:
        runs, rows = self.followers[number].order["runs"], self.board(number)["rows"]
        if [s for run in runs for s in range(*run)] != [*range(self.shards)]:
            raise Broken(f"step {now} adds up {runs}")
        if any(rows[shard] != now for shard in range(self.shards)):
            raise Broken(f"step {now} adds up {rows}")

    def leave_if_done(self, number: int) -> None:
        if self.followers[number].step == STEPS:
            self.has_left.append(number)
            self.say(number, "left", step=STEPS)

    def say(self, number: int, kind: str, **rest: object) -> None:
        self.messages[number].append({"kind": kind, **rest})


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def explore(world: World, limit: int = 400_000) -> int:
    """Make all moves in all orders; return how many different moments there are."""
    first = world.frozen()
    seen, heap = {digest(first)}, [first]
    while heap:
        now = heap.pop()
        at = world.thawed(now)
        if at.coordinator.error:
            raise Broken(at.coordinator.error)
        moves = at.moves()
        if not any(what in ("receive", "hear", "work", "carry", "shrink") for what, _ in moves):
            end = at.coordinator.phase
            if at.living and not at.joins and end != "lost":
                raise Broken(f"{at.living} wait for ever in {end}: {vars(at.coordinator)}")
        for move in moves:
            after = world.thawed(now)
            after.make(move)
            data = after.frozen()
            if (key := digest(data)) not in seen:
                seen.add(key)
                heap.append(data)
        if len(seen) > limit:
            raise AssertionError(f"more than {limit} moments")
    return len(seen)


@pytest.mark.parametrize(
    ("members", "deaths", "joins", "shards", "resizes"),
    [(2, 2, 1, 2, 1), (2, 2, 2, 1, 0), (3, 2, 0, 3, 0), (3, 1, 0, 4, 0)],
)
def test_every_order_of_messages_deaths_joins_and_sizes_gives_one_result(
    members, deaths, joins, shards, resizes
):
    assert explore(World(members, deaths, joins, shards, resizes=resizes)) > 500


@pytest.mark.parametrize(
    ("deaths", "joins", "resizes", "parts"),
    [
        (1, 0, 0, 0),
        (0, 1, 0, 1),
        pytest.param(1, 1, 0, 0, marks=IN_MINUTES),
        pytest.param(1, 0, 1, 1, marks=IN_MINUTES),
    ],
)
def test_members_with_memory_of_their_own_come_to_the_same_result(deaths, joins, resizes, parts):
    more = {"resizes": resizes, "parts": parts, "is_spread": True}
    assert explore(World(2, deaths, joins, 2, **more), limit=10_000_000) > 500


def test_a_change_that_comes_too_late_for_its_step_gives_the_same_result():
    assert explore(World(2, 1, 2, 2, resizes=1, is_blind=True)) > 500


@IN_MINUTES
@pytest.mark.parametrize(
    ("deaths", "joins", "resizes"), [(3, 0, 0), (1, 1, 0), (2, 1, 0), (1, 0, 1)]
)
def test_three_members_and_all_that_can_happen_at_once(deaths, joins, resizes):
    assert explore(World(3, deaths, joins, resizes=resizes), limit=10_000_000) > 10_000


# The exploration can fail: each of these is one mistake in the protocol.


class Hasty(Coordinator):
    """Does not wait until all members stand still."""

    def _go_on(self) -> None:
        if self.phase == "holding":
            for number in self.members:
                self._stands_at.setdefault(number, self.step)
        super()._go_on()


class Backward(Coordinator):
    """Goes back to the step of the slowest member, which others have applied."""

    def _go_on(self) -> None:
        if self.phase == "holding" and self.members.keys() <= self._stands_at.keys():
            self._stands_at = dict.fromkeys(self._stands_at, min(self._stands_at.values()))
        super()._go_on()


class Careless(Coordinator):
    """Lets newcomers begin before a member has left its state."""

    def _at_boundary(self) -> None:
        if self.members and self._newcomers:
            for number in self._newcomers:
                self._loading[number] = False
                self._order(number, "load", step=self.step, bytes=1)
            return
        super()._at_boundary()


class Impatient(Follower):
    """Applies a step that not all have finished."""

    def due(self, marks: Callable[[], Sequence[int]]) -> str:
        return super().due(lambda: [max(marks())])


class Open(World):
    """Leaves connections open while members stand still."""

    def carry(self, source: int, target: int) -> None:
        self.put(target, self.wires[source, target].pop(0))


class Unconfirmed(Follower):
    """Takes its own part for the end, although the sums of others may not have come."""

    def has_done(self, what: str) -> None:
        super().has_done("confirm" if what == "reduce" else what)


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (World, {"coordinator": Hasty}),
        (World, {"coordinator": Backward, "parts": 1}),
        (World, {"coordinator": Careless}),
        (World, {"follower": Impatient}),
        (Open, {"is_spread": True}),
        (World, {"is_spread": True, "follower": Unconfirmed}),
    ],
)
def test_mistakes_in_the_protocol_are_found(world, kinds):
    with pytest.raises(Broken):
        explore(world(2, 1, 1, 2, **kinds))


def test_marks_from_before_a_change_must_not_count(monkeypatch):
    monkeypatch.setattr(coordinator_module, "mark_of", lambda _epoch, step: 3 * step)
    with pytest.raises(Broken):
        explore(World(2, 1, 1, 2))

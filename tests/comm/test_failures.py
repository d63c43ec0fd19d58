"""Deadlines, failed ranks and mismatched calls: an error with names, never a hang."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.waiting import answered, scaled_by_load, wait_until_answered

from unisono.comm import check, post_failure, world
from unisono.comm.call import Call
from unisono.comm.health import failures, watchdog
from unisono.comm.health.failures import tells_of_another
from unisono.comm.lifecycle import say_returned
from unisono.errors import CollectiveMismatch, RankFailed, RankTimeout, UnisonoError


class Watchdog:
    """What the last of 64 ranks hears when it asks: all wait in one call, but for rank 1."""

    rank = 63

    def __init__(self, call):
        self._call = call

    def ask_stacks(self):
        waiting = {"stacks": '  ... in unisono\n  File "train.py", line 6 in f: `barrier()`'}
        waiting |= {"done": False, "call": self._call.describe(), "site": "train.py:6"}
        waiting |= {"group": self._call.key, "begun": {self._call.key: 1}}
        late = {"stacks": '  File "train.py", line 5 in f: `time.sleep(300)`', "begun": {}}
        late |= {"done": True, "call": None, "site": "train.py:5", "group": "", "op": ""}
        messages = {"op": "barrier", "receives_from": (), "sends_to": ()}
        return {r: {**messages, **(late if r == 1 else waiting)} for r in range(63)}


def test_a_deadline_of_many_ranks_is_short_and_begins_with_the_late_one(monkeypatch):
    call = Call("barrier", "world", "key", number=1)
    monkeypatch.setattr(watchdog, "serving", lambda _key: Watchdog(call))
    text = str(failures.timed_out(call, tuple(range(64)), 5.0))
    first, late, waiting, *stacks = text.splitlines()
    assert first.startswith("rank 1 has not arrived: barrier() #1 on world timed out after 5 s at ")
    assert first.endswith("; ranks 0, 2-63 wait for it")
    assert late == "  rank 1: alive, has made no call yet; it is at train.py:5"
    assert waiting == "  ranks 0, 2-63: latest collective barrier() #1 on world (under way)"
    assert stacks[0] == "--- rank 1"
    assert "time.sleep(300)" in stacks[1]
    assert stacks[2] == "--- ranks 0, 2-62"  # this one stands in the test
    assert len(text) < 2000


@pytest.mark.ranks(3)
def test_a_deadline_names_the_missing_rank_and_shows_its_stack(tmp_path):
    comm = world()

    def absent_minded():
        wait_until_answered(tmp_path, 0, 2)

    if comm.rank == 1:
        for _ in range(3):  # it has made more calls than the others, but not this one
            comm.send(torch.ones(1), 2)
        absent_minded()
        return
    for _ in range(3 if comm.rank == 2 else 0):
        comm.recv(torch.ones(1), 1)
    with pytest.raises(RankTimeout) as caught:
        comm.all_reduce(torch.ones(2), timeout_s=0.5)
    assert caught.value.missing == (1,)
    assert "absent_minded" in caught.value.stacks[1]
    assert "rank 1 has not arrived" in str(caught.value)
    assert "test_failures.py" in caught.value.site
    assert caught.value.op == "all_reduce"
    assert tells_of_another(caught.value)
    with pytest.raises(UnisonoError, match="no longer usable"):
        comm.barrier()
    answered(tmp_path)
    wait_until_answered(tmp_path, 0, 2)


@pytest.mark.parametrize(
    ("error", "is_news"),
    [
        (RankFailed("of a run that this rank has started itself", rank=1), False),
        (RankTimeout("raised by the user"), False),
        (RuntimeError("Connection closed by peer"), False),
        (ConnectionResetError("a socket of the user"), False),
        (RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistNetworkError("the store is gone"), True),
    ],
)
def test_only_what_comm_and_torch_raise_tells_of_another_rank(error, is_news):
    """Else an error of a rank's own would be taken for a consequence, and nobody were the cause."""
    assert tells_of_another(error) is is_news


@pytest.mark.ranks(3)
def test_a_posted_failure_reaches_ranks_that_wait(tmp_path):
    comm = world()
    comm.barrier()
    if comm.rank == 2:
        try:
            raise ZeroDivisionError("in the third rank")
        except ZeroDivisionError as error:
            post_failure(error)
        wait_until_answered(tmp_path, 0, 1)
        return
    started = time.monotonic()
    with pytest.raises(
        RankFailed, match=r"rank 2 of 3.*ZeroDivisionError: in the third rank"
    ) as got:
        comm.all_reduce(torch.ones(1), timeout_s=15.0)
    answered(tmp_path)
    assert time.monotonic() - started < scaled_by_load(3)
    assert got.value.rank == 2
    assert "test_failures.py" in got.value.traceback


@pytest.mark.ranks(3, backend=["gloo", "shm"])
def test_a_rank_that_has_returned_is_not_waited_for():
    comm = world()
    comm.barrier()
    if comm.rank == 2:
        assert comm.count("pages") + comm.count("pages") == 3
        say_returned()
        return
    with pytest.raises(CollectiveMismatch, match="rank 2 will not come") as caught:
        comm.all_gather_ints([1])
    assert caught.value.returned == {2: {"collectives": 1, "pages": 2}}
    assert f"rank {comm.rank} is in call 2" in str(caught.value)
    with pytest.raises(UnisonoError, match="no longer usable"):
        comm.barrier()


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_rank_whose_call_raised_and_that_has_returned_is_not_waited_for(monkeypatch):
    comm = world()
    comm.barrier()
    if comm.rank == 1:
        monkeypatch.setattr(type(comm._engine), "all_reduce_", None)  # a bug: it raises TypeError
        with pytest.raises(TypeError):
            comm.all_reduce(torch.ones(2))
        say_returned()
        return
    with pytest.raises(CollectiveMismatch, match="rank 1 will not come"):
        comm.all_reduce(torch.ones(2), timeout_s=60)


@pytest.mark.ranks(3, backend="shm")
def test_a_message_that_a_returned_rank_never_sent_is_not_waited_for():
    comm = world()
    others = [rank for rank in range(3) if rank != comm.rank]
    word = torch.ones(2)
    comm.exchange(dict.fromkeys(others, word), dict.fromkeys(others, word))
    if comm.rank == 2:
        comm.send(torch.zeros(0), 0)  # nothing travels, so nothing is counted
        comm.send(word, 0, tag=5)
        say_returned()
        return
    if comm.rank == 0:
        time.sleep(1.0)
        assert torch.equal(comm.recv(word, 2, tag=5), word)  # sent before the return
    started = time.monotonic()
    with pytest.raises(CollectiveMismatch, match="rank 2 will not send") as caught:
        comm.exchange(dict.fromkeys(others, word), dict.fromkeys(others, word))
    assert time.monotonic() - started < scaled_by_load(5)
    told = f"rank 2 returned after 1 messages to rank {comm.rank}, which waits for message 2"
    assert told in str(caught.value)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_messages_and_collectives_in_an_order_that_ends_are_left_alone():
    comm = world()
    word = torch.ones(2)
    comm.barrier()
    other = threading.Thread(target=lambda: comm.send(word, 0, tag=3)) if comm.rank else None
    if comm.rank == 0:
        time.sleep(1.2)
        assert comm.recv(word, 1).tolist() == [1, 1]  # sent before the collective
        late = comm.start.recv(word, 1, tag=3)
        assert comm.all_reduce(word).tolist() == [2, 2]
        assert late.wait().tolist() == [1, 1]
        return
    comm.start.send(word, 0)
    assert comm.all_reduce(word).tolist() == [2, 2]
    other.start()
    other.join()


CASES = {
    "different operations": lambda c: c.barrier() if c.rank == 1 else c.all_reduce(torch.ones(2)),
    "different reductions": lambda c: c.all_reduce(torch.ones(2), "max" if c.rank else "sum"),
    "different shapes": lambda c: c.all_reduce(torch.ones(2 + c.rank // 2)),
    "different dtypes": lambda c: c.all_reduce(
        torch.ones(2).to(torch.float64 if c.rank else torch.float32)
    ),
    "different roots": lambda c: c.broadcast(torch.ones(2), src=c.rank % 2),
    "different dims": lambda c: c.all_gather(torch.ones(2, 2), dim=c.rank % 2, sizes=[2] * 3),
    "different sizes": lambda c: c.reduce_scatter(
        torch.ones(4), sizes=[2, 1, 1] if c.rank else [1, 1, 2]
    ),
    "sends 1 rows to rank 1, which expects 2": lambda c: c.all_to_all(
        torch.ones(3), [1, 1, 1], [1 + (c.rank == 1), 1, 1]
    ),
    "requires_grad": lambda c: c.all_reduce(torch.ones(2, requires_grad=c.rank == 0)),
}


@pytest.mark.ranks(3)
def test_check_mode_names_ranks_and_lines_on_all_ranks():
    comm = world()
    with check():
        for words, mistake in CASES.items():
            with pytest.raises(CollectiveMismatch) as caught:
                mistake(comm)
            text = str(caught.value)
            assert words in text
            assert text.count("test_failures.py:") >= 3, text
            assert set(caught.value.calls) == {0, 1, 2}
            if words == "requires_grad":
                assert "requires_grad=True" in text.splitlines()[1]
                assert "requires_grad=False" in text.splitlines()[2]
            if words == "different operations":
                (odd,) = [line for line in text.splitlines() if "<- differs" in line]
                assert odd.strip().startswith("rank 1")
        assert comm.all_reduce(torch.ones(2)).tolist() == [3.0, 3.0]


@pytest.mark.ranks(2)
def test_check_mode_reports_a_rank_that_makes_no_call(tmp_path):
    comm = world()
    if comm.rank == 0:
        with check(), pytest.raises(RankTimeout, match="rank 1 has not arrived"):
            comm.all_reduce(torch.ones(1), timeout_s=0.5)
        answered(tmp_path)
    else:
        wait_until_answered(tmp_path, 0)


@pytest.mark.ranks(2)
def test_check_mode_passes_what_is_right():
    comm = world()
    with check():
        comm.all_gather(torch.ones(comm.rank, 2))
        comm.all_to_all(torch.ones(3 + comm.rank), [1 + comm.rank, 2], [1 + comm.rank, 2])
        comm.scatter(torch.ones(3) if comm.rank == 0 else None)
        comm.broadcast(torch.ones(2) if comm.rank == 0 else None, like=((2,), torch.float32))
        comm.reduce(torch.full((3,), float("nan")))
        comm.all_reduce(torch.full((3,), float("nan")))
        comm.exchange({1 - comm.rank: torch.ones(2)}, {1 - comm.rank: torch.ones(2)})
        comm.all_gather_object([comm.rank])

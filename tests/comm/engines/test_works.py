"""Works and futures as torch sees them: order, errors, deadlines, callbacks. No ranks needed."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.waiting import scaled_by_load

from unisono.comm.engines.mpi.channel import CallQueue
from unisono.comm.torch.work import TransportWork


@pytest.fixture
def calls():
    queue = CallQueue("queue under test")
    yield queue
    assert queue.close(5)


def failing():
    raise ValueError("broken on purpose")


def posted(calls, call, outputs=()):
    job = calls.start(call)
    pending = SimpleNamespace(wait=lambda timeout_s: job.wait(timeout_s or 60.0), done=job.done)
    return TransportWork(pending, job, outputs)


def test_calls_run_in_the_order_in_which_they_were_issued(calls):
    seen = []
    works = [posted(calls, lambda i=i: seen.append(i)) for i in range(50)]
    calls.run(lambda: seen.append(50))
    assert seen == list(range(51))
    assert all(work.is_completed() and work.is_success() for work in works)


def test_a_blocking_call_runs_in_the_callers_thread_and_starts_no_other(calls):
    threads = threading.active_count()
    seen = []
    calls.run(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    assert threading.active_count() == threads


def test_a_call_queued_behind_another_threads_call_is_run_when_that_ends(calls):
    """Else the second thread would sleep for ever beside a background thread that nobody wakes."""
    posted(calls, lambda: None).wait()  # there is a background thread now
    started, gate, seen = threading.Event(), threading.Event(), []
    first = threading.Thread(target=calls.run, args=(lambda: (started.set(), gate.wait()),))
    second = threading.Thread(target=calls.run, args=(lambda: seen.append(1),), daemon=True)
    first.start()
    started.wait()
    second.start()
    while not calls._queued:
        time.sleep(0.001)
    time.sleep(0.02)  # it sleeps now
    gate.set()
    first.join()
    second.join(timeout=10)
    assert seen == [1]


def test_a_call_issued_by_a_callback_runs_at_once(calls):
    seen = []

    def in_callback(_):
        posted(calls, lambda: seen.append("inner")).wait()
        calls.run(lambda: seen.append("blocking"))
        return "done"

    gate = threading.Event()
    outer = posted(calls, gate.wait)
    future = outer.get_future().then(in_callback)
    after = posted(calls, lambda: seen.append("after"))
    gate.set()
    assert future.wait() == "done"
    after.wait()
    assert seen == ["inner", "blocking", "after"]


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_callback_added_late_makes_its_calls_after_those_issued_before_it(calls, has_ended):
    seen, gate = [], threading.Event()
    early = posted(calls, (lambda: None) if has_ended else gate.wait)
    if has_ended:
        early.wait()
    last = posted(calls, gate.wait)
    future = early.get_future()
    assert future.done() == has_ended  # DDP waits for the work, and takes the value of its future
    gate.set()
    future.then(lambda _: calls.run(lambda: seen.append(last.is_completed()))).wait()
    assert seen == [True]


def test_an_error_is_raised_by_every_way_to_wait(calls):
    work = posted(calls, failing)
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            work.wait()
    with pytest.raises(ValueError, match="on purpose"):
        work.synchronize()
    with pytest.raises(RuntimeError, match="on purpose"):
        work.get_future().wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="on purpose"):
        calls.run(failing)


def test_a_finite_wait_gives_up_and_the_call_still_ends(calls):
    gate = threading.Event()
    work = posted(calls, gate.wait)
    time.sleep(0.02)  # let the background thread have it
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        work.wait(timedelta(milliseconds=50))
    assert time.monotonic() - began < scaled_by_load(2)
    gate.set()
    assert work.wait()


def test_a_future_holds_the_outputs_as_a_flat_list(calls):
    x = torch.ones(2)
    assert posted(calls, lambda: x.add_(1), [x]).get_future().wait()[0] is x
    early = posted(calls, lambda: None, [x])
    assert early.get_future() is early.get_future()


def test_many_futures_asked_for_while_calls_end(calls):
    for i in range(300):
        work = posted(calls, lambda i=i: None if i % 3 else time.sleep(1e-5), [])
        assert work.get_future().wait() == []


def test_an_ended_call_keeps_nothing_alive(calls):
    x = torch.ones(3)
    gone = weakref.ref(x)
    work = posted(calls, lambda x=x: x.add_(1), [x])
    work.wait()
    future = work.get_future()
    future.wait()
    del x, work, future
    gc.collect()
    assert gone() is None


def test_the_background_thread_ends_with_the_queue():
    threads = threading.active_count()
    queue = CallQueue("short lived")
    posted(queue, lambda: None).wait()
    assert threading.active_count() == threads + 1
    assert queue.close(5)
    assert threading.active_count() == threads


@pytest.mark.ranks(2, backend="shm")
@pytest.mark.parametrize("way", ["blocking", "wait", "future", "funcol", "ddp"])
def test_an_error_of_a_kernel_reaches_the_caller_by(way):
    group = dist.group.WORLD
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    engine = group.unisono_engine

    def broken(*args, **kwargs):
        raise ArithmeticError("a bug in a kernel")

    engine.all_reduce_ = broken
    x = torch.ones(3)
    ways = {
        "blocking": lambda: dist.all_reduce(x),
        "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "funcol": lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
        "ddp": lambda: model(torch.ones(1, 3)).sum().backward(),
    }
    with pytest.raises((ArithmeticError, RuntimeError), match="a bug in a kernel"):
        ways[way]()
    del engine.all_reduce_


@pytest.mark.ranks(2, backend="shm")
def test_two_groups_used_in_different_order_without_waiting():
    a, b = dist.new_group(backend="shm"), dist.new_group(backend="shm")
    first, second = (a, b) if dist.get_rank() == 0 else (b, a)
    x, y = torch.ones(50_000), torch.ones(50_000)
    tensors = {a: x, b: y}
    works = [dist.all_reduce(tensors[g], group=g, async_op=True) for g in (first, second)]
    for work in works:
        work.wait()
    assert x.unique().tolist() == y.unique().tolist() == [2.0]


@pytest.mark.ranks(2, backend="shm")
def test_use_after_destroy_names_the_cause():
    group = dist.new_group(backend="shm")
    dist.destroy_process_group(group)
    for async_op in (False, True):
        options = dist.AllreduceOptions()
        options.asyncOp = async_op
        with pytest.raises(Exception, match="closed by destroy_process_group"):
            group.allreduce([torch.ones(1)], options)

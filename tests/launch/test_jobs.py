"""Jobs in the background, requests to stop, new attempts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.waiting import scaled_by_load, wait_until

import unisono
from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout, Requeue
from unisono.launch import dry_run, simulate_preemption

QUIET = unisono.Logs(console="none")


def test_a_job_runs_in_the_background_and_gives_its_results():
    def work():
        print("line")
        return unisono.world().rank, unisono.job_dir() == Path(os.environ["UNISONO_JOB_DIR"])

    job = unisono.submit(work, on="cpu", ranks=2)
    assert job.wait(60)
    assert list(job.result()) == [(0, True), (1, True)]
    assert (job.status(), job.done(), job.reason, job.attempt) == ("done", True, "", 0)
    assert job.logs(1) == "line\n"
    assert not job.dir.exists()
    job.cancel()  # too late, and no error


def sleepy():
    print("a\nb\nc", flush=True)
    time.sleep(600)


def test_a_running_job_shows_its_stacks_and_its_lines_and_is_cancelled(tmp_path):
    job = unisono.submit(sleepy, on="cpu", ranks=2, logs=tmp_path)
    wait_until(lambda: all(job.logs(rank).count("\n") == 3 for rank in range(2)))
    assert job.status() == "running"
    assert job.logs(0, tail=2) == "b\nc\n"
    stacks = job.stacks()
    assert sorted(stacks) == [0, 1]
    assert all("in sleepy" in text for text in stacks.values())
    with pytest.raises(PlatformError, match="rank from 0 to 1"):
        job.logs(9)
    with pytest.raises(PlatformError, match="not elastic"):
        job.resize(3)
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0.01)
    job.cancel()
    assert (job.wait(10), job.status(), job.stacks()) == (True, "cancelled", {})
    assert list(job.logs(0, follow=True)) == ["a", "b", "c"]
    with pytest.raises(JobCancelled) as caught:
        job.result()
    assert caught.value.job_id == job.id


def test_a_job_without_a_directory_to_keep_leaves_none():
    job = unisono.submit(sleepy, on="cpu", ranks=1)
    job.cancel()
    assert job.status() == "cancelled"
    assert not job.dir.exists()


def test_a_job_whose_last_word_raises_has_failed_and_one_that_is_refused_leaves_nothing(
    tmp_path, monkeypatch
):
    platform = unisono.Platform(device="cpu", ranks=1, upon_finish=lambda: 1 / 0)
    job = unisono.submit(os.getpid, on=platform)
    assert job.wait(60)
    assert job.status() == "failed"
    with pytest.raises(ZeroDivisionError):
        job.result()
    monkeypatch.setenv("UNISONO_STDIN_RANK", "7")
    with pytest.raises(PlatformError, match="not a rank of this run"):
        unisono.submit(os.getpid, on="cpu", ranks=1)
    assert list(tmp_path.glob("unisono-*")) == []


def test_a_failed_job_tells_why(tmp_path):
    job = unisono.submit(lambda: 1 / 0, on="cpu", ranks=1, logs=tmp_path)
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        job.result()
    assert job.status() == "failed"
    assert "ZeroDivisionError" in job.reason
    late = unisono.submit(time.sleep, 600, on="cpu", ranks=1, timeout_s=0.2, logs=tmp_path)
    with pytest.raises(RankTimeout):
        late.result()
    assert late.status() == "timeout"
    with pytest.raises(PlatformError, match=r"unisono\.run"):
        unisono.submit(os.getpid, on="inline")


def train(folder, steps, preempt_at, on_rank=0):
    """Train, save when asked to stop, go on in the next attempt."""
    comm = unisono.world()
    file = Path(folder, f"state-{comm.rank}")
    done = [int(word) for word in file.read_text().split()] if file.exists() else []
    for step in range(len(done), steps):
        done.append(step)
        if step == preempt_at and unisono.restart_count() == 0 and comm.rank == on_rank:
            simulate_preemption()
        if step == preempt_at and unisono.restart_count() == 0:
            time.sleep(0.5)  # the signal takes its way
        if unisono.should_stop():
            file.write_text(" ".join(map(str, done)))
            unisono.requeue()
    return done, unisono.restart_count()


@pytest.mark.parametrize("on_rank", [0, 1])
def test_a_preempted_run_saves_and_goes_on_where_it_was(tmp_path, on_rank):
    (tmp_path / "state").mkdir()
    results = unisono.run(train, tmp_path / "state", 6, 2, on_rank, on="cpu", ranks=2, logs=QUIET)
    assert list(results) == [([0, 1, 2, 3, 4, 5], 1)] * 2
    assert results.restarts == 1


def test_the_user_may_choose_the_signal_and_the_time():
    def wait():
        begin = time.monotonic()
        if unisono.restart_count() == 0 and unisono.world().rank == 1:
            os.kill(os.getpid(), signal.SIGALRM)
        if unisono.restart_count() == 1 and unisono.world().rank == 0:
            simulate_preemption(after_s=0.2)
        while not unisono.should_stop():
            time.sleep(0.01)
        if unisono.restart_count() == 0:
            unisono.requeue()
        return time.monotonic() - begin

    platform = unisono.Platform(device="cpu", ranks=2, stop_signals=("SIGALRM",))
    results = unisono.run(wait, on=platform, logs=QUIET, timeout_s=60)
    assert results.restarts == 1
    assert results[0] >= 0.2


def test_preemption_can_be_rehearsed_in_this_process(tmp_path):
    results = unisono.run(train, tmp_path, 4, 1, on="inline")
    assert list(results) == [([0, 1, 2, 3], 1)]
    assert unisono.restart_count() == 0
    assert not unisono.should_stop()
    with pytest.raises(PlatformError, match="every=0"):
        unisono.should_stop(every=0)


def test_a_run_that_asks_for_ever_is_ended():
    platform = unisono.Platform(device="cpu", ranks=1, max_requeues=1)
    with pytest.raises(RankFailed, match="2 requeues > max_requeues=1"):
        unisono.run(unisono.requeue, on=platform, logs=QUIET)


def test_a_requeue_that_nobody_answers_says_so():
    with pytest.raises(Requeue, match=r"to start this function again\n.*HINT: call it inside"):
        unisono.requeue()


def test_attempts_run_out_and_all_causes_are_told(monkeypatch):
    def fail():
        raise OSError(f"attempt {unisono.restart_count()}")

    with pytest.raises(RankFailed) as caught:
        unisono.run(fail, on="cpu", ranks=1, max_restarts=1, logs=QUIET)
    assert "attempt 1" in str(caught.value)
    assert "attempt 0: rank 0 of 1" in caught.value.__notes__[0]


def test_an_error_before_the_start_is_not_tried_again():
    class Explosive:
        def __reduce__(self):
            return eval, ("1/0",)

    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        unisono.run(print, Explosive(), on="cpu", ranks=1, max_restarts=5, logs=QUIET)
    assert caught.value.attempt == 0
    assert time.monotonic() - begin < scaled_by_load(20)


def test_a_rank_that_is_killed_is_started_again():
    def work():
        if unisono.restart_count() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return unisono.restart_count()

    assert list(unisono.run(work, on="cpu", ranks=2, max_restarts=1, logs=QUIET)) == [1, 1]


def test_a_dry_run_shows_the_ranks_and_starts_nothing(tmp_path):
    table = dry_run(print, on="cpu", ranks=3, logs=tmp_path / "logs").splitlines()
    assert table[0].split() == ["rank", "node", "device"]
    assert [line.split()[0] for line in table[1:]] == ["0", "1", "2"]
    assert not (tmp_path / "logs").exists()

"""Jobs in the background, requests to stop, new attempts."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.waiting import wait_until

import unisono
from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout, Requeue
from unisono.launch import Job, dry_run, job_files, simulate_preemption
from unisono.processes import process_start

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


def test_a_running_job_shows_its_stacks_and_is_cancelled_from_another_process(tmp_path):
    job = unisono.submit(sleepy, on="cpu", ranks=2, logs=tmp_path)
    wait_until(lambda: all(job.logs(rank).count("\n") == 3 for rank in range(2)))
    assert job.status() == "running"
    assert job.logs(0, tail=2) == "b\nc\n"
    other = Job(job.dir)  # as another process would have it
    for handle in (job, other):
        stacks = handle.stacks()
        assert sorted(stacks) == [0, 1]
        assert all("in sleepy" in text for text in stacks.values())
        with pytest.raises(PlatformError, match="rank from 0 to 1"):
            handle.logs(9)
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0.01)
    assert Job.attach(job.dir) is job
    assert (other.id, other.status()) == (job.id, "running")
    # An order to the supervising thread: this process, which submitted the job, is not touched.
    other.cancel()
    assert (other.status(), job.wait(10), job.status()) == ("cancelled", True, "cancelled")
    assert list(other.logs(0, follow=True)) == ["a", "b", "c"]
    for handle in (job, other):
        with pytest.raises(JobCancelled) as caught:
            handle.result()
        assert caught.value.job_id == job.id


def test_a_job_without_a_directory_to_keep_can_be_cancelled_from_both_sides(monkeypatch, tmp_path):
    for side in (0, 1):
        job = unisono.submit(sleepy, on="cpu", ranks=1)
        monkeypatch.chdir(tmp_path)  # its id is enough, wherever one is
        handles = job, Job(job_files.directories()[job.id])
        handles[side].cancel()
        assert job.wait(30)
        assert not job.dir.exists()
        assert job.id not in job_files.directories()
        assert job.status() == "cancelled"
        with pytest.raises(JobCancelled if side else PlatformError):
            handles[1].result()


def test_a_job_that_ends_at_the_moment_of_its_cancellation_is_no_error(tmp_path, monkeypatch):
    me = {"pid": os.getpid(), "pid_start": process_start(os.getpid())}
    (tmp_path / "job").mkdir(mode=0o700)
    state = {"id": "job", "ranks": 1, "state": "running", "attempt": 0, "reason": "", **me}
    job_files.write_state(tmp_path / "job", state)
    job = Job.attach(tmp_path / "job")
    with monkeypatch.context() as patch:
        patch.setattr(job, "done", lambda: shutil.rmtree(job.dir))
        patch.setattr(job, "wait", lambda _: True)
        job.cancel()
    assert (job.status(), job.stacks()) == ("cancelled", {})


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


def test_the_directory_of_a_run_that_somebody_waits_for_is_not_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = job_files.LOCAL_JOBS / "run"
    directory.mkdir(parents=True, mode=0o700)
    job_files.write_state(directory, {"plan": {}})
    assert job_files.directories() == {}
    with pytest.raises(PlatformError, match="somebody waits for"):
        Job.attach(directory)


def test_ids_are_found_by_a_unique_part_and_forgotten_when_their_directory_is(tmp_path):
    for job in ("train-1234", "train-5678"):
        (tmp_path / job).mkdir()
        job_files.write_state(tmp_path / job, {"id": job, "ranks": 1})
        job_files.remember(job, tmp_path / job)
    assert Job.attach("5678").id == "train-5678"
    with pytest.raises(PlatformError, match="2 jobs with that in their names"):
        Job.attach("train")
    (tmp_path / "train-1234" / "job.json").unlink()
    assert list(job_files.directories()) == ["train-5678"]
    link = job_files.folder() / "train-1234"
    assert link.is_symlink()  # it may be on another host
    os.utime(link, (0, 0), follow_symlinks=False)
    job_files.directories()
    assert not link.is_symlink()


def test_a_kept_job_is_known_by_its_directory_and_only_to_its_owner(tmp_path):
    job = unisono.submit(lambda: [torch.ones(2), lambda: 3], on="cpu", ranks=1, logs=tmp_path)
    job.wait(60)
    other = job_handle = Job.attach(job.dir)
    assert torch.equal(other.result()[0][0], torch.ones(2))
    assert other.result()[0][1]() == 3  # a function of nobody's module
    assert (job_handle.reason, job_handle.stacks()) == ("", {})
    outcome = job.dir / job_files.OUTCOME
    assert outcome.stat().st_mode & 0o777 == 0o600
    outcome.chmod(0o644)
    with pytest.raises(PlatformError, match="mode 0644"):
        other.result()
    outcome.unlink()
    outcome.symlink_to(job.dir / job_files.STATE)
    with pytest.raises(PlatformError, match="a link"):
        other.result()
    with pytest.raises(PlatformError, match="no such job"):
        Job.attach("nothing-here")


def test_a_failed_job_tells_why(tmp_path):
    job = unisono.submit(lambda: 1 / 0, on="cpu", ranks=1, logs=tmp_path)
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        job.result()
    assert job.status() == "failed"
    assert "ZeroDivisionError" in job.reason
    with pytest.raises(RankFailed, match="ZeroDivisionError") as caught:
        Job.attach(job.dir).result()
    assert (caught.value.rank, caught.value.exception) == (0, None)
    assert "lambda: 1 / 0" in str(caught.value)
    late = unisono.submit(time.sleep, 600, on="cpu", ranks=1, timeout_s=0.2, logs=tmp_path)
    with pytest.raises(RankTimeout):
        late.result()
    assert late.status() == "timeout"
    with pytest.raises(PlatformError, match=r"unisono\.run"):
        unisono.submit(os.getpid, on="inline")


def train(folder, steps, preempt_at, on_rank):
    """Train, save when asked to stop, go on in the next attempt."""
    comm = unisono.world()
    file = Path(folder, f"state-{comm.rank}")
    done = [int(word) for word in file.read_text().split()] if file.exists() else []
    for step in range(len(done), steps):
        done.append(step)
        if step == preempt_at and unisono.restart_count() == 0 and comm.rank == 0:
            simulate_preemption(rank=on_rank)
        if step == preempt_at and unisono.restart_count() == 0:
            time.sleep(0.5)  # the signal takes its way
        if unisono.should_stop():
            file.write_text(" ".join(map(str, done)))
            unisono.requeue()
    return done, unisono.restart_count()


@pytest.mark.parametrize("on_rank", [None, 1])
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
    results = unisono.run(train, tmp_path, 4, 1, None, on="inline")
    assert list(results) == [([0, 1, 2, 3], 1)]
    assert unisono.restart_count() == 0
    assert not unisono.should_stop()
    with pytest.raises(PlatformError, match="every=0"):
        unisono.should_stop(every=0)
    with pytest.raises(PlatformError, match="ranks 0 to 0"):
        simulate_preemption(rank=3)


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
    assert time.monotonic() - begin < 20


def test_a_death_can_be_rehearsed(monkeypatch):
    monkeypatch.setenv("UNISONO_TEST_KILL", "1:0.05")

    def work():
        if unisono.restart_count() == 0:
            time.sleep(60)
        return unisono.restart_count()

    results = unisono.run(work, on="cpu", ranks=2, max_restarts=1, logs=QUIET)
    assert list(results) == [1, 1]


def test_a_dry_run_shows_the_ranks_and_starts_nothing(tmp_path):
    table = dry_run(print, on="cpu", ranks=3, logs=tmp_path / "logs").splitlines()
    assert table[0].split() == ["rank", "node", "device"]
    assert [line.split()[0] for line in table[1:]] == ["0", "1", "2"]
    assert not (tmp_path / "logs").exists()

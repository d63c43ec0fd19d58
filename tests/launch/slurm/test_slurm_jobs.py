"""Jobs on a real cluster: results, failures, handles, pre-emption, time limits, leftovers.

Two jobs that take a minute, because that is the shortest time limit of SLURM, begin first and are
looked at last.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.launch.contract import CASES, HOSTILE, OF_ALL_PLACES, Place, shows_stacks
from tests.waiting import wait_until

import unisono
from unisono.errors import JobCancelled, PlatformError, RankFailed, RankTimeout
from unisono.launch import Job, Platform, Wrapper
from unisono.launch.elastic.policy import read_events

QUIET = unisono.Logs(console="none")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


def platform(**fields):
    """Return a platform for a job without GPUs on two nodes."""
    values = {"name": "test", "n_nodes": 2, "n_gpus_per_node": 0, "n_cpus_per_node": 1}
    return Platform(
        **{**values, "device": "slurm", "mem_per_node": None, "timeout_min": 5, **fields}
    )


def processes_of(folder):
    """Return the processes that jobs in `folder` have started, with the rank of each."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pairs = (path / "environ").read_bytes().split(b"\0")
            variables = dict(pair.partition(b"=")[::2] for pair in pairs)
            command = (path / "cmdline").read_bytes()
            if os.fsencode(folder) in variables.get(b"UNISONO_JOB_DIR", b"") + command:
                rank = b"-1" if command.startswith(b"srun") else variables[b"SLURM_PROCID"]
                found[int(path.name)] = int(rank)
    return found


@pytest.fixture
def nobody_left(tmp_path):
    """A test leaves no process of its jobs behind; one may be about to end."""
    yield
    wait_until(lambda: not processes_of(tmp_path / ".unisono"), 20.0)


pytestmark.append(pytest.mark.usefixtures("nobody_left"))


def training(folder):
    """Count steps until asked to stop, save, and do a few more when started again.

    Return whether there was something saved, the last step, and the attempt.
    """
    comm = unisono.world()
    file = Path(folder, f"step-{comm.rank}")
    is_saved = file.exists()
    first = int(file.read_text()) if is_saved else 0
    last = first + 3 if unisono.restart_count() else 10_000
    for step in range(first, last):
        if step == 1 and comm.rank == 0:
            Path(folder, "under-way").touch()
        time.sleep(0.1)
        if unisono.should_stop():
            file.write_text(str(step))
            unisono.requeue()
    return is_saved, last, unisono.restart_count()


def start_again(cluster, job):
    """Spare us the two minutes for which SLURM holds back a job that was requeued.

    To be called until it runs: before it is in the queue again there is nothing to change, and the
    scheduler needs a moment to take notice.
    """
    if "Reason=BeginTime" in cluster.call("scontrol", "show", "job", job.id):
        time.sleep(2.5)  # a node refuses a job that begins in the second in which it was revoked
        with suppress(RuntimeError):  # it has just begun
            cluster.call("scontrol", "update", f"JobId={job.id}", "StartTime=now")
        time.sleep(1.0)


@pytest.fixture(scope="module")
def long_jobs(slurm_cluster, tmp_path_factory):
    """Two jobs with a limit of a minute: one takes the warning, the other does not care."""
    folder = tmp_path_factory.mktemp("long")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slurm_cluster.variables.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        # On n1, and where no other job can drive them out.
        where = {"partition": "urgent", "n_nodes": 1, "ranks": 1, "timeout_min": 1}
        on = platform(**where, slurm_additional_parameters={"nodelist": "n1"})
        warned = unisono.submit(training, str(folder), on=on)
        heedless = unisono.submit(time.sleep, 600, on=on)
    yield warned, heedless, folder
    for job in (warned, heedless):
        slurm_cluster.call("scancel", "--quiet", job.id)


@pytest.mark.usefixtures("forked_jobs")
def test_a_function_runs_on_two_nodes_and_all_results_come_back(cluster, tmp_path, long_jobs):
    def work(x):
        comm = unisono.world()
        total = comm.all_reduce(torch.tensor(float(comm.rank + x)))
        print("line of", comm.rank)
        return comm.rank, total.item(), os.environ["SLURMD_NODENAME"], os.environ["NODE_RANK"]

    results = unisono.run(work, 1, on="slurm", nodes=2, logs=QUIET)
    assert list(results) == [(0, 3.0, "n1", "0"), (1, 3.0, "n2", "1")]
    assert results.hosts == ("n1", "n2")
    assert (results.platform, results.restarts, results.threads) == ("slurm", 0, 1)
    assert results.log(1) == "line of 1\n"
    assert results.dir.parent == tmp_path / ".unisono" / "jobs"
    assert stat.S_IMODE(results.dir.stat().st_mode) == 0o700
    for name in ("invitation.json", "job.json", "rank-0.log", "states.pkl"):
        assert stat.S_IMODE((results.dir / name).stat().st_mode) == 0o600
    job = Job.attach(results.dir)
    assert (job.status(), job.reason, job.attempt) == ("done", "", 0)
    assert list(job.result()) == list(results)
    job.cancel()  # too late, and no error

    # SLURM starts a job again that ended while it was being driven out: that must do nothing.
    def is_completed(times):
        text = cluster.call("scontrol", "show", "job", job.id)
        return "JobState=COMPLETED" in text and f"Restarts={times}" in text

    wait_until(lambda: is_completed(0))
    cluster.call("scontrol", "requeue", job.id)
    wait_until(lambda: start_again(cluster, job) or is_completed(1))
    assert (job.status(), job.attempt) == ("done", 0)


@OF_ALL_PLACES
def test_the_contract_of_places(cluster, case, tmp_path, request):
    if not shows_stacks(case):
        request.getfixturevalue("forked_jobs")
    # A batch script cannot have a line break in the name of a file; that is refused.
    hostile = HOSTILE.replace("\n", "")
    place = Place("slurm", hostile=hostile, has_job=True, options={"n_nodes": 2})
    CASES[case](place, tmp_path)


@pytest.mark.usefixtures("forked_jobs")
def test_two_ranks_of_one_node_with_a_gpu_pmi_and_a_last_word(cluster, tmp_path):
    marker = tmp_path / "finished"

    def work(global_rank, local_rank, group, platform):
        os.fstat(int(os.environ["PMI_FD"]))
        return global_rank, local_rank, os.environ["CUDA_VISIBLE_DEVICES"], unisono.world().size

    on = platform(
        n_nodes=1,
        ranks=2,
        n_cpus_per_node=2,
        srun_args=["--mpi=pmi2"],  # ranks inherit a descriptor of it
        verbose=False,
        slurm_additional_parameters={"gpus_per_node": 1},
        upon_finish=lambda: marker.write_text(os.environ["RANK"]),
    )
    job = Wrapper(on).start(work)
    assert isinstance(job, Job)
    assert job.result(120)[:] == ((0, 0, "0", 2), (1, 1, "0", 2))
    assert marker.read_text() == "0"


@pytest.mark.usefixtures("forked_jobs")
def test_an_array_has_a_job_for_each_value(cluster, tmp_path):
    def work(value, factor):
        print("value", value)
        if value == 5:
            raise ValueError("five")
        return value * factor, unisono.world().all_reduce(torch.ones(1)).item()

    two_at_once = platform(slurm_additional_parameters={"array_parallelism": 2})
    jobs = unisono.launch.submit_array(work, [3, 4, 5], factor=10, on=two_at_once)
    number = jobs[0].id.partition("_")[0]
    assert [job.id for job in jobs] == [f"{number}_{index}" for index in range(3)]
    folder = jobs[0].dir.parent
    assert "#SBATCH --array=0-2%2" in (folder / f"{number}_submission.sh").read_text()
    assert [job.dir for job in jobs] == [folder / str(index) for index in range(3)]
    assert jobs[2].status() in ("pending", "running")
    again = Job.attach(jobs[1].id)
    assert list(again.result()) == [(40, 2.0)] * 2
    assert again.logs(1) == "value 4\n"
    assert list(jobs[0].result()) == [(30, 2.0)] * 2
    with pytest.raises(RankFailed, match="five"):
        jobs[2].result()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_of_a_gpu_job_compute_on_their_gpu(cluster):
    def work():
        comm = unisono.world()
        return str(comm.device), comm.all_reduce(torch.ones(2, device=comm.device)).tolist()

    results = unisono.run(work, on=platform(n_nodes=1, n_gpus_per_node=1), logs=QUIET)
    assert list(results) == [("cuda:0", [1.0, 1.0])]


def test_a_running_job_is_seen_from_another_process_and_can_be_cancelled(cluster, tmp_path):
    def sleepy():
        print("a\nb\nc", flush=True)
        time.sleep(600)

    job = unisono.submit(sleepy, on=platform(), logs=tmp_path / "kept")
    wait_until(lambda: all(job.logs(rank).count("\n") == 3 for rank in (0, 1)))
    assert (job.status(), job.done(), job.id.isdigit()) == ("running", False, True)
    assert job.logs(0, tail=1) == "c\n"
    stacks = job.stacks()
    assert sorted(stacks) == [0, 1]
    assert all("in sleepy" in text for text in stacks.values())
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0.01)

    def unisono_job(*words):  # in a process that knows nothing but the number
        command = [sys.executable, "-m", "unisono", "job", *words, job.id]
        env = {**os.environ, "XDG_STATE_HOME": "/nowhere"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd="/", env=env, check=False
        )
        return done.returncode, done.stdout.strip()

    assert unisono_job("status")[1].startswith("running, attempt 0")
    assert unisono_job("logs")[1] == "a\nb\nc"
    assert unisono_job("cancel") == (0, "cancelled")
    assert job.wait(60)
    assert job.status() == "cancelled"
    assert list(job.logs(0, follow=True)) == ["a", "b", "c"]
    with pytest.raises(JobCancelled) as caught:
        job.result()
    assert caught.value.job_id == job.id


def sleep_after(folder):
    """Sleep, and let a file tell so."""
    Path(folder, f"asleep-{unisono.world().rank}").touch()
    time.sleep(600)


def sleeping_job(tmp_path):
    """Return a job whose two ranks are asleep."""
    job = unisono.submit(sleep_after, tmp_path, on=platform(), logs=tmp_path / ".unisono")
    wait_until(lambda: len(list(tmp_path.glob("asleep-?"))) == 2)
    return job


def test_a_killed_supervisor_takes_all_along(cluster, tmp_path):
    job = sleeping_job(tmp_path)
    os.kill(min(pid for pid, rank in processes_of(job.dir).items() if rank == 0), signal.SIGKILL)
    with pytest.raises(RankFailed, match="ended without a result"):
        job.result(60)


def test_a_job_that_waits_says_why_and_can_be_cancelled(cluster):
    job = unisono.submit(print, on=platform(slurm_additional_parameters={"hold": True}))
    wait_until(lambda: job.reason == "JobHeldUser")
    assert (job.status(), job.attempt) == ("pending", 0)
    assert Job.attach(job.dir).status() == "pending"
    job.cancel()
    assert job.status() == "cancelled"
    with pytest.raises(JobCancelled):
        job.result()


def test_a_job_that_is_driven_out_saves_and_goes_on_later(cluster, tmp_path, long_jobs):
    job = unisono.submit(training, str(tmp_path), on=platform())
    wait_until((tmp_path / "under-way").exists)
    # All CPUs of n2: the job has to make room.
    urgent = ("sbatch", "--partition=urgent", "--nodes=1", "--nodelist=n2", "--ntasks=4")
    cluster.call(*urgent, "--output=/dev/null", "--wrap=true")
    wait_until(lambda: job.status() == "requeued")
    wait_until(lambda: "BeginTime" in job.reason)
    assert not job.done()
    wait_until(lambda: start_again(cluster, job) or job.status() == "running" or job.done())
    results = job.result(120)
    assert results.restarts == 1
    assert results[0] == results[1]  # both stopped after the same step
    assert results[0] == (True, int((tmp_path / "step-1").read_text()) + 3, 1)
    assert "--- attempt 1 on" in results.log(0)


def elastic_training(folder):
    """Train elastically, slowly until somebody says so.

    One rank kills itself in a closure, and later one is stopped by a signal.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    run = unisono.train.elastic(model, optimizer, data, batch_size=16, shards=4, steps=400)
    checkpoint = unisono.Checkpoint(folder / "saved")
    checkpoint.restore(run=run)

    def loss(batch):
        for number, sent in ((3, signal.SIGKILL), (9, signal.SIGSTOP)):
            if run.number >= number and run.members == 2:
                with suppress(FileExistsError):
                    (folder / sent.name).touch(exist_ok=False)
                    os.kill(os.getpid(), sent)
        return model(batch[0]).square().mean()

    for step in run:
        step(loss)
        time.sleep(0.0 if (folder / "hurry").exists() else 0.1)
        if unisono.should_stop():
            checkpoint.save(step.number + 1, run=run)
            unisono.requeue()
    return [tensor.tolist() for tensor in model.state_dict().values()], run.number


def test_an_elastic_job_goes_on_without_ranks_that_die_without_a_node_and_after_a_requeue(
    cluster, tmp_path
):
    def seen(what):
        return [event["what"] for event in read_events(job.dir)].count(what)

    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "hurry").touch()
    expected = elastic_training(tmp_path / "alone")
    job = unisono.submit(elastic_training, tmp_path, on=platform(), elastic=True)
    wait_until(lambda: (seen("died"), seen("joined")) == (2, 4))  # a new rank for each
    urgent = ("sbatch", "--partition=urgent", "--nodes=1", "--nodelist=n2", "--ntasks=4")
    cluster.call(*urgent, "--output=/dev/null", "--wrap=true")
    wait_until(lambda: job.status() == "requeued")
    wait_until(lambda: start_again(cluster, job) or job.status() == "running" or job.done())
    wait_until(lambda: seen("joined") == 6)
    cluster.call("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    try:
        wait_until(lambda: seen("died") == 3)
        (tmp_path / "hurry").touch()
        found = job.result(120)
    finally:
        with suppress(RuntimeError):  # it may have come back by itself
            cluster.call("scontrol", "update", "nodename=n2", "state=resume")
    assert list(found) == [expected]  # of the node that is left
    assert found.restarts == 1
    with pytest.raises(PlatformError, match="gives a job its nodes once"):
        job.resize(2)


def test_a_requeue_that_the_cluster_refuses_is_told(cluster, tmp_path):
    job = unisono.submit(training, str(tmp_path), on=platform(n_nodes=1))
    wait_until((tmp_path / "under-way").exists)
    cluster.call("scontrol", "update", f"JobId={job.id}", "Requeue=0")
    cluster.call("scancel", "--signal=USR2", job.id)
    with pytest.raises(RankFailed, match=f"does not requeue job {job.id}"):
        job.result(90)
    assert (tmp_path / "step-0").exists()
    assert job.status() == "failed"


def test_a_job_that_is_cancelled_by_hand_does_not_come_back(cluster, tmp_path):
    job = unisono.submit(training, str(tmp_path), on=platform(n_nodes=1))
    wait_until((tmp_path / "under-way").exists)
    cluster.call("scancel", job.id)  # looks like pre-emption to the ranks, which save and leave
    assert job.wait(60)
    assert (job.status(), job.attempt) == ("cancelled", 0)


def test_a_request_the_cluster_cannot_serve_starts_nothing(cluster, tmp_path):
    for on, words in (
        (platform(partition="debgu"), "invalid partition specified: debgu"),
        (platform(n_nodes=9), "9 nodes > 2"),
    ):
        with pytest.raises(PlatformError, match=words):
            unisono.run(print, on=on)
    assert list(tmp_path.glob(".output")) == []
    with pytest.raises(PlatformError, match="node configuration is not available"):
        unisono.submit(print, on=platform(slurm_additional_parameters={"mem": "9999G"}))
    assert list(tmp_path.glob(".output/logs/*")) == []


def unisono_run(*words):
    command = [sys.executable, "-m", "unisono", "run", "--on", "slurm", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line_checks_shows_and_queues(cluster, tmp_path):
    Path("hello.py").write_text("import unisono\nprint('hi', unisono.world().rank)\n")
    fine = unisono_run("--nodes", "2", "--dry-run", "hello.py")
    assert fine.returncode == 0
    assert "2 ranks on slurm can be started" in fine.stderr
    assert "sbatch: Job" in fine.stdout
    refused = unisono_run("--set", "mem_per_node=9999", "--dry-run", "hello.py")
    assert refused.returncode == 2
    assert "node configuration is not available" in refused.stderr
    shown = unisono_run("--partition", "urgent", "--dry-run", "hello.py")
    assert "#SBATCH --partition=urgent" in shown.stdout
    queued = unisono_run("--nodes", "2", "--detach", "hello.py")
    job = Job.attach(queued.stdout.strip())
    assert job.wait(120)
    assert (job.status(), job.logs(1)) == ("done", "hi 1\n")


SCRIPT = """
import os
import time
import torch
import unisono
from unisono.launch import simulate_preemption

def total(x):
    comm = unisono.world()
    if unisono.job_dir() and unisono.restart_count() == 0:  # a rank of ours, in its first attempt
        if comm.rank == 1:
            simulate_preemption()
        while not unisono.should_stop():
            time.sleep(0.05)
        unisono.requeue()
    return comm.all_reduce(torch.tensor(float(comm.rank + x))).item(), os.environ["SLURMD_NODENAME"]

def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in unisono.train.elastic(model, optimizer, torch.ones(16, 2), batch_size=8, steps=3):
        step(lambda batch: model(batch[0]).mean())
    return os.environ["SLURMD_NODENAME"], step.members

results = unisono.run(total, 1, on="slurm", nodes=2)
if unisono.world().rank == 0:
    print("RESULT", list(results), results.restarts)
if unisono.world().size == 1:  # not a rank of somebody's step
    print("ELASTIC", list(unisono.run(train, on="slurm", nodes=2, elastic=True)))
"""


@pytest.mark.parametrize("starter", ["salloc", "srun"])
def test_a_script_uses_the_nodes_or_the_ranks_it_already_has(cluster, tmp_path, starter):
    Path("script.py").write_text(SCRIPT)
    # 'salloc' gives nodes, on which `run` starts ranks; the tasks of 'srun' are ranks already.
    command = [starter, "--nodes=2", "--ntasks=2", "--time=5", sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    expected = f"RESULT [(3.0, 'n1'), (3.0, 'n2')] {int(starter == 'salloc')}"
    assert [line for line in done.stdout.splitlines() if "RESULT" in line] == [expected]
    elastic = [line for line in done.stdout.splitlines() if "ELASTIC" in line]
    assert elastic == ["ELASTIC [('n1', 2), ('n2', 2)]"] * (starter == "salloc")
    assert list(tmp_path.glob(".unisono/slurm-*")) == []
    assert len(list(tmp_path.glob(".unisono/jobs/*"))) == 2 * (starter == "salloc")


def test_ctrl_c_lets_the_ranks_save_and_ends_the_job(cluster):
    Path("script.py").write_text(
        "import time, unisono\n"
        "from pathlib import Path\n"
        "def work():\n"
        "    print('up', flush=True)\n"
        "    try:\n"
        "        time.sleep(600)\n"
        "    except KeyboardInterrupt:\n"
        "        time.sleep(2 * unisono.world().rank)\n"
        "        Path(f'saved-{unisono.world().rank}').touch()\n"
        "        raise\n"
        "unisono.run(work, on='slurm', nodes=2, logs=unisono.Logs(console='rank0', prefix=False))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=120)[1]
        finally:
            process.kill()  # the block waits for its end
    assert "KeyboardInterrupt" in errors
    assert sorted(str(path) for path in Path().glob("saved-?")) == ["saved-0", "saved-1"], errors
    directory = next(Path(".unisono", "jobs").iterdir())
    assert Job.attach(directory).status() == "cancelled"


def test_doctor_knows_the_cluster(cluster):
    from unisono.cli.doctor import check_shared_directory, check_slurm

    checks = check_slurm(), check_shared_directory()
    assert [check.status for check in checks] == ["ok"] * 2
    assert "debug*: 2 nodes" in checks[0].found
    assert not Path(".unisono").exists()


def test_ranks_find_each_other_between_hosts(namespaced_cluster, use):
    use(namespaced_cluster)

    def work():
        comm = unisono.world()
        total = comm.all_reduce(torch.tensor(float(comm.rank))).item()
        return total, os.environ["MASTER_ADDR"], os.uname().nodename, comm.backend

    results = unisono.run(work, on=platform(backend="gloo"), logs=QUIET)
    assert list(results) == [(1.0, "10.78.0.1", name, "gloo") for name in ("n1", "n2")]


def test_a_job_at_its_time_limit_saves_and_goes_on_later(cluster, long_jobs):
    warned, _, folder = long_jobs
    wait_until((folder / "step-0").exists, 120)
    wait_until(lambda: warned.status() != "running")
    wait_until(
        lambda: start_again(cluster, warned) or warned.status() == "running" or warned.done()
    )
    saved = int((folder / "step-0").read_text())
    assert list(warned.result(120)) == [(True, saved + 3, 1)]


def test_a_job_that_does_not_care_ends_at_its_time_limit(cluster, long_jobs):
    _, heedless, _ = long_jobs
    assert heedless.wait(180)
    assert heedless.status() == "timeout"
    with pytest.raises(RankTimeout, match="time limit of 00:01:00"):
        heedless.result()

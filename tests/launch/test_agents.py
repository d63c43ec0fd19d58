"""Agents and their supervisor: connections that break, strangers, silence, unlike clocks."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.waiting import wait_until

import unisono
from unisono.errors import RankFailed
from unisono.launch.logs import Console
from unisono.launch.places import agents
from unisono.launch.places.agents import AgentRanks
from unisono.launch.places.program import ProgramRanks
from unisono.launch.pool.protocol import RankState

QUIET = unisono.Logs(console="none")
pytestmark = pytest.mark.mpi


class Cable:
    """A cable between agents and their supervisor that can be unplugged."""

    def __init__(self, port):
        self._target = port
        self._ends = []
        self._is_plugged = True
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            try:
                if not self._is_plugged:
                    raise ConnectionError("unplugged")
                far = socket.create_connection(("127.0.0.1", self._target))
            except ConnectionError:
                near.close()
                continue
            self._ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source, target):
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        # Closing alone does not end a connection on which the other thread still waits.
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        target.close()

    def unplug(self):
        self._is_plugged = False
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def plug_in(self):
        self._is_plugged = True

    def close(self):
        self.unplug()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._thread.join()


@pytest.fixture
def cable(mpiexec, warm_python, monkeypatch):
    """Have the agents of the next run connect through a cable, which is there once it has begun."""
    monkeypatch.setenv("MPIEXEC", mpiexec)
    monkeypatch.setenv("WARM_PYTHON", warm_python)
    monkeypatch.setattr(sys, "executable", warm_python)
    monkeypatch.setattr(agents, "HUNG_UP_S", 3.0)  # what closes here is no process that ends
    cables = []
    plain = AgentRanks.invitation.func

    def through_cable(self):
        if not cables:
            cables.append(Cable(plain(self).port))
        return replace(plain(self), port=cables[0].port)

    monkeypatch.setattr(AgentRanks, "invitation", property(through_cable))
    yield cables
    for cable in cables:
        cable.close()


def chatter(folder, seconds):
    comm = unisono.world()
    Path(folder, f"pid-{comm.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += 1
        print("line", count)
        time.sleep(0.002)
    return count


def test_a_connection_that_breaks_loses_nothing_and_the_ranks_go_on(cable, tmp_path):
    job = unisono.submit(chatter, tmp_path, 3.0, on="mpi", ranks=2, logs=tmp_path, timeout_s=60)
    for _ in range(3):
        lines = job.logs(1).count("\n")
        wait_until(lambda lines=lines: job.done() or job.logs(1).count("\n") > lines + 50)
        cable[0].unplug()
        time.sleep(0.2)
        cable[0].plug_in()
    results = job.result(timeout_s=60)
    for rank in range(2):
        lines = results.log(rank).splitlines()
        assert lines == [f"line {n}" for n in range(1, results[rank] + 1)]


def test_a_connection_that_stays_broken_is_a_rank_that_is_lost(cable, tmp_path, has_ended):
    job = unisono.submit(chatter, tmp_path, 600.0, on="mpi", ranks=2, logs=tmp_path, timeout_s=60)
    wait_until(lambda: job.logs(1).count("\n") > 10)
    cable[0].close()
    with pytest.raises(RankFailed, match="was lost: its agent ended"):
        job.result(timeout_s=60)
    for rank in range(2):
        for pid in (tmp_path / f"pid-{rank}").read_text().split():
            wait_until(lambda pid=pid: has_ended(int(pid)), 20)


def switches(pid):
    """Return how often a process has gone to sleep; one that makes no system call never does."""
    found = re.search(
        r"^voluntary_ctxt_switches:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M
    )
    return int(found[1])


def quiet(folder):
    comm = unisono.world()
    Path(folder, f"pid-{comm.rank}").write_text(f"{os.getpid()} {os.getppid()}")
    wait_until(Path(folder, "stop").exists)


def test_an_idle_agent_makes_no_system_call(mpiexec, monkeypatch, tmp_path):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    job = unisono.submit(quiet, tmp_path, on="mpi", ranks=2, timeout_s=60)
    paths = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in paths))
    parents = [int(path.read_text().split()[1]) for path in paths]
    time.sleep(0.5)
    before = [switches(pid) for pid in parents]
    time.sleep(1.0)
    assert [switches(pid) for pid in parents] == before
    (tmp_path / "stop").touch()
    assert list(job.result(timeout_s=60)) == [None, None]


def test_strangers_do_not_disturb_a_run(mpiexec, monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("MPIEXEC", mpiexec)
    ports = []
    plain = AgentRanks.invitation.func

    def noted(self):
        ports.append(plain(self).port)
        return plain(self)

    monkeypatch.setattr(AgentRanks, "invitation", property(noted))
    job = unisono.submit(quiet, tmp_path, on="mpi", ranks=1, timeout_s=60)
    wait_until(lambda: ports)
    strangers = [socket.create_connection(("127.0.0.1", ports[0])) for _ in range(3)]
    strangers[0].sendall(os.urandom(88))
    strangers[1].close()
    (tmp_path / "stop").touch()
    assert list(job.result(timeout_s=60)) == [None]
    for stranger in strangers:
        stranger.close()
    assert "does not know the key of this run" in capfd.readouterr().err


def test_times_are_those_of_the_supervisors_clock(tmp_path):
    """The clock of the other host is an hour ahead."""
    plan = agents.RunPlan.of(
        unisono.Platform(device="mpi", ranks=2), timeout_s=None, max_restarts=0
    )
    (tmp_path / f"payload-{plan.run_id}").touch(mode=0o600)
    shown = {"console": Console([], prefix=False), "job_dir": tmp_path}
    ranks = ProgramRanks(None, plan, 0, command=[], env={}, **shown)
    try:
        told = RankState(rank=0, state="ready", at={"running": 1e12, "ready": 1e12})
        ranks._take(ranks._seats[0], {"state": told})
        assert ranks.states[0].is_ready
        assert all(abs(at - time.time()) < 60 for at in ranks.states[0].at.values())
    finally:
        ranks.close(at_once=None)

"""Elastic ranks with agents, each with memory of its own: what they add up travels between them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import unisono
from unisono.launch.attempts import LauncherAttempts
from unisono.launch.elastic.policy import read_events
from unisono.launch.places.agent import INVITATION
from unisono.launch.places.agents import AgentRanks

pytestmark = pytest.mark.timeout(240)


class PlainRanks(AgentRanks):
    """Ranks whose agents are processes of this host, started one by one instead of by Ray."""

    def start(self):
        self.agents = []
        for rank in range(self._plan.ranks):
            self.start_agent(rank)

    def start_agent(self, rank):
        place = {"PMI_RANK": str(rank), "PMI_SIZE": str(self._plan.ranks), "MPI_LOCALRANKID": "0"}
        env = {**os.environ, **place, INVITATION: str(self.invitation)}
        words = [sys.executable, "-m", "unisono.launch.places.agent"]
        self.agents.append(subprocess.Popen(words, env=env, start_new_session=True))
        return True

    def end_agents(self):
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(10.0)
            agent.kill()
            agent.wait()


@pytest.fixture
def on_agents(request, forked_python, monkeypatch):
    # An agent sees a stop of its own child, not of a fork of the warm interpreter.
    if "stopped" not in request.node.name:
        monkeypatch.setattr(sys, "executable", forked_python)

    def ranks(self):
        shown = {"console": self._console, "job_dir": self._job_dir}
        return PlainRanks(self._job, self._plan, self.progress.attempt, **shown)

    monkeypatch.setattr(LauncherAttempts, "ranks", ranks)


def train(folder: str, victim: str = "", steps: int = 12) -> tuple[str, int]:
    """Train; once, in the closure of a step, a process is killed. Return a hash of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(96, 6, generator=generator), torch.randint(3, (96,), generator=generator)
    most = 0
    run = unisono.train.elastic(model, optimizer, (x, y), batch_size=24, shards=6, steps=steps)
    for step in run:

        def loss(batch, step=step):
            if victim and step.number == 3 and os.environ["RANK"] == "1":
                with suppress(FileExistsError):
                    Path(folder, "hit").touch(exist_ok=False)
                    number = signal.SIGSTOP if victim == "stopped" else signal.SIGKILL
                    os.kill(os.getppid() if victim == "agent" else os.getpid(), number)
                    time.sleep(20.0)
            return nn.functional.cross_entropy(model(batch.x), batch.y)

        step(loss)
        most = max(most, step.members)
        waits = victim and step.number > 3 and run.members < 3
        time.sleep(0.2 if waits else 0.0)  # until another rank has come
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), most


@pytest.mark.parametrize("victim", ["agent", "stopped"])
def test_ranks_with_agents_end_with_the_bits_of_one_process(on_agents, tmp_path, victim):
    alone, _ = train("")
    logs = unisono.Logs(dir=tmp_path / "logs", console="none")
    found = unisono.run(
        train, str(tmp_path), victim, on="ray", ranks=3, elastic=True, logs=logs, timeout_s=100
    )
    assert {digest for digest, _ in found} == {alone}
    assert max(members for _, members in found) == 3
    events = [event["what"] for event in read_events(found.dir)]
    assert events.count("died") == 1
    assert (tmp_path / "hit").exists()

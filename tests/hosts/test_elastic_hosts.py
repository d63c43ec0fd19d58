"""An elastic job over two hosts: one joins, and its cable is cut, or all its processes die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from tests.waiting import wait_until

SCRIPT = """
import hashlib, os, sys, time
import torch, unisono
from pathlib import Path
from torch import nn

def train(go):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(160, 12, generator=generator), torch.randint(3, (160,), generator=generator)
    most = 0
    for step in unisono.train.elastic(model, optimizer, (x, y), batch_size=32, steps=60):
        step(lambda batch: nn.functional.cross_entropy(model(batch.x), batch.y))
        most = max(most, step.members)
        time.sleep(0.0 if go.exists() else 0.5)
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest(), most

digest, most = train(Path(sys.argv[1]))
print("DIGEST", digest, most, flush=True)
"""


def digests(text: str) -> set[str]:
    return set(re.findall(r"DIGEST (\w+)", text))


def kill_all(namespace: str) -> None:
    """Kill all processes of a host, as if its power were gone."""
    words = ["ip", "netns", "pids", namespace]
    for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize("fate", ["good", "cut off", "dead"])
def test_a_host_that_joins_and_is_lost_changes_no_bit(lab, interpreter, tmp_path, fate):
    script, invitation, go = (tmp_path / name for name in ("train.py", "invitation", "go"))
    script.write_text(SCRIPT)
    alone = interpreter.run([str(script), str(script)], cwd=tmp_path)
    expected = digests(alone.stdout)
    command = [interpreter.python, "-m", "unisono", "run", "--ranks", "2"]
    first = [*command, "--invite", invitation, "--logs", tmp_path / "logs", script, go]
    processes = [lab.a.start(*first)]
    wait_until(invitation.exists)
    assert invitation.stat().st_mode & 0o077 == 0
    processes.append(lab.b.start(*command, "--join", invitation, script, go))
    cable = ["ip", "-n", lab.b.namespace, "link", "set", "eth0"]
    try:
        events = tmp_path.glob
        wait_until(
            lambda: any('"members": 4' in p.read_text() for p in events("logs/*/members.jsonl"))
        )
        time.sleep(0.5)
        if fate == "cut off":
            subprocess.run([*cable, "down"], check=True)
        elif fate == "dead":
            kill_all(lab.b.namespace)
        go.touch()  # the rest of the steps need not be slow
        (code, output), (other_code, other) = lab.finish(processes)
    finally:
        subprocess.run([*cable, "up"], check=True)
    assert code == 0, f"{output}\n{other}"
    assert digests(output) == expected, f"{output}\n{other}"
    if fate != "good":
        assert "died at step" in output
        assert other_code != 0
        assert fate == "dead" or "the coordinator of this elastic training" in other
    else:
        assert (other_code, digests(other)) == (0, expected), other
        assert "4" in re.findall(r"DIGEST \w+ (\d)", output), output

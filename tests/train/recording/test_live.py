"""The page of a running job: who may see it, what it says of a rank that hangs, and its end."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import unisono
from unisono.cli import main
from unisono.train.recording.live import LiveView, judge, patience_s, place_of

OURS = Path(unisono.__file__).parent
WAITS = (
    f'Thread 0x1 (most recent call first):\n  File "{OURS}/comm/calling.py", line 9 in _run\n'
    f'  File "{OURS}/comm/collectives.py", line 70 in all_reduce_\n'
    '  File "/home/me/train.py", line 31 in step'
)
SLEEPS = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 12 in <b>load'

SCRIPT = """
import time
from pathlib import Path

import torch

import unisono
from unisono import train

comm = unisono.world()


def load():
    while comm.rank == 1 and not Path("go").exists():
        time.sleep(0.05)


for step in range(3):
    if step == 2:
        load()
    comm.all_reduce(torch.ones(3))
    train.log(step=step, loss=1.0 / (step + 1))
print("through")
"""


class FakeJob:
    dir = Path("no such directory")

    def __init__(self):
        self.word = "running"
        self.asked = 0

    def status(self):
        return self.word

    def stacks(self):
        self.asked += 1
        return {0: WAITS, 1: SLEEPS}


def get(url, path="", *, host=None):
    """Return status and text of a request, with another Host header if asked for."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        connection.request("GET", path or parts.path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def no_last_look(monkeypatch):
    """Pages of these tests are closed before the job ends, and need not see it."""
    monkeypatch.setattr("unisono.train.recording.live.LAST_LOOK_S", 0.0)


@pytest.mark.usefixtures("hygiene", "no_last_look")
def test_only_the_right_word_and_host_name_are_answered(a_run):
    with LiveView(a_run("live", status="running"), FakeJob(), 2) as view:
        port = urlsplit(view.url).port
        path = urlsplit(view.url).path
        assert urlsplit(view.url).hostname == "127.0.0.1"
        assert len(path) > 30
        assert get(view.url)[0] == 200
        assert get(view.url, host=f"localhost:{port}")[0] == 200
        for wrong in ("/", "/state", "/x/state", f"{path[:-2]}/", f"/{'a' * 32}/", "/%ff/", "//"):
            assert get(view.url, wrong) == (403, "forbidden\n"), wrong
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}"):
            assert get(view.url, host=host)[0] == 403, host
        assert get(view.url, f"{path}other")[0] == 404
        assert get(view.url, f"{path}state")[0] == 200
    with pytest.raises(ConnectionError):
        get(view.url)


@pytest.mark.usefixtures("no_last_look")
def test_a_stalled_rank_and_who_waits_for_it_are_shown(chromium, a_run):
    directory, job = a_run("stuck", status="running", step_s=0.01), FakeJob()
    os.utime(directory / "rank-0.log", (0, 0))  # printed long ago
    os.utime(directory / "rank-1.log", (0, 0))
    config = json.loads((directory / "config.json").read_text())
    config["started_ns"] = time.time_ns() - 60 * 10**9
    (directory / "config.json").write_text(json.dumps(config))
    with LiveView(directory, job, 3) as view:
        dom, complaints = chromium.dom(view.url, wait_ms=1500)
        assert complaints == []
        assert re.search(r'class="card waiting" id="rank-0"', dom)
        assert re.search(r'class="card stalled" id="rank-1"', dom)
        assert re.search(r'class="card pending" id="rank-2"', dom)
        assert "No news from rank 1: at train.py:12 in &lt;b&gt;load" in dom
        assert "Rank 0 waits in all_reduce, train.py:31 in step" in dom
        assert 'class="curve"' in dom
        assert job.asked >= 1
        job.word = "done"
        dom, _ = chromium.dom(view.url, wait_ms=1500)
        assert f"The run has ended. See it all: unisono report {directory}" in dom


@pytest.mark.usefixtures("no_last_look")
def test_ranks_are_asked_for_stacks_only_when_quiet_or_when_somebody_wants_them(a_run):
    directory, job = a_run("well", status="running"), FakeJob()
    view = LiveView(directory, job, 2)
    with view:
        states = [rank["state"] for rank in view.state()["ranks"]]
        assert (states, job.asked) == (["running", "running"], 0)
        asked = view.state(asks=True)["ranks"]
        assert job.asked == 1
        assert asked[0]["where"] == "waits in all_reduce, train.py:31 in step"


def test_an_open_page_sees_the_end_and_the_server_goes(a_run):
    job = FakeJob()
    seen = []
    with LiveView(a_run("ends", status="running"), job, 2) as view:
        url = f"{view.url}state"
        urllib.request.urlopen(url, timeout=20).close()

        def look_again():
            time.sleep(0.3)
            with urllib.request.urlopen(url, timeout=20) as answer:
                seen.append(json.load(answer)["status"])

        looking = threading.Thread(target=look_again)
        looking.start()
        job.word = "failed"
    looking.join()
    assert seen == ["failed"]
    assert not [thread for thread in threading.enumerate() if thread.name == "unisono-watch"]


def test_a_run_is_watched_from_its_start_to_its_end(chromium, tmp_path, warm_python):
    (tmp_path / "work.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [warm_python, "-m", "unisono", "run", "--watch", "--ranks", "2", "work.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "WARM_PYTHON": warm_python},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = next(line.split()[-1] for line in process.stderr if "watch at" in line)
        end = time.monotonic() + 80
        while time.monotonic() < end:
            with urllib.request.urlopen(f"{url}state", timeout=20) as answer:
                ranks = json.load(answer)["ranks"]
            states = [rank["state"] for rank in ranks]
            if states == ["waiting", "stalled"]:
                break
            time.sleep(0.3)
        assert states == ["waiting", "stalled"]
        assert ranks[0]["where"].startswith("waits in all_reduce, work.py:21")
        assert re.match(r"at work.py:1\d in load", ranks[1]["where"])
        dom, complaints = chromium.dom(url, wait_ms=1500)
        assert complaints == []
        assert 'class="card stalled" id="rank-1"' in dom
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["[0] through", "[1] through"]
    assert "report in runs/work/report.html" in err
    assert (tmp_path / "runs" / "work" / "report.html").is_file()
    with pytest.raises(ConnectionError):
        get(url)


def test_a_run_in_this_very_process_cannot_be_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work.py").write_text("print(1)\n")
    assert main(["run", "--watch", "--on", "inline", "work.py"]) == 2
    assert "--on cpu --ranks 1" in capsys.readouterr().err


def test_a_quiet_rank_in_a_collective_waits_and_one_outside_is_stalled():
    stacks = {0: WAITS, 1: SLEEPS}
    assert judge(50.0, 5.0, 0, stacks, has_logged=False) == "waiting"
    assert judge(50.0, 5.0, 1, stacks, has_logged=True) == "stalled"
    assert judge(50.0, 5.0, 1, stacks, has_logged=False) == "starting"
    assert judge(70.0, 5.0, 1, stacks, has_logged=False) == "stalled"
    assert judge(1.0, 5.0, 1, stacks, has_logged=False) == "running"
    assert place_of(WAITS) == "waits in all_reduce, train.py:31 in step"
    assert place_of(SLEEPS) == "at train.py:12 in <b>load"


def test_slow_steps_are_no_reason_to_worry():
    assert patience_s([]) == 5.0
    assert patience_s([0.0, 10.0, 20.0]) == 50.0

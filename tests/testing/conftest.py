"""Runs a pytest session of its own on a file of `sessions/`, and looks at what it leaves behind.

The processes of such a session carry a variable in their environment, so that what is left of them
can be told from everything else on the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

collect_ignore = ["sessions"]

SESSIONS = Path(__file__).parent / "sessions"
MARK = "BENCH_UNDER_TEST"
QUICK = ("-p", "no:hypothesispytest")
INI = "[pytest]\nxfail_strict = true\njunit_logging = system-out\n"


@dataclass
class Case:
    """One test of an inner session."""

    outcome: str
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


@dataclass
class InnerSession:
    """A pytest session in a process of its own."""

    mark: str
    temporary: Path
    process: subprocess.Popen[bytes]
    directory: Path
    output: str = ""
    cases: dict[str, Case] = field(default_factory=dict)

    def finish(self, timeout_s: float = 110.0) -> InnerSession:
        try:
            self.process.wait(timeout_s)
        finally:
            self.kill()
        self.output = (self.directory / "output").read_text()
        report = self.directory / "report.xml"
        if report.exists():
            for node in ElementTree.parse(report).iter("testcase"):
                self.cases[node.get("name", "")] = _read_case(node)
        return self

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __getitem__(self, name: str) -> Case:
        assert name in self.cases, f"{name} not in {sorted(self.cases)}\n{self.output}"
        return self.cases[name]

    def left_processes(self, patience_s: float = 5.0) -> list[str]:
        """Processes of this session that are still there."""
        return _wait_until_empty(lambda: _processes_with(f"{MARK}={self.mark}"), patience_s)

    def left_files(self, patience_s: float = 5.0) -> list[str]:
        """Temporary and shared-memory files of this session that are still there."""
        return _wait_until_empty(self._files, patience_s)

    def _files(self) -> list[str]:
        segments = Path("/dev/shm").glob(f"*{self.mark[:8]}*")
        return [str(path) for path in (*self.temporary.iterdir(), *segments)]


def _read_case(node: ElementTree.Element) -> Case:
    outcome, text = "passed", ""
    for child in node:
        if child.tag in ("failure", "error", "skipped"):
            outcome = child.tag.replace("failure", "failed")
            text += child.text or child.attrib.get("message", "")
        if child.tag == "system-out":
            text += child.text or ""
    if outcome == "skipped" and node.find("skipped").attrib["type"] == "pytest.xfail":
        outcome = "xfailed"
    return Case(outcome, text, float(node.attrib["time"]))


def _processes_with(variable: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if variable.encode() in environ:
                found.append(f"{entry.name} {command[:100]}")
    return found


def _wait_until_empty(look: Callable[[], list[str]], patience_s: float) -> list[str]:
    deadline = time.monotonic() + patience_s
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def start_session(directory: Path, names: tuple[str, ...], *options: str) -> InnerSession:
    """Start pytest on copies of the directories `names` of `sessions/`."""
    mark = uuid.uuid4().hex
    temporary = directory / "temporary"
    temporary.mkdir()
    work = directory / "work"
    work.mkdir()
    for name in names:
        shutil.copytree(SESSIONS / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SESSIONS / "lean.py", work)
    (work / "pytest.ini").write_text(INI)
    command = [sys.executable, "-m", "pytest", "-p", "lean", "-p", "no:cacheprovider", "-q", "-ra"]
    with (work / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--basetemp", str(directory / "base"), "--junitxml", "report.xml", *options],
            cwd=work,
            env={**os.environ, "TMPDIR": str(temporary), "COLUMNS": "200", MARK: mark},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    return InnerSession(mark, temporary, process, work)


@pytest.fixture(scope="session")
def inner_sessions(tmp_path_factory):
    """Two inner sessions, side by side because both spend their time waiting."""
    watched = ("--import-mode", "importlib", "-o", "pythonpath=features")
    watched += ("-o", "unisono_hygiene=true", *QUICK)
    watched += ("-k", "hygiene or conftest or classes or modules")
    begun = {
        "ordinary": start_session(tmp_path_factory.mktemp("a"), ("drawn", "failures", "features")),
        "watched": start_session(tmp_path_factory.mktemp("b"), ("features", "hygiene"), *watched),
    }
    yield begun
    for session in begun.values():
        session.kill()


@pytest.fixture(scope="session", autouse=True)
def begin_early(request):
    """Let the inner sessions run while the other tests of this folder do."""
    if any("inner_sessions" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("inner_sessions")


def pytest_collection_modifyitems(items):
    """Put the tests of this folder that look at inner sessions behind the others of it."""
    places = [i for i, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ours = [items[i] for i in places]
    ours.sort(key=lambda item: "inner_sessions" in item.fixturenames)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def ordinary_session(inner_sessions):
    """Failing, drawn and ordinary tests, one after the other on the same pool."""
    return inner_sessions["ordinary"].finish()


@pytest.fixture(scope="session")
def watched_session(inner_sessions):
    """With hygiene for all tests, in the import mode in which test modules have no plain names."""
    return inner_sessions["watched"].finish()


@pytest.fixture
def begin_session(tmp_path):
    """Return a function that starts an inner session; it is ended by force in any case."""
    begun: list[InnerSession] = []

    def begin(name: str) -> InnerSession:
        directory = tmp_path / str(len(begun))
        directory.mkdir()
        begun.append(start_session(directory, (name,), *QUICK))
        return begun[-1]

    yield begin
    for session in begun:
        session.kill()

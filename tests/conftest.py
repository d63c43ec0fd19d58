"""What all tests share: how they are dealt out to several processes, and fixtures.

`interpreter` runs scripts as `python` would, without loading torch again. `interpreter.python` is
the same for commands in which others start python: mpiexec, torchrun, a process on another host.
"""

from __future__ import annotations

import gc
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from tests.waiting import scaled_by_load
from unisono.launch.pool.client import ForkedProcess, WarmServer

_COMMAND = Path(__file__).with_name("warm_python.py")
_TOGETHER = ("tests/quality/", "/slurm/", "tests/accelerator/", "tests/testing/")
"""Folders of which one process runs all files."""
_LONG = (
    *_TOGETHER,
    "examples/test_examples.py",
    "elastic/test_coordinator.py",
    "launch/test_ray.py",
    "core/test_wheel.py",
    "core/test_sanitizers.py",
    "torch/test_suite.py",
    "graph_parallel/test_split_potential.py",
    "engines/test_mpi.py",
    "launch/test_contract.py",
    "launch/test_payload.py",
    "compat/test_heat.py",
    "core/test_core.py",
    "launch/test_warm.py",
    "tests/hosts/",
    "split_tensors/test_networks.py",
    "split_tensors/test_operator_database.py",
    "train/test_checkpoint_kill.py",
    "exact/test_exact.py",
    "core/test_faults.py",
    "tests/launch/",
    "tests/cli/",
    "comm/test_shm_alone.py",
    "comm/test_backends.py",
)
"""What takes long for the number of its tests, the longest first."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out whole files (`pytest -n 4`), those that take long first.

    At the end one process would wait for them. Folders stay together where their tests share
    something: the SLURM cluster, a pool of ranks with the device, sessions in the background, which
    are no leak of other tests then, and the warm interpreter of documentation and checks.
    """
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((part for part in _TOGETHER if part in file), file)

        def schedule(self) -> None:
            super().schedule()
            for part in reversed(_LONG):
                for scope in [scope for scope in self.workqueue if part in scope]:
                    self.workqueue.move_to_end(scope, last=False)

    return Files(config, log)


def be_heard() -> None:
    """Let what tests start hear Ctrl-C, also where this process was started deaf to it.

    `nohup` and `make test &` have it ignored, and programs inherit that. A handler that does
    nothing leaves this process as deaf, and what it starts as programs begin.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes a temporary directory, which some tests look into.

    Bytecode is written as Python does by itself, whatever the environment says: hundreds of
    interpreters would else compile the package anew, a second each.
    """
    be_heard()
    gc.disable()  # until all is collected, which is kept
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["TMPDIR"] = tempfile.tempdir = folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have hypothesis draw UNISONO_EXAMPLES times as many examples, others in each run."""
    times = int(os.environ.get("UNISONO_EXAMPLES", "1"))
    functions = {getattr(item, "function", None) for item in items} if times > 1 else ()
    for function in functions:
        if getattr(function, "is_hypothesis_test", False):
            from hypothesis import settings

            # No public way leads to the settings of a test that is decorated already.
            name = "_hypothesis_internal_use_settings"
            usual = getattr(function, name, None) or settings()
            many = settings(usual, max_examples=times * usual.max_examples, derandomize=False)
            setattr(function, name, many)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave what the test modules have loaded, which lasts, out of every later `gc.collect()`."""
    gc.enable()
    gc.collect()
    gc.freeze()


class Interpreter:
    """A warm server from which scripts are forked; what they become is in `warm_script.py`."""

    def __init__(self) -> None:
        self._server: WarmServer | None = None
        self._door: tuple[Path, socket.socket] | None = None
        self._path = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]

    @property
    def python(self) -> str:
        """The name of a program to say instead of `sys.executable`, wherever processes start.

        Its processes are forks of the warm one, with the variables, descriptors, directory and
        namespaces of whoever started them. `sys.executable` in them is the real one, or what the
        variable WARM_PYTHON says: with this program there, what they start is a fork, too.
        """
        if sys.platform != "linux":
            return sys.executable
        if self._door is None:
            folder = Path(tempfile.mkdtemp(prefix="warm-"))
            door, program = folder / "door", folder / "python"
            search_path = os.environ.get("PYTHONPATH", "")
            words = [sys.executable, "-IS", str(_COMMAND), str(door), sys.executable, search_path]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(0o755)
            ours, theirs = socket.socketpair()
            with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                listening.bind(str(door))
                listening.listen(64)
                self._fork("warm_script:listen", {}, listening, theirs)
            self._door = folder, ours
        return str(self._door[0] / "python")

    def run(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        timeout_s: float = 100.0,
        unload: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *words` in `cwd`, which is its TMPDIR too; return what it said.

        The deadline is that of an idle machine.

        `unload` ends it to the last destructor of torch, as long as that takes.
        """
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        request = {
            "words": list(words),
            "cwd": str(cwd),
            "env": {**env, "TMPDIR": str(cwd), "WARM_PYTHON": self.python},
            "unload": unload,
        }
        launcher, serving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            with launcher, serving:
                server = self._fork(
                    "unisono.launch.pool.server:serve", {"preload": [], "idle_s": 300.0}, serving
                )
                request["server_pid"] = server.pid
                streams = {1: out.fileno(), 2: err.fileno()}
                script = self._fork("warm_script:be_script", request, launcher, streams=streams)
            limit_s = scaled_by_load(timeout_s)
            try:
                has_ended = bool(select.select([script.end_fd], [], [], limit_s)[0])
            finally:  # also for pytest-timeout
                with suppress(ProcessLookupError):
                    os.killpg(script.pid, signal.SIGKILL)
            code, _ = script.wait(60.0)
            server.wait(60.0)  # it leaves when the script's end of their socket closes
            for process in (script, server):
                os.close(process.end_fd)
            texts = [_text(file) for file in (out, err)]
        return subprocess.CompletedProcess(list(words), code if has_ended else -9, *texts)

    def close(self) -> None:
        """End the server and all that it has started; the next script starts another."""
        if self._door is not None:
            folder, leash = self._door
            leash.close()
            shutil.rmtree(folder)
            self._door = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _fork(
        self,
        main: str,
        own: dict[str, Any],
        *ends: socket.socket,
        streams: dict[int, int] | None = None,
    ) -> ForkedProcess:
        """Fork from the server, which is started at the first need."""
        if self._server is None:
            sys.path.append(str(_COMMAND.parent))
            self._server = WarmServer(["warm_script"])
            sys.path.pop()
        own |= {"path": self._path, "owner_pid": self._server.pid}
        fds = [end.fileno() for end in ends]
        process = self._server.fork(main, own, fds, streams=streams, linger_s=None)
        why = process.confirm(300.0)
        assert why is None, why
        return process


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs `python script.py --ranks 2` by `interpreter.run(["script.py", "--ranks", "2"])`."""
    warm = Interpreter()
    yield warm
    warm.close()


@pytest.fixture
def warm_python(interpreter: Interpreter) -> str:
    """`interpreter.python`, for tests of which loading torch is no part.

    Not one for the session: where its start takes longer than one test may, the next one tries.
    """
    return interpreter.python


@pytest.fixture
def forked_python(warm_python: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """`warm_python`, and what its processes start by `sys.executable` are forks, too."""
    monkeypatch.setenv("WARM_PYTHON", warm_python)
    return warm_python


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """The program that starts ranks of MPI, that of the mpich wheel first; skips without it."""
    from unisono.comm.engines import mpi

    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    why = mpi.unavailable() or ("mpiexec is not installed" if found is None else None)
    if found is None or why is not None:
        if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants mpi, but {why}")
        pytest.skip(str(why))
    return found

"""What all tests share: how they are dealt out to two processes, and fixtures.

`interpreter` runs scripts as `python` would, without loading torch again. `interpreter.python` is
the same for commands in which others start python: mpiexec, torchrun, a process on another host.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

_SERVER = Path(__file__).with_name("warm_interpreter.py")
_COMMAND = Path(__file__).with_name("warm_python.py")
_SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set while the process loads its libraries only: no thread may be lost by a fork."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out whole files (`pytest -n 2`); all that share the SLURM cluster go to one process.

    So do those of `testing/`: their sessions in the background are no leak of other tests then.
    And those of `quality/`: what has many tests begins first, and one of these takes a minute.
    """
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            together = ("/slurm/", "tests/testing/", "tests/quality/")
            return next((part for part in together if part in file), file)

    return Files(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several processes a temporary directory, which some tests look into.

    Bytecode is written as Python does by itself, whatever the environment says: hundreds of
    interpreters would else compile the package anew, a second each.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["TMPDIR"] = tempfile.tempdir = folder


class Interpreter:
    """A process with torch loaded from which scripts are forked; see `warm_interpreter.py`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def python(self) -> str:
        """The name of a program to say instead of `sys.executable`, wherever processes start.

        Its processes are forks of the warm one, with the variables, descriptors, directory and
        namespaces of whoever started them. `sys.executable` in them is the real one, or what the
        variable WARM_PYTHON says: with this program there, what they start is a fork, too.
        """
        if sys.platform != "linux":
            return sys.executable
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
            door, program = self._folder / "door", self._folder / "python"
            search_path = os.environ.get("PYTHONPATH", "")
            words = [sys.executable, "-IS", str(_COMMAND), str(door), sys.executable, search_path]
            program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            program.chmod(0o755)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
                listening.bind(str(door))
                listening.listen(64)
                request = json.dumps({"listen": str(door)}).encode()
                socket.send_fds(self._connection(), [request], [listening.fileno()])
                self._answer(60.0)
        return str(self._folder / "python")

    def run(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        timeout_s: float = 100.0,
        unload: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python *words` in `cwd`, which is its TMPDIR too; return what it said.

        `unload` ends it to the last destructor of torch, as long as that takes.
        """
        env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        request = {
            "words": list(words),
            "cwd": str(cwd),
            "env": {**env, "TMPDIR": str(cwd)},
            "unload": unload,
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            fds = [out.fileno(), err.fileno()]
            try:
                socket.send_fds(self._connection(), [json.dumps(request).encode()], fds)
                code = self._code(timeout_s)
            except BaseException:  # pytest-timeout: an answer is due that is not the next test's
                self.close()
                raise
            texts = [_text(file) for file in (out, err)]
        return subprocess.CompletedProcess(list(words), code, *texts)

    def _code(self, timeout_s: float) -> int:
        """Wait for the script, which has `timeout_s` from its start on; return how it ended."""
        pid = self._answer(60.0)["pid"]
        try:
            return self._answer(timeout_s)["code"]
        except BaseException as error:
            os.killpg(pid, signal.SIGKILL)
            self._answer(60.0)
            if not isinstance(error, TimeoutError):
                raise
            return -signal.SIGKILL

    def close(self) -> None:
        """End the process; the next script starts another."""
        if self._process is not None:
            self._control.close()
            try:
                self._process.wait(30.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _connection(self) -> socket.socket:
        """Return the socket to the process, which is started at the first need."""
        if self._process is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, str(_SERVER), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=os.environ | dict.fromkeys(_SINGLE_THREAD, "1"),
                )
            self._answer(300.0)
        return self._control

    def _answer(self, timeout_s: float) -> dict[str, int]:
        self._control.settimeout(timeout_s)
        message = self._control.recv(1 << 12)
        assert message, "the warm interpreter has ended"
        return json.loads(message)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs `python script.py --ranks 2` by `interpreter.run(["script.py", "--ranks", "2"])`."""
    warm = Interpreter()
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def warm_python(interpreter: Interpreter) -> str:
    """`interpreter.python`, for tests of which loading torch is no part."""
    return interpreter.python


@pytest.fixture(scope="session")
def mpiexec() -> str:
    """The program that starts ranks of MPI, that of the mpich wheel first; skips without it."""
    from unisono.comm.transports import mpi

    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    why = mpi.unavailable() or ("mpiexec is not installed" if found is None else None)
    if found is None or why is not None:
        if "mpi" in os.environ.get("UNISONO_REQUIRE", "").split(","):
            pytest.fail(f"UNISONO_REQUIRE wants mpi, but {why}")
        pytest.skip(str(why))
    return found

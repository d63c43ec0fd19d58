"""The life of one rank: come up, join the world, call the function, report, leave.

Runs in a fresh interpreter that `launch.local` starts. It never runs the user's main script again:
the function comes by pickle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from unisono.launch.lifeline import Lifeline, Stopped
from unisono.launch.messages import Address, Failed, Hello, Ready, Returned, send_message
from unisono.launch.payload import dump_exception, dump_value, load_call
from unisono.launch.stacks import is_user_file

STACK_SIGNAL = signal.SIGUSR1
"""A rank that gets it writes the stacks of its threads to its stack file."""
_LINGER_S = 30.0
_OWN_DIR = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a run are told."""

    argv: list[str]
    """The launcher's `sys.argv`."""
    call: bytes
    """Function and arguments, pickled."""
    start_timeout_s: float
    """Deadline of the start."""
    comm_timeout_s: float
    """Deadline of each collective."""
    backend: str | None
    """Backend of the world; None chooses."""


def main() -> NoReturn:
    """Be the rank that the environment says, with the descriptors named on the command line."""
    payload_fd, report_fd, control_fd = (int(word) for word in sys.argv[-3:])
    for fd in (payload_fd, report_fd, control_fd):
        os.set_inheritable(fd, False)
    stack_path = Path(os.environ["UNISONO_JOB_DIR"], f"rank-{os.environ['RANK']}.stack")
    stack_file = open(os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w")  # noqa: SIM115, PTH123
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    lifeline = Lifeline(control_fd)
    send_message(report_fd, Hello(host=socket.gethostname()))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        _live(payload_fd, report_fd, lifeline)
        code = 0
    except Stopped:
        code = 128 + signal.SIGTERM
    except BaseException as error:
        code = _report(error, report_fd, lifeline)
    lifeline.leave()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if code:
        # The launcher is about to end us: no cleaning up that could wait for other ranks.
        os._exit(code)
    sys.exit(0)


def _live(payload_fd: int, report_fd: int, lifeline: Lifeline) -> None:
    """Join the world, call the function, send what it returned, and leave when all have."""
    job = _read_job(payload_fd)
    sys.argv = list(job.argv)
    _join_world(job, report_fd, lifeline)
    from unisono.comm.start import stop_world

    fn, args, kwargs = load_call(job.call)
    send_message(report_fd, Ready())
    begin = time.perf_counter()
    value = fn(*args, **kwargs)
    wall_s = time.perf_counter() - begin
    send_message(report_fd, Returned(value=dump_value(value), wall_s=wall_s))
    lifeline.wait_for("finish", timeout_s=float(2**31))
    lifeline.leave()
    stop_world()


def _read_job(payload_fd: int) -> Job:
    """Read what follows the search path that the bootstrap has already taken."""
    size = os.fstat(payload_fd).st_size
    skip = 8 + int.from_bytes(os.pread(payload_fd, 8, 0), "little")
    chunks: list[bytes] = []
    while skip < size:
        chunks.append(os.pread(payload_fd, size - skip, skip))
        skip += len(chunks[-1])
    os.close(payload_fd)
    return pickle.loads(b"".join(chunks))


def _join_world(job: Job, report_fd: int, lifeline: Lifeline) -> None:
    """Meet the other ranks: rank 0 tells the launcher its address, the others are told it."""
    import torch

    from unisono.comm.environment import detect
    from unisono.comm.start import open_store, start_world

    torch.set_num_threads(_threads(os.environ["OMP_NUM_THREADS"]))
    environment = detect()
    run_id = os.environ["UNISONO_RUN_ID"]
    attempt = os.environ["UNISONO_RESTART"]
    nonce = f"{run_id}/{attempt}"
    if environment.rank == 0:
        store = open_store(environment, timeout_s=job.start_timeout_s, nonce=nonce)
        addr, port = "127.0.0.1", store.port  # pyright: ignore[reportAttributeAccessIssue]
        send_message(report_fd, Address(addr=addr, port=port))
    else:
        addr, port = lifeline.wait_for("master", timeout_s=job.start_timeout_s)
        environment = replace(environment, master=(addr, port))
        store = open_store(environment, timeout_s=job.start_timeout_s, nonce=nonce)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = addr, str(port)
    start_world(
        environment,
        backend=job.backend,
        timeout_s=job.comm_timeout_s,
        store=store,
        name=nonce,
    )


def _threads(text: str) -> int:
    """Read OMP_NUM_THREADS, which may be a list of one number for each level of nesting."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else 1


def _report(error: BaseException, report_fd: int, lifeline: Lifeline) -> int:
    """Tell launcher and ranks about `error`, and stay until the launcher has seen to the others."""
    lifeline.leave()
    try:
        send_message(report_fd, describe(error))
        with contextlib.suppress(Exception):
            from unisono.comm.failures import post_failure

            post_failure(error)
        # Rank 0 hosts the store: the others can read of the failure for as long as it lives.
        lifeline.wait_for("stop", timeout_s=_LINGER_S)
    except (queue.Empty, OSError):
        pass
    return 1


def describe(error: BaseException) -> Failed:
    """Return the report of `error`: text, the exception if it can travel, and whose fault it is."""
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    code: int | None = None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return Failed(
        summary=summary,
        traceback=_user_traceback(error),
        pickled=dump_exception(error),
        is_consequence=is_consequence(error),
        exit_code=code,
        site=_user_site(error),
    )


def _user_traceback(error: BaseException) -> str:
    """Format the traceback from the first frame that is not the launcher's."""
    frames = error.__traceback__
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == _OWN_DIR:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


def _user_site(error: BaseException) -> str:
    """Return the innermost line of the user's code that `error` passed through."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_user_file(frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""


_CONNECTION_WORDS = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "failed to recv",
    "socket timeout",
    "connection was likely closed",
)


def is_consequence(error: BaseException) -> bool:
    """Whether `error` says no more than that another rank went away or did not come."""
    import torch.distributed as dist

    from unisono.errors import RankFailed, RankTimeout

    if isinstance(error, (RankFailed, RankTimeout, ConnectionError)):
        return True
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)

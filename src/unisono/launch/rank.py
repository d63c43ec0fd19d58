"""The life of one rank: come up, join the world, call the function, report, leave.

Runs in a fresh interpreter or in a fork of the warm server. It never runs the user's main script
again: the function comes by pickle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unisono.environment import RANK_PID, rank_mark
from unisono.errors import CollectiveMismatch, Requeue
from unisono.launch import terminal
from unisono.launch.conventions import Convention
from unisono.launch.devices import Device
from unisono.launch.heap import keep_freed_memory
from unisono.launch.here import Here
from unisono.launch.job_files import process_start, write_private
from unisono.launch.leaving import finish_work, leave
from unisono.launch.lifeline import Lifeline, Stopped, drop_descriptor, kill_own_group
from unisono.launch.messages import (
    Address,
    Failed,
    Hello,
    Ready,
    Requeued,
    Returned,
    Standing,
    send_message,
)
from unisono.launch.parcel import ROOM, Parcel
from unisono.launch.payload import dump_exception, dump_value, load_call
from unisono.launch.platform import Platform
from unisono.launch.stacks import format_error, site_of
from unisono.launch.stopping import (
    interruptible,
    note_interrupt,
    note_request,
    was_interrupted,
)
from unisono.launch.surroundings import Surroundings

if TYPE_CHECKING:
    import torch.distributed as dist

    from unisono.launch.server import Assignment

_LINGER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a run are told."""

    argv: list[str]
    """The launcher's `sys.argv`."""
    call: Parcel
    """Function and arguments; empty while the job is on its way, for they travel beside it."""
    convention: Convention
    """How to call it."""
    platform: Platform
    """What was asked for."""
    setting: Surroundings
    """The launcher's surroundings."""
    upon_finish: bytes | None = None
    """Function, pickled, that rank 0 calls when all have returned; else the launcher calls it."""
    is_script: bool = False
    """Whether the function is a whole script, which may initialise torch.distributed by itself."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    """With it ranks sign what they leave each other (`comm/seal.py`)."""


def main() -> NoReturn:
    """Be the rank that the environment says, with the descriptors named on the command line."""
    payload_fd, report_fd, control_fd, result_fd = (int(word) for word in sys.argv[-4:])
    for fd in (payload_fd, report_fd, control_fd, result_fd):
        os.set_inheritable(fd, False)
    _, job = read_payload(payload_fd)
    _be(job, report_fd, control_fd, result_fd)


def live_as_forked(assignment: Assignment) -> NoReturn:
    """Be a rank in a fork of the warm server: take over what the launcher is now, then live."""
    from unisono.comm.health.trace import start_from_environment
    from unisono.launch.server import reseed

    sys.path[:], job = read_payload(assignment.payload_fd)
    importlib.invalidate_caches()
    # The server's streams belong to a file; these descriptors are now the rank's pipes.
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    job.setting.apply(assignment.own)
    reseed()
    start_from_environment()
    _be(job, assignment.report_fd, assignment.control_fd, assignment.result_fd)


def _be(job: Job, report_fd: int, control_fd: int, result_fd: int) -> NoReturn:
    stack_path = Path(os.environ["UNISONO_JOB_DIR"], f"rank-{os.environ['RANK']}.stack")
    # What an earlier attempt has left there is not about this one.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
    stack_file = open(os.open(stack_path, flags, 0o600), "w")  # noqa: SIM115, PTH123
    number = signal.Signals[job.platform.stack_signal]
    faulthandler.register(number, file=stack_file, all_threads=True)
    faulthandler.enable(file=stack_file, all_threads=True)  # where it stands if it crashes
    # Whoever attaches to the job from elsewhere asks this process for its stacks.
    known = f"{os.getpid()} {process_start(os.getpid())} {number.name}"
    write_private(stack_path.with_suffix(".pid"), known.encode())
    lifeline = Lifeline(control_fd, note_request, lambda: _tell_standing(report_fd), note_interrupt)
    lifeline.take(job.platform.stop_signals)

    def drop() -> None:
        drop_descriptor(report_fd)
        faulthandler.unregister(number)
        with contextlib.suppress(Exception):  # no stderr
            faulthandler.enable()

    lifeline.part_from_children(drop)
    # A minder starts ranks with these blocked, so that none is lost before now.
    heeded = {signal.SIGTERM, number, *(signal.Signals[n] for n in job.platform.stop_signals)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded)
    send_message(report_fd, Hello(host=socket.gethostname()))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    terminal.settle(int(os.environ["RANK"]))
    try:
        _live(job, report_fd, result_fd, lifeline)
        code = 0
    except Stopped:
        code = 128 + signal.SIGTERM
    except BaseException as error:
        code = _report(error, report_fd, lifeline)
    lifeline.leave()
    finish_work(report_fd, job.platform.grace_s)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if code:
        # The launcher is about to end us: no cleaning up that could wait for other ranks.
        os._exit(code)
    leave(report_fd)


def _live(job: Job, report_fd: int, result_fd: int, lifeline: Lifeline) -> None:
    """Join the world, call the function, send what it returned, and leave when all have."""
    sys.argv = list(job.argv)
    here = _join_world(job, report_fd, lifeline)
    from unisono.comm.lifecycle import say_returned, stop_world

    fn, args, kwargs = load_call(job.call)
    job.call.close()
    job.setting.apply_inside()
    _rehearse_death(here.rank)
    send_message(report_fd, Ready())
    begin = time.perf_counter()
    try:
        with interruptible():
            value = job.convention.call(fn, args, kwargs, here)
    except Requeue:
        send_message(report_fd, Requeued())
    else:
        wall_s = time.perf_counter() - begin
        packed = dump_value(value, result_fd)
        send_message(report_fd, Returned(value=packed.data, wall_s=wall_s))
    say_returned()
    lifeline.wait_for("finish", timeout_s=float(2**31))
    lifeline.leave()
    if job.upon_finish is not None and here.rank == 0:
        pickle.loads(job.upon_finish)()
    stop_world()


def payload_file(job: Job) -> int:
    """Return a descriptor, good as long as the job, of a nameless file with all it tells ranks.

    A file and not a pipe: all ranks read the same one, and none can keep the launcher waiting. It
    begins with the place of what comes after the call: our search path, and the rest of the job.
    """
    fd, end = job.call.file()
    search_path = b"\0".join(os.fsencode(entry) for entry in sys.path)
    body = pickle.dumps(replace(job, call=Parcel(b"")), protocol=pickle.HIGHEST_PROTOCOL)
    os.pwrite(fd, end.to_bytes(8, "little"), 0)
    os.pwrite(fd, len(search_path).to_bytes(8, "little") + search_path + body, end)
    os.ftruncate(fd, end + 8 + len(search_path) + len(body))
    return fd


def read_payload(payload_fd: int) -> tuple[list[str], Job]:
    """Return the launcher's search path and the job, whose call is not unpickled yet."""
    end = int.from_bytes(os.pread(payload_fd, 8, 0), "little")
    length = int.from_bytes(os.pread(payload_fd, 8, end), "little")
    search_path = os.fsdecode(os.pread(payload_fd, length, end + 8)).split("\0")
    skip, size = end + 8 + length, os.fstat(payload_fd).st_size
    job: Job = pickle.loads(os.pread(payload_fd, size - skip, skip))
    return search_path, replace(job, call=Parcel(fd=payload_fd, offset=ROOM, is_owner=True))


def _join_world(job: Job, report_fd: int, lifeline: Lifeline) -> Here:
    """Meet the other ranks: rank 0 tells the launcher its address, the others are told it."""
    import torch

    from unisono.comm import seal
    from unisono.environment import detect
    from unisono.launch.entering import enter_world

    seal.give_secret(job.secret)
    keep_freed_memory()
    torch.set_num_threads(_threads(os.environ["OMP_NUM_THREADS"]))
    environment = detect()
    platform = job.platform
    nonce = f"{os.environ['UNISONO_RUN_ID']}/{os.environ['UNISONO_RESTART']}"
    store: dist.Store | None = None
    if platform.ipc_groups is not None:
        if platform.ipc_protocol == "file":
            import torch.distributed as dist

            path = Path(os.environ["UNISONO_JOB_DIR"], f"store-{os.environ['UNISONO_RESTART']}")
            store = dist.FileStore(str(path), environment.size)
        else:
            if platform.kind in (Device.SLURM, Device.MPI):  # no launcher to pass an address on
                from unisono.launch.meeting import meet

                path = Path(os.environ["UNISONO_JOB_DIR"], f"rendezvous-{nonce.rpartition('/')[2]}")
                store, address = meet(
                    environment,
                    path.with_suffix(".json"),
                    nonce=nonce,
                    timeout_s=platform.start_timeout_s,
                    asked=(platform.master_addr, platform.master_port or 0),
                )
            else:
                store, address = _meet(job, nonce, report_fd, lifeline)
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
            if job.is_script:
                _offer_store()
            platform = platform.but(master_addr=address[0], master_port=address[1])
            environment = replace(environment, master=address)
    os.environ[RANK_PID] = rank_mark(os.environ, os.getpid())
    return enter_world(
        environment,
        platform,
        store=store,
        name=nonce,
        report_fd=report_fd,
        at_first_use=job.is_script,
    )


def _offer_store() -> None:
    """Let `init_process_group` of a script use our store, with the words that torchrun has for it.

    So rank 0, too, joins the store at MASTER_PORT instead of opening another one there.
    """
    os.environ |= {
        "GROUP_RANK": os.environ["NODE_RANK"],
        "TORCHELASTIC_RUN_ID": os.environ["UNISONO_RUN_ID"],
        "TORCHELASTIC_RESTART_COUNT": os.environ["UNISONO_RESTART"],
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _meet(
    job: Job, nonce: str, report_fd: int, lifeline: Lifeline
) -> tuple[dist.Store, tuple[str, int]]:
    """Return the store of this world, and where it is."""
    from unisono.comm.lifecycle import open_store
    from unisono.environment import detect

    environment = detect()
    timeout_s = job.platform.start_timeout_s
    if environment.rank == 0:
        asked = job.platform.master_addr
        port = job.platform.master_port or 0
        store = open_store(environment, addr=asked, port=port, timeout_s=timeout_s, nonce=nonce)
        addr, port = asked or "127.0.0.1", store.port  # pyright: ignore[reportAttributeAccessIssue]
        send_message(report_fd, Address(addr=addr, port=port))
    else:
        addr, port = lifeline.wait_for("master", timeout_s=timeout_s)
        environment = replace(environment, master=(addr, port))
        store = open_store(environment, timeout_s=timeout_s, nonce=nonce)
    return store, (addr, port)


def _tell_standing(report_fd: int) -> None:
    """Tell the launcher which collective was the last; nothing before there was one."""
    calls = sys.modules.get("unisono.comm.call")
    call = calls.latest_call if calls is not None else None
    if call is not None:
        words = f"{call.describe()} ({'done' if call.done else 'under way'})"
        with contextlib.suppress(OSError):
            message = Standing(call=words, group=str(call.key), number=call.seq)
            send_message(report_fd, message)


def _rehearse_death(rank: int) -> None:
    """Die later, if `UNISONO_TEST_KILL=rank:seconds` names this rank in its first attempt."""
    who, _, seconds = os.environ.get("UNISONO_TEST_KILL", "").partition(":")
    if who == str(rank) and os.environ["UNISONO_RESTART"] == "0":
        timer = threading.Timer(float(seconds or 0), kill_own_group)
        timer.daemon = True
        timer.start()


def _threads(text: str) -> int:
    """Read OMP_NUM_THREADS, which may be a list of one number for each level of nesting."""
    first = text.split(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else 1


def _report(error: BaseException, report_fd: int, lifeline: Lifeline) -> int:
    """Tell launcher and ranks about `error`, and stay until the launcher has seen to the others."""
    lifeline.leave()
    # Workers end now, and a DataLoader's handler for that would raise in the midst of the report.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        send_message(report_fd, describe(error))
        with contextlib.suppress(Exception):
            from unisono.comm.health.failures import post_failure

            post_failure(error)
        # Rank 0 hosts the store: the others can read of the failure for as long as it lives.
        lifeline.wait_for("stop", timeout_s=_LINGER_S)
    except (queue.Empty, OSError):
        pass
    return 1


def describe(error: BaseException) -> Failed:
    """Return the report of `error`: text, the exception if it can travel, and whose fault it is."""
    from unisono.comm.health.failures import tells_of_another

    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    code: int | None = None
    has_obeyed = was_interrupted() and isinstance(error, (KeyboardInterrupt, SystemExit))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return Failed(
        summary=summary,
        traceback=format_error(error),
        pickled=dump_exception(error),
        is_consequence=has_obeyed or tells_of_another(error),
        exit_code=code,
        site=site_of(error),
        is_mismatch=isinstance(error, CollectiveMismatch),
    )

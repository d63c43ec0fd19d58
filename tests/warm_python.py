"""Stands for `python` in a command: `python -IS warm_python.py SOCKET PYTHON SEARCH_PATH words...`.

The process that runs is a fork of the warm interpreter (`warm_script.py`), which gets our
descriptors, variables, directory and namespaces. This one passes signals on and ends as it ends.
What it cannot express, a PYTHONPATH without all of SEARCH_PATH, and any trouble, is left to the
real PYTHON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

NAMESPACES = ("net", "uts", "mnt")
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT")


def understood(words: list[str]) -> dict[str, object] | None:
    """Return what `python words` is to do; None if only python itself knows."""
    rest, warnings, unbuffered = list(words), [], False
    while rest and (rest[0] in ("-B", "-P", "-u") or rest[0].startswith("-W")):
        option = rest.pop(0)
        if option.startswith("-W"):
            warnings.append(option[2:] or rest.pop(0))
        unbuffered = unbuffered or option == "-u"
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return None
    return {"words": rest, "warnings": warnings, "unbuffered": unbuffered}


def ask(path: str, request: dict[str, object]) -> socket.socket:
    """Send all that makes up this process."""
    listed = os.listdir("/proc/self/fd")  # noqa: PTH208  pathlib takes longer than all of this
    targets = [fd for fd in map(int, listed) if _is_open(fd)]  # the listing itself is closed
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    here = os.getcwd()  # noqa: PTH109
    request |= {"cwd": here, "env": dict(os.environ), "targets": targets, "pid": os.getpid()}
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(path)
    socket.send_fds(line, [json.dumps(request).encode()], [*targets, *spaces])
    return line


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def main() -> None:
    """Be the process, as far as anybody outside can tell."""
    path, python, search_path, *words = sys.argv[1:]
    known, wanted = (
        text.split(os.pathsep) if text else []
        for text in (search_path, os.environ.get("PYTHONPATH", ""))
    )
    request = understood(words) if set(known) <= set(wanted) else None
    if request is not None:
        request["more_path"] = [entry for entry in wanted if entry not in known]
    try:
        line = None if request is None else ask(path, request)
    except OSError:
        line = None
    if line is None:
        os.execv(python, [python, *words])
    for name in _PASSED_ON:
        number = getattr(signal, name)
        signal.signal(number, lambda number, frame: line.send(b"%d" % number))
    code = int(line.recv(100) or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()

"""What is not signed by a rank of the world is neither unpickled nor believed."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from unisono.comm import seal
from unisono.comm.collectives import Collectives
from unisono.comm.health import failures, watchdog
from unisono.comm.mpi_style import MPICommunication
from unisono.errors import PlatformError, UnisonoError


class Evil:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def _stranger(prefix: str) -> dist.Store:
    """Return what anybody has who can connect to the store of this world."""
    return dist.PrefixStore(prefix, watchdog.own_connection(watchdog.default_store()))


@pytest.mark.ranks(2)
def test_collectives_and_messages_unpickle_only_what_its_rank_has_signed(tmp_path, monkeypatch):
    mpi, trap = MPICommunication(), tmp_path / "unpickled"
    assert mpi.allgather(mpi.rank) == [0, 1]
    assert mpi.bcast("a" if mpi.rank == 1 else None, 1) == "a"
    assert mpi.scatter(["x", "y"] if mpi.rank == 0 else None) == "xy"[mpi.rank]
    if mpi.rank == 1:
        forged = bytearray(pickle.dumps(Evil(trap)) + bytes(32))
        values = torch.frombuffer(forged, dtype=torch.uint8)
        monkeypatch.setattr(Collectives, "_pickled", lambda comm, obj: values)
    for verb in (mpi.allgather, lambda x: mpi.bcast(x, 1)):
        with pytest.raises(UnisonoError, match="an object of rank 1"):
            verb(3)
    mpi.send(3, 1 - mpi.rank)
    if mpi.rank == 0:
        with pytest.raises(UnisonoError, match="an object of rank 1"):
            mpi.recv(source=1)
    else:
        assert mpi.recv(source=0) == 3
    monkeypatch.undo()
    assert not trap.exists()
    assert mpi.allgather(mpi.rank) == [0, 1]


@pytest.mark.ranks(2)
def test_a_forged_failure_is_ignored_and_does_not_keep_a_true_one_out():
    comm = unisono.world()
    comm.barrier()
    if comm.rank == 0:
        record = b'{"rank": 1, "host": "here", "error": "Forged: no", "traceback": ""}'
        _stranger("unisono/watch").set("failed", record + bytes(32))
    comm.barrier()
    with pytest.warns(RuntimeWarning, match="ignores 'failed'"):
        assert failures.posted_failure() is None
    comm.barrier()
    if comm.rank == 1:
        failures.post_failure(ValueError("true"))
        assert failures.posted_failure() is None  # its own
    else:
        end = time.monotonic() + 5
        while failures.posted_failure() is None and time.monotonic() < end:
            time.sleep(0.01)
        assert "ValueError: true" in str(failures.posted_failure())


_SCRIPT = """
import os, sys, torch.distributed as dist
import unisono
from unisono.comm.mpi_style import MPICommunication
from unisono.errors import PlatformError
if os.environ.get("OTHER") and os.environ["RANK"] == "1":
    os.environ["UNISONO_KEY_FILE"] = os.environ["OTHER"]
comm = MPICommunication(unisono.world())
try:
    print("objects", sorted(comm.allgather(comm.rank)), flush=True)
except PlatformError as error:
    print("refused:", str(error).replace(chr(10), " "), flush=True)
comm._comm.barrier()
"""


def _ranks(python: str, tmp_path: Path, **more: str) -> list[str]:
    """Start two ranks as a launcher does that knows nothing of us; return what they print."""
    probe = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    env = {
        **{name: text for name, text in os.environ.items() if not name.startswith("UNISONO")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(probe.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        **more,
    }
    ranks = [
        subprocess.Popen(
            [python, str(script)],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    return [rank.communicate(timeout=120)[0] for rank in ranks]


def test_ranks_of_another_launcher_share_a_private_file_of_their_user(warm_python, tmp_path):
    for output in _ranks(warm_python, tmp_path):
        assert "objects [0, 1]" in output, output
    path = tmp_path / "state" / "unisono" / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_ranks_with_different_keys_do_not_take_objects_and_all_say_why(warm_python, tmp_path):
    other = tmp_path / "other"
    other.write_text("0123456789abcdef" * 4)
    other.chmod(0o600)
    for output in _ranks(warm_python, tmp_path, OTHER=str(other)):
        assert "refused:" in output, output
        assert "holds another key" in output
        assert "UNISONO_KEY_FILE=FILE" in output


def test_a_key_that_others_can_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_text("0123456789abcdef" * 4)
    path.chmod(0o640)
    monkeypatch.setattr(seal, "_override", None)
    monkeypatch.setenv(seal.VARIABLE, str(path))
    with pytest.raises(PlatformError, match="mode 0640"):
        seal.Seal(dist.HashStore(), 0)
    path.chmod(0o600)
    seal.Seal(dist.HashStore(), 0)
    path.write_text("short")
    with pytest.raises(PlatformError, match="5 bytes < 16"):
        seal.Seal(dist.HashStore(), 0)


def _secret_of_rank() -> tuple[bytes, bool]:
    seen = Path("/proc/self/environ").read_bytes() + repr(dict(os.environ)).encode()
    return seal._override or b"", (seal._override or b"?").hex().encode() in seen


def test_our_launcher_brings_a_new_secret_with_every_run_and_not_by_the_environment():
    runs = [unisono.run(_secret_of_rank, on="cpu", ranks=2) for _ in range(2)]
    (first, in_environment), second = runs[0]
    assert len(first) == 32
    assert not in_environment
    assert second[0] == first
    assert runs[1][0][0] != first

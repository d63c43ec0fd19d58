"""Proof that something was written by a rank of this world, not by another program.

The store of torch accepts any connection, and so do gloo's listeners. Whatever is
unpickled, and every notice that ranks leave each other, therefore carries a code (HMAC-SHA256)
made with a secret of the world, which never travels through the store:

- our launchers give it to their ranks with the function, by a nameless file or one of mode 0600;
- ranks that meet through a file (the user's own `srun`) find it there, mode 0600;
- in all other worlds it is in a private file of the user: `UNISONO_KEY_FILE`, else one below
  `~/.local/state`, made at the first need. Hosts that do not share it cannot exchange objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from unisono import torch_private as private
from unisono.comm.health import mark_as_news
from unisono.errors import PlatformError, RankTimeout, UnisonoError, compress_ranks

VARIABLE = "UNISONO_KEY_FILE"
_SHA = "sha256"
_CODE_BYTES = 32
_LEAST_BYTES = 16
_POLL_S = 0.01
_override: bytes | None = None


class Seal:
    """Signs and verifies for one rank of one world.

    Args:
        store: store of the world.
        rank: own rank in it.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # A word of this world keeps what was signed in another one of the same user out of it.
        word = store.compare_set("unisono/word", "", secrets.token_hex(16))
        self._key = hmac.digest(_secret(), bytes(word), _SHA)
        self._store = store
        self._rank = rank
        self._alike: set[tuple[int, ...]] = set()
        self._has_warned = False
        key = self._proof_key(rank)
        store.set(key, self._proof(key).decode())

    def sign(self, data: bytes, place: str) -> bytes:
        """Return `data` with its code; it is good at `place` only."""
        return data + self._code(data, place)

    def verified(self, data: bytes, place: str) -> bytes | None:
        """Return what was signed; None if no rank of this world has."""
        body, code = data[:-_CODE_BYTES], data[-_CODE_BYTES:]
        return body if hmac.compare_digest(code, self._code(body, place)) else None

    def body_if_signed(self, data: bytes, place: str) -> bytes | None:
        """Return what was signed; None, and once a warning, if it is to be ignored."""
        body = self.verified(data, place)
        if body is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"rank {self._rank} ignores {place!r} in the store of its world: no rank with its "
                "key has written it. Either another program has, or hosts hold different keys; "
                f"then {VARIABLE}=... with one private file for all of them helps",
                RuntimeWarning,
                stacklevel=3,
            )
        return body

    def check_alike(self, ranks: Sequence[int], timeout_s: float) -> None:
        """Raise `PlatformError`, on all `ranks` alike, unless they hold one key.

        `ranks` are world ranks whose group exists, so that all have said which key they hold.
        """
        members = tuple(ranks)
        if members in self._alike:
            return
        keys = {rank: self._proof_key(rank) for rank in members}
        end = time.monotonic() + timeout_s
        while not self._store.check(list(keys.values())):
            if time.monotonic() > end:
                late = [rank for rank, key in keys.items() if not self._store.check([key])]
                error = RankTimeout(
                    f"rank {compress_ranks(late)} did not say within {timeout_s:g} s which key it "
                    "holds, without which no object is accepted from it",
                    missing=late,
                )
                raise mark_as_news(error)
            time.sleep(_POLL_S)
        strange = [
            rank
            for rank, key in keys.items()
            if not hmac.compare_digest(bytes(self._store.get(key)), self._proof(key))
        ]
        if strange:
            raise PlatformError.because(
                "Python objects between ranks that no launcher of unisono has started",
                f"rank {compress_ranks(strange)} holds another key than rank {self._rank}, and "
                "objects are unpickled only if a rank of this world is known to have sent them",
                None,
                f"{VARIABLE}=FILE for all ranks, a file of mode 0600 with the same content on all "
                "hosts: openssl rand -hex 32",
            )
        self._alike.add(members)

    def _code(self, data: bytes, place: str) -> bytes:
        text = place.encode()
        return hmac.digest(self._key, len(text).to_bytes(4, "little") + text + data, _SHA)

    def _proof_key(self, rank: int) -> str:
        return f"unisono/proof/{rank}"

    def _proof(self, key: str) -> bytes:
        return self._code(b"", key).hex().encode()


_seals: weakref.WeakKeyDictionary[dist.ProcessGroup, Seal] = weakref.WeakKeyDictionary()
"""That of the world, known weakly: one that has ended is not kept alive, nor is its store."""


def of_world() -> Seal:
    """Return the seal of the default process group. Local."""
    world = dist.group.WORLD
    if world is None:
        raise UnisonoError("there is no world whose ranks could sign anything")
    if world not in _seals:
        _seals[world] = Seal(private.default_store(), world.rank())
    return _seals[world]


def give_secret(secret: bytes) -> None:
    """Have this process use a secret that its launcher has brought by a private way."""
    global _override
    _override = secret


def prove(text: str) -> str:
    """Return what only a process with the secret of this one can say about `text`."""
    return hmac.new(_secret(), text.encode(), hashlib.sha256).hexdigest()


def refused(what: str) -> UnisonoError:
    """Return the error for something that would have been unpickled, had it been signed."""
    return UnisonoError.because(
        what,
        "no rank of this world has sent it as it came: it is not unpickled",
        None,
        "another program reaches the network of this run; see the page on security",
    )


def _secret() -> bytes:
    """Return the secret of this process."""
    if _override is not None:
        return _override
    if named := os.environ.get(VARIABLE):
        return _private(Path(named), f"{VARIABLE}={named}")
    try:
        path = _own_file()
    except (OSError, RuntimeError):  # no home that can be written
        return secrets.token_bytes(_CODE_BYTES)  # a random one: all ranks learn that they differ
    return _private(path, f"the key of worlds that other launchers start, {path}")


def _own_file() -> Path:
    """Return the user's own key file, which is made if it is not there."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state, "unisono", "key")
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, draft = tempfile.mkstemp(dir=path.parent)  # of mode 0600
        os.write(fd, secrets.token_hex(32).encode() + b"\n")
        os.close(fd)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(draft)  # appears whole, and the first of several ranks wins
        Path(draft).unlink()
    return path


def _private(path: Path, request: str) -> bytes:
    """Return the content of a file that only this user can read."""
    hint = f"openssl rand -hex 32 > {path}; chmod 600 {path}"
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read().strip()
    except OSError as error:
        raise PlatformError.because(request, f"{error.strerror}", None, hint) from None
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or mode & 0o077:
        problem = f"mode {mode:04o}, owner {status.st_uid} (this user is {os.getuid()})"
        raise PlatformError.because(request, problem, None, f"chmod 600 {path}")
    if len(data) < _LEAST_BYTES:
        arithmetic = f"{len(data)} bytes < {_LEAST_BYTES}"
        raise PlatformError.because(request, "too short for a secret", arithmetic, hint)
    return data

"""How the ranks of a new group find each other, and the segment that those of one host share.

Each tells its host in the group's store. If all are on one, the first of them makes a segment and
the others prove that they can map it; else they talk over a network.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from unisono.comm.engines import core
from unisono.comm.engines.core import SegmentTicket, SharedSegment
from unisono.comm.engines.shm import ShmEngine
from unisono.comm.health import mark_as_news
from unisono.comm.machine import host_id, is_card_dead, own_card
from unisono.errors import RankFailed, RankTimeout, UnisonoError, compress_ranks
from unisono.expect import number_in
from unisono.processes import pid_namespace

_PEERS_S = 0.05
_LONGEST_NAP_S = 0.05
_DEFAULT_SLOT_KB = 1024
_PAGE, _LINE = 4096, 64


@dataclass(frozen=True)
class Member:
    """A rank of a group, as it tells about itself when the group is made."""

    card: list[Any]
    """Where its process is, its id and its start time (`machine.own_card`)."""
    host: str
    nonce: str
    """A random word; that of the first rank names the group."""
    memory: str
    """A word that ranks which can share memory have in common."""
    facts: list[Any]
    """What else the ranks of its transport want to know."""


def memory_id() -> str:
    """Return a word shared by the processes that can share memory with this one.

    Those with another version of the core lay memory out in another way.
    """
    if core.unavailable() is not None:
        return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    return f"{host_id()}-{pid_namespace()}-{os.getuid()}-{core.VERSION}"


class Rendezvous:
    """One rank's side of the meeting.

    Args:
        store: store of the group; all keys are deleted again.
        rank: own rank in the group.
        ranks: world ranks of the group, for messages.
        timeout_s: deadline for the others to come.
        backend: name of the backend, for messages.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        backend: str = "shm",
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._size = len(self._ranks)
        self._timeout_s = timeout_s
        self._backend = backend
        self.members: list[Member] = []
        """What all ranks report about themselves."""
        self._own_keys: list[str] = []
        self._slot_bytes = 0

    @property
    def nonce(self) -> str:
        """A word of this group alone, once its ranks have met."""
        return self.members[0].nonce

    def introduce(self, *facts: object) -> list[Member]:
        """Return what all ranks of the group tell about themselves. Collective."""
        nonce = secrets.token_hex(8)
        me = Member(own_card(), socket.gethostname(), nonce, memory_id(), list(facts))
        try:
            texts = self.share("member", json.dumps(asdict(me)))
        except BaseException:
            self.clean()  # who comes later must not take this rank for present
            raise
        self.members = [Member(**json.loads(text)) for text in texts]
        return self.members

    def share_memory(self) -> ShmEngine | None:
        """Return the kernels over memory that all ranks share; None if they cannot share any.

        Collective over the group, after `introduce`.
        """
        if len({member.memory for member in self.members}) > 1:
            return None
        segment = None
        try:
            segment, report = self._map("segment")
            reports = self.share(f"mapped/{self.nonce}", report)
        finally:
            if segment is not None:
                segment.seal()
        for text in reports:
            word, _, message = text.partition(" ")
            if word == "error":
                raise UnisonoError(message)
        if segment is None or any(report != "ok" for report in reports):
            return None
        processes = [(member.card[1], member.card[2]) for member in self.members]
        engine = ShmEngine(segment, self._slot_bytes, self._rank, self._ranks, processes)
        engine.barrier(async_op=False, timeout_s=self._timeout_s)
        return engine

    def _map(self, key: str) -> tuple[SharedSegment | None, str]:
        """Make or open the segment; return it, or None, and how that went."""
        size = self._size
        if self._rank == 0:
            try:
                self._slot_bytes = slot_bytes = slot_bytes_for(size)
                segment = SharedSegment.create(core.load().layout(size, slot_bytes)[0])
                _touch(segment, size, slot_bytes, 0)
            except (OSError, UnisonoError) as error:
                word = "none" if isinstance(error, OSError) else "error"
                self._set(key, f"{word} {error}")
                return None, f"{word} {error}"
            self._set(key, f"{slot_bytes} {segment.ticket}")
            return segment, "ok"
        self._await([key], [0])
        answer = self._store.get(key).decode()
        word, _, text = answer.partition(" ")
        if word in ("none", "error"):
            return None, answer
        self._slot_bytes = int(word)
        try:
            segment = SharedSegment.open(SegmentTicket.parse(text))
        except OSError as error:
            return None, f"none {error}"
        try:
            _touch(segment, size, self._slot_bytes, self._rank)
        except UnisonoError as error:
            return segment, f"error {error}"
        return segment, "ok"

    def share(self, what: str, text: str) -> list[str]:
        """Return the texts of all ranks.

        The first rank collects them and passes them on in one piece, so the store is asked in
        proportion to the number of ranks, and not to its square. Once all know each other, it also
        passes on who is dead or late; `what` then has a word of this meeting, for that stays.
        """
        keys, whole = [f"{what}/{rank}" for rank in range(self._size)], f"{what}/whole"
        self._set(keys[self._rank], text)
        if self._rank != 0:
            self._await([whole], [0], keys)
            news = json.loads(self._store.get(whole))
            if isinstance(news, list):
                return news
            raise mark_as_news(self._late(**news) if "absent" in news else self._died(**news))
        try:
            self._await(keys, range(self._size))
        except RankTimeout as error:
            self._pass_on(whole, absent=list(error.missing))
            raise
        except RankFailed as error:
            if error.rank is not None:
                self._pass_on(whole, rank=error.rank, host=error.host)
            raise
        texts = [raw.decode() for raw in self._store.multi_get(keys)]
        self._set(whole, json.dumps(texts))
        return texts

    def _pass_on(self, key: str, **news: object) -> None:
        if self.members:
            self._store.set(key, json.dumps(news))  # not cleaned away: others have to read it

    def clean(self) -> None:
        """Delete what this rank wrote; call it when all ranks have read it."""
        for key in self._own_keys:
            try:
                self._store.delete_key(key)
            except RuntimeError:  # a store without deletion
                return

    def _set(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._own_keys.append(key)

    def _await(
        self, keys: Sequence[str], writers: Sequence[int], before: Sequence[str] = ()
    ) -> None:
        """Wait until the keys are there, or a rank that should write one is dead.

        Args:
            keys: what to wait for.
            writers: who writes each.
            before: what the ranks write, in their order, before `keys` can be written.
        """
        began = time.monotonic()
        look = began + _PEERS_S
        while True:
            try:
                if self._store.check(list(keys)):
                    return
            except RuntimeError as error:
                self._look_for_dead(range(self._size))
                lost = RankFailed(
                    f"rank {self._ranks[self._rank]} lost the store while its group was made\n"
                    f"  found: {error}",
                )
                raise mark_as_news(lost) from error
            now = time.monotonic()
            if now >= look:
                look = now + _PEERS_S
                missing = self._missing(keys, writers)
                self._look_for_dead(missing)
                if now > began + self._timeout_s and missing:
                    absent = self._missing(before, range(self._size)) or missing
                    raise mark_as_news(self._late([self._ranks[r] for r in absent]))
            # Long waits are looked at less often: many ranks may be waiting.
            time.sleep(min(_LONGEST_NAP_S, 1e-4 + (now - began) / 10))

    def _missing(self, keys: Sequence[str], writers: Sequence[int]) -> list[int]:
        pairs = zip(writers, keys, strict=False)
        return [writer for writer, key in pairs if not self._store.check([key])]

    def _look_for_dead(self, suspects: Sequence[int]) -> None:
        for rank, member in enumerate(self.members):
            if rank in suspects and is_card_dead(member.card):
                raise mark_as_news(self._died(self._ranks[rank], member.host))

    def _died(self, rank: int, host: str) -> RankFailed:
        member = self.members[self._ranks.index(rank)]
        return RankFailed(
            f"rank {rank} (process {member.card[1]} on {host}) died while the group was made",
            rank=rank,
            host=host,
        )

    def _late(self, absent: list[int]) -> RankTimeout:
        return RankTimeout(
            f"a {self._backend} group of ranks {list(self._ranks)} was not made within "
            f"{self._timeout_s:g} s\n  not arrived: rank {compress_ranks(absent)}",
            missing=absent,
            op="new_group",
        )


def _touch(segment: SharedSegment, size: int, slot_bytes: int, rank: int) -> None:
    """Take the memory of a rank's own slots, and with rank 0 what all ranks share."""
    _, common, slots_bytes, _, _ = core.load().layout(size, slot_bytes)
    purpose = f"a shm group of {size} ranks with slots of {slot_bytes // 1024} KB"
    if rank == 0:
        segment.reserve(0, common, purpose)
    segment.reserve(common + rank * slots_bytes, slots_bytes, purpose)


def slot_bytes_for(size: int) -> int:
    """Return the bytes of a slot for `size` ranks: whole pages, as the environment asks for it.

    A slot is dealt out in shares, one cache line or more for each other rank.
    """
    slot_kb = number_in("UNISONO_SHM_SLOT_KB", at_least=_PAGE / 1024) or _DEFAULT_SLOT_KB
    return -(-max(int(slot_kb) * 1024, (size - 1) * _LINE) // _PAGE) * _PAGE

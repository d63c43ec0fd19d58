"""What a rank says about its call, so that ranks that disagree find out before data is used.

Shared memory compares signatures in its core; gloo and MPI send them along. All transports raise
the same error, on all ranks alike.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.comm.reductions import DTYPE_NUMBERS, DTYPES
from unisono.errors import CollectiveMismatch, name_ranks

VERBS: tuple[str, ...] = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "all_gather_ints",
    "shared_buffer",
    "shared_buffer",
)
"""Collectives by the number under which they travel; the core has the same order."""
OPS: tuple[str, ...] = ("sum", "product", "min", "max", "and", "or", "xor", "sum64", "mean")
"""Reductions by the number under which they travel; the core has the same order."""
OP_NUMBERS = {op: number for number, op in enumerate(OPS)}
_VERB_NUMBERS = {verb: number for number, verb in enumerate(VERBS[:-1])}
_HAVE_TABLES = frozenset(_VERB_NUMBERS[verb] for verb in ("all_to_all", "gather", "scatter"))
_WRAP = 1 << 63
_MOST_STEPS = 1024


class Signature(NamedTuple):
    """What one rank is about to do. Bytes sent and expected are listed where ranks may differ."""

    code: int
    """Verb, dtype, reduction and root, as the core packs them."""
    nbytes: int
    digest: int = 0
    """Of what else must agree: sizes, dim."""
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()

    @property
    def verb(self) -> str:
        """Name of the verb."""
        return name_of(self.code & 255)

    def packed(self, size: int) -> bytes:
        """Return it as bytes, equally many for every call of a group of `size` ranks."""
        return _packed(self, size)

    @classmethod
    def unpacked(cls, raw: bytes | bytearray | memoryview, size: int) -> Signature:
        """Undo `packed`."""
        code, nbytes, digest, *table = struct.unpack(f"{3 + 2 * size}q", raw[: (3 + 2 * size) * 8])
        if code & 255 not in _HAVE_TABLES:
            return cls(code, nbytes, digest)
        return cls(code, nbytes, digest, tuple(table[:size]), tuple(table[size:]))


@functools.lru_cache(maxsize=1024)
def _packed(signature: Signature, size: int) -> bytes:
    table = signature.sends + signature.expects or (0,) * (2 * size)
    return struct.pack(f"{3 + 2 * size}q", *signature[:3], *table).ljust(packed_bytes(size), b"\0")


def packed_bytes(size: int) -> int:
    """Return the bytes of a packed signature: whole cache lines, so data behind it is aligned."""
    return -(-8 * (3 + 2 * size) // 64) * 64


def sign(
    verb: str,
    dtype: torch.dtype,
    nbytes: int,
    *alike: int,
    op: str | None = None,
    root: int = -1,
) -> Signature:
    """Return the signature of a call; `alike` are further numbers that must agree."""
    number = DTYPE_NUMBERS.get(dtype, -1) + 1
    reduction = 0 if op is None else OP_NUMBERS[op] + 1
    code = _VERB_NUMBERS[verb] | number << 8 | reduction << 16 | (root + 1) << 24
    return Signature(code, nbytes, hash(alike) % _WRAP if alike else 0)


def sign_blocks(
    verb: str, outs: Sequence[Tensor], ins: Sequence[Tensor], root: int = -1
) -> Signature:
    """Return the signature of an exchange of blocks, of which each rank knows its own."""
    sends = tuple(block.nbytes for block in ins)
    expects = tuple(block.nbytes for block in outs)
    signature = sign(verb, ins[0].dtype, sum(sends), root=root)
    return signature._replace(sends=sends, expects=expects)


class Compared:
    """Calls of a group that ranks have compared, each with the one before it.

    Programs repeat themselves: what has followed the same call before fits without a comparison
    that is waited for.
    """

    def __init__(self) -> None:
        self._steps: set[tuple[Signature | None, Signature]] = set()
        self._latest: Signature | None = None

    def is_new(self, signature: Signature) -> bool:
        """Take down the next call; return whether it has not followed the latest one before."""
        step, self._latest = (self._latest, signature), signature
        if step in self._steps:
            return False
        if len(self._steps) >= _MOST_STEPS:
            self._steps.clear()
        self._steps.add(step)
        return True


def check(signatures: Sequence[Signature], ranks: Sequence[int]) -> None:
    """Raise `CollectiveMismatch` unless the calls of all ranks fit. The same on every rank."""
    rows = [(s.code, s.nbytes, s.digest) for s in signatures]
    is_uneven = bool(signatures[0].sends)
    if len({(code, 0 if is_uneven else nbytes, digest) for code, nbytes, digest in rows}) > 1:
        raise mismatch(rows, ranks)
    for s, source in enumerate(signatures):
        for d, nbytes in enumerate(source.sends):
            if nbytes != (expected := signatures[d].expects[s]):
                raise mismatch(rows, ranks, wrong_block(ranks, s, nbytes, d, expected))


def wrong_block(ranks: Sequence[int], src: int, nbytes: int, dst: int, expected: int) -> str:
    """Return what is wrong with a block that one rank of a group sends to another."""
    return f"rank {ranks[src]} sends {nbytes} bytes to rank {ranks[dst]}, which expects {expected}"


_ASKED_BY_CHECK = "all_gather_ints() of 24 bytes"
"""How check mode begins every call."""


def mismatch(
    rows: Sequence[tuple[int, int, int]], ranks: Sequence[int], problem: str | None = None
) -> CollectiveMismatch:
    """Return the error for calls that do not fit; `rows` are code, bytes and digest of each."""
    calls = {
        rank: f"{describe(code)} of {nbytes} bytes"
        for rank, (code, nbytes, _) in zip(ranks, rows, strict=True)
    }
    if problem is None:
        problem = "ranks of one group make different calls"
        if len({code for code, _, _ in rows}) == 1:
            problem = (
                "ranks of one group bring different numbers of bytes"
                if len({nbytes for _, nbytes, _ in rows}) > 1
                else "ranks of one group pass different sizes, dims or shapes"
            )
    lines = [f"  rank {rank}: {call}" for rank, call in calls.items()]
    hint = "  HINT: UNISONO_CHECK=1 on all ranks adds the source line of every rank's call"
    asks_first = [rank for rank, call in calls.items() if call == _ASKED_BY_CHECK]
    if 0 < len(asks_first) < len(calls):
        hint = (
            f"  HINT: {name_ranks(asks_first)} makes another call than the others, or is check "
            "mode on there alone? UNISONO_CHECK=1 for all ranks, or check() at the same place"
        )
    return CollectiveMismatch("\n".join([problem, *lines, hint]), calls=calls)


def name_of(verb: int) -> str:
    """Return the name of a verb by its number."""
    return VERBS[verb] if verb < len(VERBS) else "send or recv"


def describe(code: int) -> str:
    """Return what a rank was about to do as text, e.g. `all_reduce(sum, float32)`."""
    dtype, op, root = (code >> 8 & 255) - 1, (code >> 16 & 255) - 1, (code >> 24) - 1
    inner = [
        OPS[op] if 0 <= op < len(OPS) else "",
        str(DTYPES[dtype]).removeprefix("torch.") if 0 <= dtype < len(DTYPES) else "",
        f"root {root}" if root >= 0 else "",
    ]
    return f"{name_of(code & 255)}({', '.join(word for word in inner if word)})"

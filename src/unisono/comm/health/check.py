"""Check mode: before each collective, ranks compare what they are about to do.

A digest of the call travels ahead of it. Where digests differ, every rank puts a fingerprint of its
call into the world's store and reads the others'. A difference that the operation forbids becomes
one `CollectiveMismatch` on all ranks, instead of a hang or a wrong number.

Other parts of the library ask `active`, and look for mistakes of their own kind: see docs/check.md.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import operator
import os
import sys
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from unisono.comm.arguments import bytes_of, dense
from unisono.comm.call import Call, call_site
from unisono.comm.digest import digest
from unisono.comm.health import watchdog
from unisono.errors import CheckWarning, CollectiveMismatch, explain

Fingerprint = dict[str, Any]
Exchange = Callable[..., list[tuple[int, ...]]]
"""An engine's `all_gather_ints`."""

_SAME_BITS = "a backend should give all ranks the same bits; try another one, UNISONO_BACKEND=shm"

_FACTS = (
    "op", "kind", "root", "dim", "requires_grad", "device", "sizes", "recv_sizes", "shape", "dtype",
)  # fmt: skip
"""Fields of a call that are compared."""
_facts_of = operator.attrgetter(*_FACTS)
_WORDS = 8192
"""How much of a result is looked at."""

active = False

last_settings: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[dict[str, Any]]]
last_settings = weakref.WeakKeyDictionary()
"""The groups of each optimizer at its last step: a scheduler has changed them since."""


def start_from_environment() -> None:
    """Turn check mode on for the whole run if `UNISONO_CHECK=1`; off otherwise.

    Called when this is loaded, and again in a fork of the warm server, which has loaded it long
    before the variables of the rank were known.
    """
    _switch(os.environ.get("UNISONO_CHECK", "") not in ("", "0"))


_hooks: list[RemovableHandle] = []
"""By which torch's own wrappers are seen, while check mode is on."""


def _switch(enabled: bool) -> None:
    global active
    active = enabled
    if enabled and not _hooks:
        _hooks.append(register_module_module_registration_hook(_see_construction))
        _hooks.append(register_optimizer_step_post_hook(_see_step))
    elif not enabled:
        while _hooks:
            _hooks.pop().remove()


def _see_construction(module: nn.Module, name: str, _part: nn.Module | None) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _foreign().follow(module)


def _see_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    last_settings[optimizer] = [dict(group) for group in optimizer.param_groups]
    tensors = sys.modules.get("torch.distributed.tensor")
    params = optimizer.param_groups[0]["params"] if tensors is not None else ()
    if tensors is not None and params and isinstance(params[0], tensors.DTensor):
        _foreign().compare_settings(optimizer)


def _foreign() -> Any:
    """Return what compares the replicas of torch's wrappers: above this layer, loaded if needed."""
    return importlib.import_module("unisono.data_parallel.foreign")


start_from_environment()


class check:
    """Turn check mode on (or off) for the collectives of this process.

    Acts at once, and puts the former mode back when used as a context manager. All ranks must
    switch at the same place. `UNISONO_CHECK=1` turns it on for the whole run.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before = active
        _switch(enabled)

    def __enter__(self) -> check:
        return self

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


_reported: set[str] = set()
"""Mistakes that were reported in this process: one warning each."""


def report(subject: str, problem: str, hint: str, *, arithmetic: str | None = None) -> None:
    """Warn of a silent mistake, with the line of the user's program. Once for each `subject`."""
    warn_once(subject, explain(subject, f"{problem}\nat {call_site(2)}", arithmetic, hint))


def warn_once(key: str, text: str) -> None:
    """Warn of a silent mistake, unless this was done before."""
    if key not in _reported:
        _reported.add(key)
        file, _, line = call_site(2).rpartition(":")
        warnings.warn_explicit(text, CheckWarning, file, int(line))


def verify(call: Call, ranks: tuple[int, ...], timeout_s: float, exchange: Exchange) -> None:
    """Compare `call` with the calls of all ranks of its group.

    Args:
        call: what this rank is about to do.
        ranks: world ranks of the group.
        timeout_s: deadline for the others to arrive.
        exchange: tells all ranks some integers.

    Raises:
        CollectiveMismatch: on all ranks, when the calls do not fit.
        TimeoutError: some rank did not arrive.
    """
    if call.sizes is None or call.op != "all_to_all":
        facts = tuple([tuple(x) if type(x) is list else x for x in _facts_of(call)])
        if _are_equal(exchange, call.number << 32 | _number_of(facts), timeout_s):
            return
    fingerprint = _plain(dict(zip(_FACTS, _facts_of(call), strict=True)))
    fingerprint |= {"site": call.site, "text": call.describe()}
    prints = _share(call, "", fingerprint, ranks, timeout_s)
    rule = disagreement(prints)
    if rule is not None:
        raise _mismatch(rule, prints, ranks)


@functools.lru_cache(maxsize=1024)
def _number_of(facts: tuple[Any, ...]) -> int:
    """Return a number for what ranks compare of a call, the same in all processes."""
    facts_by_name: dict[str, Any] = dict(zip(_FACTS, facts, strict=True))
    compared = [rule.key(_plain(facts_by_name)) for rule in _RULES]
    return zlib.crc32(json.dumps(compared).encode())


def verify_equal_result(
    call: Call, result: Tensor, ranks: tuple[int, ...], timeout_s: float, exchange: Exchange
) -> None:
    """After a reduction: raise unless all ranks hold the same finite bits.

    A large result is looked at in part: at other elements in every call.
    """
    if _are_equal(exchange, digest(result, _WORDS, call.number), timeout_s):
        return
    finite = bool(torch.isfinite(result).all()) if result.dtype.itemsize > 1 else True
    raw = bytes_of(dense(result.detach().cpu())).numpy()
    record = {
        "op": call.op,
        "site": call.site,
        "crc": zlib.crc32(raw.tobytes()) if finite else None,
    }
    prints = _share(call, "/sum", record, ranks, timeout_s)
    if len({p["crc"] for p in prints if p["crc"] is not None}) > 1:
        for entry in prints:
            entry["text"] = f"{call.describe()}, checksum {entry['crc']}"
        rule = _Rule("the result differs between ranks", lambda p: p["crc"], hint=_SAME_BITS)
        raise _mismatch(rule, prints, ranks)


_MARK = 0x756E69736F6E6F
"""What tells such an exchange from others, of ranks that are elsewhere in their programs."""


def _are_equal(exchange: Exchange, number: int, timeout_s: float) -> bool:
    """Return whether all ranks bring the same number. Collective."""
    rows: Sequence[tuple[int, ...]] = exchange([_MARK, number, _MARK], timeout_s=timeout_s)
    return all(row == rows[0] for row in rows)


@dataclass(frozen=True)
class _Rule:
    """One thing that must agree over ranks."""

    problem: str
    """What to call it when it does not."""
    key: Callable[[Fingerprint], Any]
    """What is compared; ranks with None are left aside."""
    shows: str = ""
    """Name under which each rank's value is listed, where the call itself does not tell it."""
    hint: str = "all ranks must make the same collectives in the same order"


_RULES = (
    _Rule("different operations", lambda p: p["op"]),
    _Rule("different reductions or arguments", lambda p: p["kind"]),
    _Rule("different roots", lambda p: p["root"]),
    _Rule(
        "tensors on different devices",
        lambda p: p["device"],
        "device",
        "x.to(device) on all ranks: each kind of device has a backend of its own",
    ),
    _Rule("different dims", lambda p: p["dim"]),
    _Rule(
        "different sizes",
        lambda p: p["sizes"] if p["op"] != "all_to_all" else None,
        "sizes",
        "sizes lists the blocks of all ranks, the same list on every rank",
    ),
    _Rule("different dtypes", lambda p: p["dtype"], hint="x.to(torch.float32) on all ranks"),
    _Rule("different shapes", lambda p: _comparable_shape(p)),
    _Rule(
        "requires_grad is True on some ranks only",
        lambda p: p["requires_grad"],
        "requires_grad",
        "x.requires_grad_() on all ranks, or x.detach() on all: in the backward they must all meet",
    ),
)


def disagreement(prints: list[Fingerprint]) -> _Rule | None:
    """Return what the calls disagree about, or None. Pure, the same on every rank."""
    for rule in _RULES:
        present = [value for value in map(rule.key, prints) if value is not None]
        if any(value != present[0] for value in present[1:]):
            return rule
    if prints[0]["op"] == "all_to_all" and None not in [p["recv_sizes"] for p in prints]:
        for (sender, sent), (receiver, got) in itertools.product(enumerate(prints), repeat=2):
            if (rows := sent["sizes"][receiver]) != (expected := got["recv_sizes"][sender]):
                return _Rule(
                    f"rank {sender} of the group sends {rows} rows to rank {receiver}, which "
                    f"expects {expected}",
                    lambda _: None,
                    hint="recv_sizes[q] is what rank q sends here; None learns it",
                )
    return None


def _comparable_shape(p: Fingerprint) -> list[int] | None:
    """Return the part of the shape that must agree: all, or all but the joined dim."""
    shape = p["shape"]
    if shape is None or p["op"] == "scatter":
        return None
    if p["op"] in ("all_gather", "gather", "all_to_all"):
        dim = p["dim"] or 0
        return [*shape[:dim], -1, *shape[dim + 1 :]] if shape else [-1]
    return list(shape)


def _plain(facts: dict[str, Any]) -> Fingerprint:
    """Return what ranks compare of a call in a form that can travel."""
    lists = {
        name: None if facts[name] is None else list(facts[name])
        for name in ("sizes", "recv_sizes", "shape")
    }
    return facts | lists | {"dtype": None if facts["dtype"] is None else str(facts["dtype"])}


def _share(
    call: Call, what: str, record: Fingerprint, ranks: tuple[int, ...], timeout_s: float
) -> list[Fingerprint]:
    """Exchange `record` with all ranks of the call's group, through their store."""
    dog = watchdog.serving(call.key)
    key = f"check/{call.key}/{call.number}{what}"
    records = {} if dog is None else dog.share(key, record, ranks, timeout_s)
    if len(records) < len(ranks):
        raise TimeoutError(key)
    return [records[rank] for rank in ranks]


def _mismatch(rule: _Rule, prints: list[Fingerprint], ranks: tuple[int, ...]) -> CollectiveMismatch:
    texts = [f"{p['text']}{f', {rule.shows}={rule.key(p)}' if rule.shows else ''}" for p in prints]
    facts = [{k: v for k, v in p.items() if k not in ("text", "site")} for p in prints]
    without_site = [json.dumps(fact, sort_keys=True) for fact in facts]
    majority, count = Counter(without_site).most_common(1)[0]
    lines = [f"ranks disagree about one collective: {rule.problem}"]
    for world_rank, text, signature, p in zip(ranks, texts, without_site, prints, strict=True):
        odd = "  <- differs" if signature != majority and count > 1 else ""
        lines.append(f"  rank {world_rank} | {text} | {p['site']}{odd}")
    lines.append(f"  HINT: {rule.hint}")
    calls = {r: f"{t} at {p['site']}" for r, t, p in zip(ranks, texts, prints, strict=True)}
    return CollectiveMismatch("\n".join(lines), calls)

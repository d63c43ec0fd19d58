"""DASO's checkpoint: everything that decides how training goes on, as plain values and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono.data_parallel.daso_exchange import InFlight
from unisono.errors import explain

if TYPE_CHECKING:
    from unisono.data_parallel.daso import DASO

__all__ = ["capture", "restore"]

_COUNTERS = ("current_batch", "rotation", "sent_at", "batches_done", "has_closed", "last_batch")


def capture(daso: DASO) -> dict[str, Any]:
    """Return the state of a DASO optimizer on this rank. Local."""
    exchange, local = daso.exchange, daso.local
    exchange.complete()
    in_flight = exchange.in_flight
    return {
        "local_optimizer": daso.local_optimizer.state_dict(),
        "schedule": daso.schedule.state_dict(),
        "counters": {name: getattr(daso, name) for name in _COUNTERS},
        "in_flight": None
        if in_flight is None
        else {"group": in_flight.group, "sums": in_flight.sums, "narrow": in_flight.narrow},
        "common": exchange.common,
        "outer": None if exchange.outer is None else exchange.outer.velocity,
        "went_apart": local.went_apart,
        "scheduler": None if local.scheduler is None else local.scheduler.state_dict(),
        "scaler": None if local.scaler is None else local.scaler.state_dict(),
        "rank": daso.communicator.rank,
        "size": daso.communicator.size,
    }


def restore(daso: DASO, state: Mapping[str, Any]) -> None:
    """Put a DASO optimizer with a model into a captured state. Local."""
    if daso.module is None:
        raise ValueError(
            explain(
                "DASO.load_state_dict()",
                "no model yet",
                None,
                "first DataParallelMultiGPU(module, daso), then load",
            )
        )
    missing = {"local_optimizer", "schedule", "counters", "in_flight"} - set(state)
    if missing:
        raise ValueError(
            explain(
                f"DASO.load_state_dict of {sorted(state)}",
                f"missing {sorted(missing)}",
                None,
                "pass what daso.state_dict() returned",
            )
        )
    exchange, local = daso.exchange, daso.local
    exchange.drop()
    daso.local_optimizer.load_state_dict(state["local_optimizer"])
    daso.schedule.load_state_dict(state["schedule"])
    for name in _COUNTERS:
        setattr(daso, name, state["counters"][name])
    sent = state["in_flight"]
    if sent is not None:
        exchange.in_flight = InFlight(sent["group"], sent["sums"], sent["narrow"], [])
    daso.is_foreign = sent is not None and (
        state["rank"] != daso.communicator.rank or state["size"] != daso.communicator.size
    )
    if exchange.common is not None and state["common"] is not None:
        exchange.common = list(state["common"])
    if exchange.outer is not None:
        exchange.outer.velocity = state["outer"]
    local.went_apart = state["went_apart"]
    if local.scheduler is not None and state["scheduler"] is not None:
        local.scheduler.load_state_dict(state["scheduler"])
    if local.scaler is not None and state["scaler"] is not None:
        local.scaler.load_state_dict(state["scaler"])
    daso.must_agree = True
    if daso.last_batch is not None:
        plan = daso.schedule.plan(daso.current_batch, daso.last_batch, daso.sent_at)
        local.syncs = plan.local_sync
        local.switch(plan.local_sync)

"""Public names that are gone, and what to write instead: an error says so for one version."""

from __future__ import annotations

from unisono.errors import explain

INSTEAD = {
    "Communicator.coalesce": "flat = torch.cat([a.view(-1), b.view(-1)]); comm.all_reduce_(flat)",
    "Communicator.tune": "UNISONO_ALGO=all_gather:broadcasts, if the choice is wrong for a network",
}
"""By owner and name."""


def missing(owner: str, name: str) -> AttributeError:
    """Return the error of a name that `owner` does not have, or has no more."""
    if (instead := INSTEAD.get(f"{owner}.{name}")) is not None:
        return AttributeError(explain(f"{owner}.{name}", "it was removed in 0.3", None, instead))
    return AttributeError(f"{owner!r} has no attribute {name!r}")

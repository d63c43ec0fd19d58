"""Our own torch.distributed backends, and which of them work here."""

from __future__ import annotations


def register() -> None:
    """Register our backends with torch.distributed; idempotent."""


def available() -> dict[str, str]:
    """Return for each backend "ok" or why it cannot be used here."""
    return {"gloo": "ok"}

"""Plugin of inner sessions, which make no optimizer: their ranks load nothing for one ahead."""

from __future__ import annotations

from unisono.testing import nursery

SERVE = "from unisono.testing.warm import serve\n"
LEAN = (
    "from unisono.testing import warm\n"
    "warm.PRELOAD = [name for name in warm.PRELOAD if name != 'torch._dynamo']\n"
)

assert SERVE in nursery._BOOT
nursery._BOOT = nursery._BOOT.replace(SERVE, LEAN + SERVE)

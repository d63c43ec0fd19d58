"""Plugin of inner sessions, which make no optimizer: their ranks load nothing for one ahead."""

from __future__ import annotations

from unisono.testing import pool

pool.PRELOAD = tuple(name for name in pool.PRELOAD if name != "torch._dynamo")

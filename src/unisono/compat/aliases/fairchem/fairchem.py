"""Leads `import fairchem` to `unisono.compat.fairchem` by the search path alone."""

from __future__ import annotations

from unisono.compat.serving import stand_in

stand_in("fairchem")

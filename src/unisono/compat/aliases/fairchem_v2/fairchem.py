"""Leads `import fairchem` to `unisono.compat.fairchem_v2` by the search path alone."""

from __future__ import annotations

from unisono.compat.serving import stand_in

stand_in("fairchem_v2")

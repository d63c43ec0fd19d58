"""fairchem 2.x's package names: `from unisono.compat.fairchem_v2.core.common import gp_utils`."""

from __future__ import annotations

"""fairchem 1.x's package names: `from unisono.compat.fairchem.core.common import gp_utils`."""

from __future__ import annotations

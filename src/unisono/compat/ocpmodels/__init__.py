"""ocpmodels' package names: `from unisono.compat.ocpmodels.common import gp_utils`."""

from __future__ import annotations

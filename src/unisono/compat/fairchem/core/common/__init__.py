"""The package that holds `gp_utils`."""

from __future__ import annotations

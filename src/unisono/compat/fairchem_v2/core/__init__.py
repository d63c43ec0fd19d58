"""The package that holds `common`."""

from __future__ import annotations

"""Leads `import pytagi` to `unisono.compat.pytagi` by the search path alone."""

from __future__ import annotations

from unisono.compat.serving import stand_in

stand_in("pytagi")

"""Leads `import ocpmodels` to `unisono.compat.ocpmodels` by the search path alone."""

from __future__ import annotations

from unisono.compat.serving import stand_in

stand_in("ocpmodels")

"""Other libraries' spellings: programs written for them run after one changed import line.

With `serve("heat")`, or `unisono run --compat heat script.py`, not even that line changes.
"""

from __future__ import annotations

from unisono.compat.serving import serve, serving

__all__ = ["serve", "serving"]

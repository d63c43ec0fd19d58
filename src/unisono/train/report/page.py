"""A page that carries its style, its script and its data, and asks no network for anything."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

__all__ = ["page"]


def page(title: str, script: str, data: dict[str, Any]) -> str:
    """Return a whole page: our style and scripts, and `data` for them."""
    # "</" would end the script element, "<!--" would hide its end.
    body = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return _PAGE.format(
        title=html.escape(title),
        style=_asset("style.css"),
        charts=_asset("charts.js"),
        script=_asset(script),
        data=body,
    )


def _asset(name: str) -> str:
    return (resources.files("unisono.train.report") / "assets" / name).read_text(encoding="utf-8")


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; connect-src 'self'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title} · unisono</title>
<style>
{style}</style>
</head>
<body>
<noscript>This page draws its figures with the script inside it; please allow scripts.</noscript>
<main id="page"></main>
<script type="application/json" id="data">{data}</script>
<script>
{charts}
{script}</script>
</body>
</html>
"""

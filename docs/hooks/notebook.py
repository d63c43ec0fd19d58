"""A notebook as Markdown: text, code and what the code printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Return kind, source and outputs of every cell."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return [
        (cell["cell_type"], "".join(cell["source"]), cell.get("outputs", []))
        for cell in content["cells"]
    ]


def as_markdown(path: Path) -> str:
    """Return a page with all cells; a link leads to the notebook itself."""
    parts: list[str] = []
    for kind, source, outputs in cells(path):
        parts.append(source if kind == "markdown" else f"```python\n{source}\n```")
        parts += [shown for output in outputs if (shown := _shown(output))]
    parts.append(f"[Download this page as a notebook]({path.name})")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """Return an output as a page shows it: a picture, a table, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![figure](data:image/png;base64,{''.join(data['image/png']).strip()})"
    if "text/html" in data:
        return "".join(data["text/html"])
    text = "".join(output.get("text") or data.get("text/plain") or "")
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""

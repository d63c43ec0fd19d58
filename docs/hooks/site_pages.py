"""mkdocs hook: adds pages to the site that are made, not written.

The API reference, the notebook as a page, the benchmark results and the list of changes.
"""

from __future__ import annotations

from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from notebook import as_markdown

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    made: dict[str, str | bytes] = {
        **reference.pages(),
        "first_hour.md": as_markdown(ROOT / "docs" / "first_hour.ipynb"),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        "benchmarks/index.md": (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"),
    }
    made |= {f"benchmarks/{p.name}": p.read_bytes() for p in (ROOT / "benchmarks").glob("*.png")}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files

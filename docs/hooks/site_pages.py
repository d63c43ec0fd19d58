"""mkdocs hook: adds pages to the site that are made, not written.

The API reference, the notebook as a page, the benchmark results and the list of changes.
"""

from __future__ import annotations

from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook import as_markdown

ROOT = Path(__file__).parents[2]
PAGE_OF = {
    "first_hour.ipynb": "first_hour.md",
    "../benchmarks/RESULTS.md": "benchmarks/index.md",
    "../src/unisono/__init__.py": "reference/index.md",
}
"""Files that pages link to in the repository, and the page that the site makes of each."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    made: dict[str, str | bytes] = {
        **reference.pages(),
        "first_hour.md": as_markdown(ROOT / "docs" / "first_hour.ipynb"),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "]("),
        "benchmarks/index.md": (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8"),
    }
    made |= {f"benchmarks/{p.name}": p.read_bytes() for p in (ROOT / "benchmarks").glob("*.png")}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Let links to these files lead to their pages; a page that is made has links of its own."""
    if page.file.generated_by is None:
        for source, made in PAGE_OF.items():
            markdown = markdown.replace(f"]({source})", f"]({made})")
    return markdown

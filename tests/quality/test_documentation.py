"""Every Python block of the README and of docs/ runs, and so do the commands shown.

The ```python blocks of a page run in order in one fresh process; a block with `title="name.py"` is
written to that file instead. ```console lines that start with `$ unisono` or `$ python` run in the
same directory. Line numbers in a traceback are those of the page.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>[^`]*)$")
TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    first_line: int
    lines: tuple[str, ...]


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page; `first_line` counts from 0."""
    blocks: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines = text.splitlines()
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened = fence["ticks"], fence["info"].strip(), number + 1
        elif opened is not None and fence and fence["ticks"] == opened[0] and not fence["info"]:
            _, info, start = opened
            title = TITLE.search(info)
            language = info.split(" ")[0] if info else ""
            found = title[1] if title else None
            blocks.append(Block(language, found, start, tuple(lines[start:number])))
            opened = None
    assert opened is None, f"the block that opens at line {opened[2]} has no end"
    return blocks


def script_of(blocks: list[Block]) -> str:
    """Join the Python blocks, each at the line where it stands in the page."""
    script: list[str] = []
    for block in blocks:
        if block.language == "python" and block.title is None:
            script += [""] * (block.first_line - len(script)) + list(block.lines)
    return "\n".join(script) + "\n" if script else ""


def commands_of(blocks: list[Block]) -> list[list[str]]:
    """Return the commands that the page shows and that we can run."""
    prompts = [
        line[2:]
        for block in blocks
        if block.language == "console"
        for line in block.lines
        if line.startswith("$ ")
    ]
    words = [shlex.split(prompt, comments=True) for prompt in prompts]
    return [command for command in words if command and command[0] in ("unisono", "python")]


def run(command: list[str], cwd: Path, page: Path) -> None:
    programs = {"unisono": [sys.executable, "-m", "unisono"], "python": [sys.executable]}
    env = {**os.environ, "TMPDIR": str(cwd)}
    done = subprocess.run(
        [*programs[command[0]], *command[1:]],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_of_a_page_runs(page, tmp_path):
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    if script := script_of(blocks):
        (tmp_path / f"{page.name}.py").write_text(script, encoding="utf-8")
        run(["python", f"{page.name}.py"], tmp_path, page)
    for command in commands_of(blocks):
        run(command, tmp_path, page)


def test_a_broken_block_is_found_at_its_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n")
    script = script_of(blocks_of(page.read_text()))
    (tmp_path / "page.md.py").write_text(script)
    with pytest.raises(AssertionError, match=r'page.md.py", line 10'):
        run(["python", "page.md.py"], tmp_path, page)


def test_only_python_without_title_is_executed():
    text = '```python title="a.py"\nboom\n```\n```text\nboom\n```\n```console\n$ unisono x\n```\n'
    blocks = blocks_of(text)
    assert script_of(blocks) == ""
    assert [block.title for block in blocks] == ["a.py", None, None]
    assert commands_of(blocks) == [["unisono", "x"]]

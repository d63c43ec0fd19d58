"""Every Python block of the README and of docs/ runs, and so do the commands and the notebook.

The ```python blocks of a page run in order in one fresh process; a block with `title="name.py"` is
written to that file instead. ```console lines that start with `$ unisono` or `$ python` run in the
same directory. Line numbers in a traceback are those of the page. A ```text block that follows a
Python block directly is what that block prints, unless it tells times in milliseconds.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`]*)$")
MARK = "\x1e"
"""Stands in front of the first line of a block in what a page prints."""
FLOAT = re.compile(r"\d+\.\d+(?:e[+-]\d+)?|\d+e[+-]\d+")
OF_EXTRAS = {"ase", "monai", "transformers"}
"""Packages that a page may use and that need not be there."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
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
    opened: re.Match[str] | None = None
    start = 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, start = fence, number + 1
        elif opened is not None and fence and fence["ticks"] == opened["ticks"]:
            if fence["info"]:
                continue
            info = opened["info"].strip()
            title = TITLE.search(info)
            inside = tuple(line.removeprefix(opened["indent"]) for line in lines[start:number])
            found = title[1] if title else None
            blocks.append(Block(info.split(" ")[0], found, start, inside))
            opened = None
    assert opened is None, f"the block that opens at line {start} has no end"
    return blocks


def script_of(blocks: list[Block]) -> str:
    """Join the Python blocks, each at the line where it stands in the page.

    Where a block opens, its line is printed, so that one can tell who prints what.
    """
    script: list[str] = []
    for block in blocks:
        if block.language == "python" and block.title is None:
            script += [""] * (block.first_line - 1 - len(script))
            script += [f"print('{MARK}{block.first_line}')", *block.lines]
    return "\n".join(script) + "\n" if script else ""


def shown_below(text: str, blocks: list[Block]) -> dict[int, Block]:
    """Return the ```text blocks that follow a Python block directly, by its first line."""
    lines = text.splitlines()
    return {
        code.first_line: below
        for code, below in itertools.pairwise(blocks)
        if (code.language, code.title, below.language) == ("python", None, "text")
        and " ms " not in below.lines[0]
        and not any(lines[code.first_line + len(code.lines) + 1 : below.first_line - 1])
    }


def check_shown(page: Path, shown: dict[int, Block], printed: str) -> None:
    """Compare these blocks with what was printed; the last digits of a float may differ."""
    parts = [part.partition("\n") for part in printed.split(MARK)[1:]]
    by_line = {int(line): said for line, _, said in parts}
    for first_line, block in shown.items():
        said = [line.rstrip() for line in by_line[first_line].rstrip().splitlines()]
        told = [line.rstrip() for line in block.lines]
        where = f"{page.name}, line {block.first_line + 1}: the code above prints\n"
        assert len(told) == len(said), where + by_line[first_line]
        for line, other in zip(told, said, strict=True):
            assert FLOAT.sub("#", line) == FLOAT.sub("#", other), where + by_line[first_line]
            floats = [[float(number) for number in FLOAT.findall(x)] for x in (line, other)]
            assert floats[0] == pytest.approx(floats[1], rel=0.1, abs=1e-3), f"{where}{other}"


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


def run(interpreter, command: list[str], cwd: Path, page: Path) -> str:
    programs = {"unisono": ["-m", "unisono"], "python": []}
    done = interpreter.run([*programs[command[0]], *command[1:]], cwd=cwd)
    assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_code_block_of_a_page_runs(page, interpreter, tmp_path):
    text = page.read_text(encoding="utf-8")
    blocks = blocks_of(text)
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text("\n".join(block.lines) + "\n", encoding="utf-8")
    if script := script_of(blocks):
        wanted = re.findall(r"^(?:from|import) (\w+)", script, re.MULTILINE)
        missing = [name for name in OF_EXTRAS.intersection(wanted) if find_spec(name) is None]
        if missing:
            pytest.skip(f"{page.name} needs {missing}: pip install 'unisono[others]'")
        (tmp_path / f"{page.name}.py").write_text(script, encoding="utf-8")
        printed = run(interpreter, ["python", f"{page.name}.py"], tmp_path, page)
        check_shown(page, shown_below(text, blocks), printed)
    for command in commands_of(blocks):
        run(interpreter, command, tmp_path, page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository_and_shown_files_are_python(page):
    text = page.read_text(encoding="utf-8")
    for block in blocks_of(text):
        if block.title and block.title.endswith(".py"):
            compile("\n".join(block.lines), block.title, "exec")
        text = text.replace("\n".join(block.lines), "")
    links = [link for link in LINK.findall(text) if not link.startswith(("http", "#"))]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_the_cells_of_the_notebook_run_in_order(interpreter, tmp_path):
    """As in a kernel: every cell is code of `__main__` that stands in no file."""
    notebook = ROOT / "docs" / "first_hour.ipynb"
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    (tmp_path / "kernel.py").write_text(
        f"cells = {[''.join(cell['source']) for cell in cells]!r}\n"
        "del __file__\n"
        "for number, cell in enumerate(cells, 1):\n"
        "    exec(compile(cell, f'<cell {number}>', 'exec'))\n"
    )
    run(interpreter, ["python", "kernel.py"], tmp_path, notebook)
    errors = [output for cell in cells for output in cell["outputs"] if "ename" in output]
    assert not errors, "the notebook was saved with an error in it"


def test_what_a_page_gets_wrong_is_found(interpreter, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n")
    (tmp_path / "page.md.py").write_text(script_of(blocks_of(page.read_text())))
    with pytest.raises(AssertionError, match=r'page.md.py", line 10'):
        run(interpreter, ["python", "page.md.py"], tmp_path, page)
    text = "```python\nf()\n```\n\n```text\nloss 0.50 on 2 ranks\n```\n"
    shown = shown_below(text, blocks_of(text))
    check_shown(page, shown, f"{MARK}1\nloss 0.51 on 2 ranks\n")
    for other in ("loss 0.50 on 3 ranks", "loss 0.60 on 2 ranks", ""):
        with pytest.raises(AssertionError, match=r"page.md, line 6"):
            check_shown(page, shown, f"{MARK}1\n{other}\n")

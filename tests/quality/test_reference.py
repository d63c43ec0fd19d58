"""The reference tells every public name, with its signature and what it does; the site builds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import unisono
from unisono.cli import build_parser
from unisono.cli.completion import subcommands

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    path = ROOT / "docs" / "hooks" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference):
    return reference.pages()


def test_every_package_has_a_page(pages):
    packages = [name for name in unisono.__all__ if inspect.ismodule(getattr(unisono, name))]
    assert len(packages) > 10
    inside = {path.parent.name for path in (ROOT / "src" / "unisono").glob("*/__init__.py")}
    assert inside - {"cli"} <= set(packages)
    assert {"DataParallel", "DASO", "Mesh", "Partition", "run"} <= set(unisono.__all__)
    assert {f"reference/{name}.md" for name in packages} <= set(pages)


def is_told(name, value, text):
    """Whether a page has a section with the name's signature, if it has one, and its docstring."""
    if inspect.ismodule(value):
        return f"\n## {name} (module)\n" in text
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    if callable(value):
        return f"```python\n{name}" in section and bool(value.__doc__)
    return bool(section.strip())


def test_every_public_name_is_told_with_its_signature_and_docstring(reference, pages):
    missing = []
    for path, text in pages.items():
        name = f"unisono.{path.removeprefix('reference/').removesuffix('.md')}"
        if name in ("unisono.index", "unisono.compat"):
            continue
        module = importlib.import_module(name)
        for public in reference.public_names(module):
            if not is_told(public, getattr(module, public), text):
                missing.append(f"{name}.{public}")
    assert missing == []


def test_public_methods_have_docstrings(reference):
    bare = []
    for name in reference.packages():
        module = importlib.import_module(name)
        for public in reference.public_names(module):
            value = getattr(module, public)
            if inspect.isclass(value) and value.__module__.startswith("unisono"):
                bare += [
                    f"{name}.{public}.{member}"
                    for member, _ in reference.members(value)
                    if not inspect.getdoc(getattr(value, member))
                ]
    assert bare == []


def test_a_docstring_becomes_lists_and_blocks(reference):
    doc = (
        "Do it.\n\nMore.\n\nArgs:\n    x: a thing\n        on two lines.\n\nExample:\n    >>> f(1)"
    )
    assert reference.to_markdown(doc) == (
        "Do it.\n\nMore.\n\n**Arguments**\n\n- `x`: a thing on two lines.\n\n"
        "```python\n>>> f(1)\n```"
    )


def test_a_signature_keeps_annotations_and_keyword_only_arguments(reference):
    def move(x: Tensor, dim: int = 0, *, comm: Comm | None = None) -> Tensor: ...  # noqa: F821

    assert reference.signature("move", move) == (
        "move(x: Tensor, dim: int = 0, *, comm: Comm | None = None) -> Tensor"
    )


def test_the_site_builds_without_a_warning(interpreter, monkeypatch, tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: make docs brings it")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    words = ["--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    done = interpreter.run(["-m", "mkdocs", "build", "--strict", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "comm" / "index.html").exists()


def test_names_stand_in_the_order_of_use_and_types_as_they_are_written(reference, pages):
    assert not [path for path, text in pages.items() if "ForwardRef" in text]
    names = reference.public_names(importlib.import_module("unisono.train"))
    ordered = reference.in_order_of_use("unisono.train", names)
    assert ordered[0] == "Checkpoint"
    assert ordered.index("Resumable") < ordered.index("record") < ordered.index("current_run")
    text = pages["reference/train.md"]
    places = [text.index(f"\n## {name}\n") for name in ordered]
    assert places == sorted(places)
    top = pages["reference/index.md"]
    first = top.index("`unisono.run`")
    assert all(first < top.index(f"`unisono.{name}`") for name in ("DASO", "Device", "Wrapper"))


TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
FILES = {"toml", "key"}
"""Ends of names of files, such as `unisono.toml`."""


def resolved(name):
    """Return what a dotted name stands for; raise if it stands for nothing."""
    value, path = unisono, "unisono"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_names_and_options_in_texts_exist(page):
    text = page.read_text().partition("\n### Removed")[0].partition("\n## 0.")[0]
    for name in set(re.findall(r"\bunisono(?:\.[A-Za-z_]\w*)+", text)):
        if name.rpartition(".")[2] not in FILES:
            resolved(name)
    parser = build_parser()
    for words in re.findall(r"(?:`|\$ )unisono (\w+)((?: --[a-z-]+(?: [\w./,]+)?)*)", text):
        command = subcommands(parser).get(words[0])
        assert command is not None, words
        options = set(re.findall(r"--[a-z-]+", words[1]))
        assert options <= set(command._option_string_actions), words

"""Lint, format, types and layers, so that one command tells everything."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def passes(*command: str) -> None:
    """Run a tool of this environment in the repository; show all it says if it objects."""
    program = shutil.which(command[0], path=str(Path(sys.executable).parent))
    assert program is not None, f"{command[0]} is not installed: pip install -e '.[test]'"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_ruff_finds_nothing_to_correct():
    passes("ruff", "check", ".")


def test_ruff_finds_nothing_to_format():
    passes("ruff", "format", "--check", ".")


@pytest.mark.timeout(300)
def test_pyright_finds_no_type_error_in_src_benchmarks_and_examples():
    passes("pyright", "--pythonpath", sys.executable)


MAY_NAME_CUDA = ("accelerator.py", "bayes/__init__.py", "bayes/cuda.py", "compat")
"""The file that knows the kinds, and pytagi's and other libraries' names."""


def names_a_kind(node: ast.AST) -> bool:
    """Whether code, not a docstring or the text of an error, names the kind of one maker."""
    if isinstance(node, ast.Attribute):
        return re.fullmatch(r"(is_)?cuda|.*nccl.*", node.attr) is not None
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and re.fullmatch(r"(.*[,:])?(cuda|nccl)(:.*)?", node.value) is not None


def test_decisions_go_by_the_device_of_a_tensor_not_by_the_word_cuda():
    """`unisono.accelerator` or a tensor's device decides, so that any accelerator is served."""
    assert any(map(names_a_kind, ast.walk(ast.parse("torch.cuda.is_available()"))))
    assert any(map(names_a_kind, ast.walk(ast.parse("x.device.type == 'cuda'"))))
    package = ROOT / "src/unisono"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        if not str(path.relative_to(package)).startswith(MAY_NAME_CUDA)
        for node in ast.walk(ast.parse(path.read_text()))
        if names_a_kind(node)
    ]
    assert not found, "\n".join(found)


def test_imports_point_down_the_layers():
    passes("lint-imports")

"""Private names of torch stand in one file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unisono import torch_private
from unisono.errors import UnisonoError

SOURCES = Path(__file__).parents[2] / "src" / "unisono"
PRIVATE = re.compile(
    r"""^\s*(?:from\s+torch(?:\.\w+)*\._\w|import\s+torch(?:\.\w+)*\._\w)
    |^\s*from\s+torch[\w.]*\s+import\s+[^#\n]*\b_[a-zA-Z]
    |(?<![\w."'`])torch(?:\.\w+)*\._[a-zA-Z]""",
    re.VERBOSE | re.MULTILINE,
)


def private_names(text):
    return [match.group().strip() for match in PRIVATE.finditer(text)]


FOUND = """
from torch._C import Graph
from torch.utils._pytree import tree_map
import torch._dynamo
from torch.optim.optimizer import Optimizer, _hooks
x = torch._foreach_add(a, b)
torch.ops.aten._fft_c2c(x)
"""


def test_the_search_finds_private_names_and_leaves_others_alone():
    assert all(private_names(line) for line in FOUND.strip().splitlines())
    for line in ("from torch import Tensor", "x = torch.empty(3)", '"torch._dynamo"'):
        assert not private_names(line)


def test_private_names_of_torch_stand_in_one_file():
    found = {
        str(path.relative_to(SOURCES)): names
        for path in SOURCES.rglob("*.py")
        if path.name != "torch_private.py" and (names := private_names(path.read_text()))
    }
    assert found == {}


def test_this_torch_has_them_all():
    assert torch_private.missing() == []


def test_a_name_that_torch_lacks_raises_when_it_is_used(monkeypatch):
    monkeypatch.setattr(torch_private, "_missing", [])
    absent = torch_private._lookup("torch:_C._no_such_name")
    assert torch_private.missing() == ["torch._C._no_such_name"]
    with pytest.raises(UnisonoError, match=r"torch\._C\._no_such_name(.|\n)*HINT: torch 2\.13"):
        absent()


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.11.0", False), ("2.13.0+cpu", True), ("2.13.1", True), ("2.16.0.dev1", False)],
)
def test_a_torch_that_is_untested_is_named(monkeypatch, version, is_tested):
    monkeypatch.setattr(torch_private.torch, "__version__", version)
    assert (torch_private.untested() is None) == is_tested

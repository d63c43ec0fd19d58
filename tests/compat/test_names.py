"""What programs import from `unisono.compat` is there: every module, every name of `names.txt`."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
from pathlib import Path

import cloudpickle
import pytest

from unisono.compat import serving
from unisono.compat.libraries import LIBRARIES
from unisono.compat.modules import module_names


def recorded():
    """Return the names of each module, as the file has them."""
    text = Path(__file__).with_name("names.txt").read_text().replace("\n    ", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {path: names.split() for path, _, names in (line.partition(":") for line in lines)}


NAMES = recorded()


def test_the_record_is_of_all_modules_of_all_libraries():
    packages = [importlib.import_module(f"unisono.compat.{name}").__name__ for name in LIBRARIES]
    modules = {name for package in packages for name in module_names(package)}
    assert {f"unisono.compat.{path}" for path in NAMES} == modules


@pytest.mark.parametrize("path", NAMES)
def test_every_module_offers_its_names(path):
    module = importlib.import_module(f"unisono.compat.{path}")
    assert module.__name__ == f"unisono.compat.{path}"
    assert module.__doc__
    assert module.__spec__ is not None
    assert cloudpickle.loads(cloudpickle.dumps(module)) is module
    assert [name for name in NAMES[path] if not hasattr(module, name)] == []
    public = {name for name in NAMES[path] if not name.startswith("_")}
    assert public <= {*dir(module), *getattr(module, "__all__", ())}
    given: dict[str, object] = {}
    exec(f"from unisono.compat.{path} import *", given)
    assert public <= set(given) | {"buffer"}, "`from ... import *` gives them"
    for name in public:
        value = getattr(module, name)
        if inspect.isclass(value):
            assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("path", [path for path in NAMES if "." in path])
def test_attributes_lead_to_the_modules(path):
    parent, _, last = path.rpartition(".")
    found = getattr(importlib.import_module(f"unisono.compat.{parent}"), last)
    if path == "ddpw.wrapper":
        assert found.__name__ == "wrapper", "DDPW has a decorator of its module's name"
    else:
        assert found is importlib.import_module(f"unisono.compat.{path}")


@pytest.mark.parametrize("name", ["ddpw", "distdl", "fairchem", "fairchem_v2", "heat", "pytagi"])
def test_a_served_library_has_the_same_modules_under_its_own_name(name):
    root = "fairchem" if name == "fairchem_v2" else name
    with serving(name):
        for path in NAMES:
            if path.partition(".")[0] == name:
                served = root + path.removeprefix(name)
                own = importlib.import_module(f"unisono.compat.{path}")
                assert importlib.import_module(served) is own
                assert sys.modules[served].__name__ == own.__name__

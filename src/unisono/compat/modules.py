"""Modules made from tables: whose names `unisono.compat.heat.optim` and the others have.

The file of a library holds its table, path by path, and calls `build`. The modules of a table have
no files: they are put in `sys.modules`, where Python looks once the package is loaded. They are
plain modules, so `import`, `dir`, `pickle` and `from ... import *` treat them as any other.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unisono.compat.libraries import library_named
from unisono.errors import MissingExtra

__all__ = ["Module", "build", "loaded", "module_names"]


class Module:
    """One module of a library: what it is, and where its names come from.

    Args:
        doc: its docstring; the package itself keeps that of its file.
        names: pairs of a module of ours and names in it, with blanks between; `theirs=ours` where
            the library calls something differently.
        same: names for modules that stand elsewhere in the table, by their path.
        computed: names whose values are functions to be called at each look-up.
        rest: the module that has all other names, such as `"torch.nn"`.
        instead: what to do about single names that are missing; default: as the library's record.
    """

    def __init__(
        self,
        doc: str,
        *names: tuple[ModuleType, str],
        same: Mapping[str, str] | None = None,
        computed: Mapping[str, Callable[[], object]] | None = None,
        rest: str | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self.doc, self.names, self.rest = doc, names, rest
        self.same, self.computed, self.instead = same or {}, computed or {}, instead or {}


Table = Mapping[str, Module | ModuleType]
"""By path below the package, which is `""`; what has a file of its own is given as it is."""

_built: dict[str, Table] = {}


def module_names(package: str) -> list[str]:
    """Return the names of all modules of a package that was built, itself included."""
    return [f"{package}.{path}".rstrip(".") for path in _built[package]]


def build(package: str, table: Table) -> dict[str, ModuleType]:
    """Make the modules of a table, and give the package itself its names; return them by path."""
    _built[package] = table
    made: dict[str, ModuleType] = {}
    for path, entry in table.items():
        full = f"{package}.{path}".rstrip(".")
        made[path] = (
            entry
            if isinstance(entry, ModuleType)
            else sys.modules.get(full) or _new(full, entry.doc, sys.modules[package].__file__)
        )
        sys.modules[full] = made[path]
    # Packages all, so that Python asks the hook for an inner module where one lacks a name.
    for module in made.values():
        vars(module).setdefault("__path__", [])
    inner: dict[str, dict[str, ModuleType]] = {path: {} for path in table}
    for path, module in made.items():
        if path:
            parent, _, last = path.rpartition(".")
            inner[parent][last] = module
    for path, entry in table.items():
        if isinstance(entry, Module):
            same = {name: made[other] for name, other in entry.same.items()}
            # A name of the table is meant where an inner module has the same one: DDPW's `wrapper`.
            _fill(made[path], entry, inner[path] | _objects(entry.names) | same)
    return made


def _new(name: str, doc: str, origin: str | None) -> ModuleType:
    """Return an empty module, without a loader; its origin says where the table is."""
    module = ModuleType(name, doc)
    module.__spec__ = ModuleSpec(name, None, origin=origin, is_package=True)
    module.__package__ = name
    return module


def _objects(names: Iterable[tuple[ModuleType, str]]) -> dict[str, object]:
    pairs = ((home, *name.partition("=")) for home, words in names for name in words.split())
    return {theirs: getattr(home, ours or theirs) for home, theirs, _, ours in pairs}


def _fill(module: ModuleType, entry: Module, names: dict[str, object]) -> None:
    """Give a module its names, and what Python expects of one."""
    here = module.__name__
    public = sorted({*names, *(name for name in entry.computed if name[0] != "_")})

    def __getattr__(name: str) -> Any:
        if name in entry.computed:
            return entry.computed[name]()
        if name.startswith("__"):
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        other = None if entry.rest is None else loaded(entry.rest, f"{here}.{name}")
        if other is not None and hasattr(other, name):
            return getattr(other, name)
        where = here if entry.rest is None else f"{here}, like {entry.rest},"
        library = library_named(here.split(".")[2])
        close = difflib.get_close_matches(name, public)
        hint = entry.instead.get(name) or "; ".join([*close, library.instead])
        raise AttributeError(f"{where} has no {name!r}\n  HINT: {hint}")

    def __dir__() -> list[str]:
        rest = [] if entry.rest is None else dir(sys.modules.get(entry.rest))
        dunders = (name for name in vars(module) if name.startswith("__"))
        return sorted({*public, *entry.computed, *rest, *dunders})

    vars(module).update(names, __all__=public, __getattr__=__getattr__, __dir__=__dir__)


def loaded(name: str, attribute: str) -> ModuleType:
    """Return a module of another package, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f"pip install {name.partition('.')[0]}"
        raise MissingExtra.because(attribute, str(error), hint=hint) from error

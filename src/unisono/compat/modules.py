"""Module trees made from tables: whose names `unisono.compat.heat.optim` and the others have.

The file of a library holds its table, path by path, and calls `build`. The modules of a table have
no files: they are put in `sys.modules`, where Python looks once the package is loaded. They are
plain modules, so `import`, `dir`, `pickle` and `from ... import *` treat them as any other.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from unisono.compat.libraries import Library, library_named
from unisono.errors import MissingExtra

__all__ = ["Module", "build", "loaded", "module_names"]


class Module:
    """One module of a library: what it is, and where its names come from.

    Args:
        doc: what it is: its docstring. The package itself keeps that of its file.
        names: pairs of a module of ours and its names, separated by blanks; `theirs=ours` where
            the library calls something differently.
        inner: whether it offers the names of its inner modules (not packages) as well.
        star: those of its inner modules that `from ... import *` gives, by default all.
        same: names for modules that stand elsewhere in the table, by their path.
        computed: names whose values are functions to be called at each look-up.
        rest: the module that has all other names, such as `"torch.nn"`.
        hint: what to do about a name that is missing; default what the library's record says.
        instead: the same for single names.
        version: the release of the library whose names these are.
    """

    def __init__(
        self,
        doc: str,
        *names: tuple[ModuleType, str],
        inner: bool = False,
        star: str | None = None,
        same: Mapping[str, str] | None = None,
        computed: Mapping[str, Callable[[], object]] | None = None,
        rest: str | None = None,
        hint: str | None = None,
        instead: Mapping[str, str] | None = None,
        version: str | None = None,
    ) -> None:
        self.doc = doc
        self.names = names
        self.inner = inner
        self.star = star
        self.same = same or {}
        self.computed = computed or {}
        self.rest = rest
        self.hint = hint
        self.instead = instead or {}
        self.version = version

    def pairs(self) -> Iterator[tuple[str, str, str]]:
        """Yield the home, the library's name and our name of each object."""
        for home, names in self.names:
            for theirs, _, ours in (name.partition("=") for name in names.split()):
                yield home.__name__, theirs, ours or theirs

    def objects(self) -> dict[str, object]:
        """Return the objects that the table names, by their names in the library."""
        return {theirs: getattr(sys.modules[home], ours) for home, theirs, ours in self.pairs()}


Table = Mapping[str, Module | ModuleType]
"""By path below the package, which is `""`; what has a file of its own is given as it is."""

_built: dict[str, Table] = {}


def module_names(package: str) -> list[str]:
    """Return the names of all modules of a package that was built, itself included."""
    return [f"{package}.{path}".rstrip(".") for path in _built[package]]


def build(package: str, library: str, table: Table) -> dict[str, ModuleType]:
    """Make the modules of a table, and give the package itself its names.

    Args:
        package: the package's `__name__`.
        library: the library's name in `LIBRARIES`.
        table: what each module offers.

    Returns:
        The modules by their paths.
    """
    made = {path: _made(package, path, entry) for path, entry in table.items()}
    inner: dict[str, dict[str, ModuleType]] = {path: {} for path in table}
    for path, module in made.items():
        if path:
            parent, _, last = path.rpartition(".")
            inner[parent][last] = module
            sys.modules[f"{package}.{path}"] = module
    _built[package] = table
    for path, entry in table.items():
        if isinstance(entry, Module):
            names = entry.objects()
            if entry.inner:
                leaves = [f"{path}.{last}".lstrip(".") for last in inner[path]]
                for leaf in (table[leaf] for leaf in leaves if not inner[leaf]):
                    names |= leaf.objects() if isinstance(leaf, Module) else {}
            names |= {name: made[other] for name, other in entry.same.items()}
            _fill(made[path], entry, names, inner[path], library_named(library))
    return made


def _made(package: str, path: str, entry: Module | ModuleType) -> ModuleType:
    if isinstance(entry, ModuleType):
        return entry
    if not path:
        return sys.modules[package]
    module = ModuleType(f"{package}.{path}", entry.doc)
    # Python has no loader for it, but its origin says where the table is.
    module.__spec__ = ModuleSpec(module.__name__, None, origin=sys.modules[package].__file__)
    return module


def _fill(
    module: ModuleType,
    entry: Module,
    names: dict[str, object],
    inner: dict[str, ModuleType],
    library: Library,
) -> None:
    """Give a module its names, and what Python expects of one."""
    here = module.__name__
    if inner and module.__spec__ is not None and not hasattr(module, "__path__"):
        module.__path__ = module.__spec__.submodule_search_locations = []
    module.__package__ = here if inner else here.rpartition(".")[0]
    stars = inner if entry.star is None else entry.star.split()
    public = sorted({*names, *stars, *(name for name in entry.computed if name[0] != "_")})

    def __getattr__(name: str) -> Any:
        if name in entry.computed:
            return entry.computed[name]()
        if name.startswith("__"):
            raise AttributeError(f"module {here!r} has no attribute {name!r}")
        other = None if entry.rest is None else loaded(entry.rest, f"{here}.{name}")
        if other is None or not hasattr(other, name):
            _refuse(module, name, entry, public, library)
        return getattr(other, name)

    def __dir__() -> list[str]:
        rest = [] if entry.rest is None else dir(sys.modules.get(entry.rest))
        dunders = (name for name in vars(module) if name.startswith("__"))
        return sorted({*public, *inner, *entry.computed, *rest, *dunders})

    # A name of the table is meant where an inner module has the same one: DDPW's `wrapper`.
    vars(module).update(inner | names)
    vars(module).update(__all__=public, __getattr__=__getattr__, __dir__=__dir__)
    if entry.version is not None:
        vars(module)["__version__"] = entry.version


def loaded(name: str, attribute: str) -> ModuleType:
    """Return a module of another package, or say what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        hint = f"pip install {name.partition('.')[0]}"
        raise MissingExtra.because(attribute, str(error), hint=hint) from error


def _refuse(
    module: ModuleType, name: str, entry: Module, public: list[str], library: Library
) -> NoReturn:
    """Raise for a name that is not offered: what is close to it, and what does its work."""
    where = module.__name__ if entry.rest is None else f"neither {module.__name__} nor {entry.rest}"
    close = difflib.get_close_matches(name, public)
    hint = entry.instead.get(name) or "; ".join(
        [*([", ".join(close)] if close else []), entry.hint or library.instead]
    )
    served = sys.modules.get(library.root)
    if library.beside and served is not None and served.__name__ == library.package:
        hint += (
            f"; start without --compat {library.name} or serve({library.name!r}) then: "
            f"`import {library.root}` finds {library.package} now"
        )
    verb = "has no" if entry.rest is None else "has"
    raise AttributeError(f"{where} {verb} {name!r}\n  HINT: {hint}")

"""`import heat` finds `unisono.compat.heat`: a program runs before its owner has changed a line.

One import hook in front of all others answers for the library's root, and registers every module
of ours under its name. Processes that this one starts (workers of a DataLoader, ranks) inherit the
search path, where a file of that name leads back here. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from unisono.compat.libraries import LIBRARIES, Library, library_named
from unisono.compat.modules import module_names
from unisono.errors import PlatformError, explain

__all__ = ["AS_CPU", "call_served", "serve", "serving"]


AS_CPU = 'where there is no CUDA, "cuda" means the CPU of the rank, "nccl" the best backend here'


def serve(*names: str, as_cpu: bool = False) -> None:
    """Let `import name` find our spelling of each library, in this process and in its children.

    To be called before the first import of the library. Calling it again changes nothing. Warns
    where the library itself is installed: ours is what programs get.

    Args:
        names: `"ddpw"`, `"distdl"`, `"fairchem"` (1.x), `"fairchem_v2"`, `"heat"`, `"ocpmodels"`,
            `"pytagi"`.
        as_cpu: for programs that insist on CUDA, where there is none (pytagi's): the CPU is taken
            for it, until the process ends.
    """
    for library in map(library_named, names):
        where = library.installed_at()
        if _start(library) and where is not None:
            warnings.warn(notice(library, where), UserWarning, stacklevel=2)
    if as_cpu:
        _cuda(names).take_cpu()
        warnings.warn(AS_CPU, UserWarning, stacklevel=2)


@contextlib.contextmanager
def serving(*names: str, as_cpu: bool = False) -> Iterator[None]:
    """Serve these libraries inside, without warnings; what was served before stays.

    An error about a name that is not offered leaves the block with what is, in a note. `as_cpu` is
    that of `serve`.

    >>> with serving("ocpmodels"):
    ...     import ocpmodels.common
    >>> ocpmodels.common.__name__
    'unisono.compat.ocpmodels.common'
    """
    libraries = [library_named(name) for name in names]
    started: list[Library] = []
    cuda = _cuda(names) if as_cpu else None
    before = cuda is not None and cuda.take_cpu()
    try:
        for library in libraries:
            if _start(library):
                started.append(library)
        yield
    except (AttributeError, ImportError) as error:
        _explain_missing(error, libraries)
        raise
    finally:
        for library in started:
            _stop(library)
        if cuda is not None:
            cuda.take_cpu(before)


def _cuda(names: Sequence[str]) -> Any:
    """Return the module that can take the CPU for CUDA, if one of these libraries asks it."""
    able = [name for name, library in LIBRARIES.items() if library.insists_on_cuda]
    if not set(names) & set(able):
        raise PlatformError.because(
            f"as_cpu for {', '.join(names) or 'no library'}",
            f"programs of {', '.join(able)} ask for CUDA",
            hint=f"--compat {able[0]} --as-cpu",
        )
    return importlib.import_module("unisono.bayes.cuda")  # loads torch


def _explain_missing(error: Exception, libraries: Sequence[Library]) -> None:
    """Add what is offered to Python's message about a name that is not in a module of ours."""
    said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    for library in libraries:
        if library.package in said and library.instead not in said:
            error.add_note(f"{_offer(library)}\nHINT: {library.instead}")


def call_served(names: Sequence[str], as_cpu: bool, function: Callable[[], object]) -> object:
    """Call `function` while these libraries are served."""
    with serving(*names, as_cpu=as_cpu):
        return function()


def notice(library: Library, where: str | None = None) -> str:
    """Return one line that says what answers for the library's name."""
    release = f" (names of {library.release})" if library.release else ""
    text = f"`import {library.root}` is served by {library.package}{release}"
    return text if where is None else f"{text}; what is installed in {where} is not used"


class _Finder(MetaPathFinder):
    """Answers for the roots of served libraries, and says what is left out below them."""

    def __init__(self) -> None:
        self.served: dict[str, Library] = {}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`.

        Of `from heat import x` it hears under our own name for `x`. What is offered is in
        `sys.modules` by then, so a name that comes here is a file of ours or is left out. Python
        would take an error with our name for a missing attribute, and replace its message.
        """
        if fullname in self.served:
            return ModuleSpec(fullname, _Tree(self.served[fullname]), is_package=True)
        for library in self.served.values():
            is_ours = fullname.startswith(f"{library.package}.")
            if is_ours and (spec := PathFinder.find_spec(fullname, path)) is not None:
                return spec
            if is_ours or fullname.startswith(f"{library.root}."):
                name = fullname.replace(library.package, library.root, 1)
                message = explain(f"import {name}", _offer(library), hint=library.instead)
                raise ModuleNotFoundError(message, name=name)
        return None


class _Tree(Loader):
    """Loads our package and puts all of its modules into `sys.modules` under the library's name."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def exec_module(self, module: ModuleType) -> None:  # noqa: ARG002
        """See `Loader`: Python takes the module that is in `sys.modules` afterwards."""
        root, package = self._library.root, self._library.package
        importlib.import_module(package)
        for name, loaded in list(sys.modules.items()):
            if name == package or name.startswith(f"{package}."):
                sys.modules[name.replace(package, root, 1)] = loaded


_finder = _Finder()


def stand_in(name: str) -> None:
    """Serve a library from within the file on the search path that has its name."""
    library = library_named(name)
    alias = sys.modules.pop(library.root)
    _start(library)
    _Tree(library).exec_module(alias)


def _start(library: Library) -> bool:
    """Put the library in place; False if it was."""
    other = _finder.served.get(library.root)
    if other == library:
        return False
    present = sys.modules.get(library.root)
    if other is not None or present is not None:
        who = other.package if other else getattr(present, "__file__", None) or str(present)
        raise PlatformError.because(
            f"serving {library.name!r}",
            f"`import {library.root}` finds {who} already",
            hint=f"unisono.compat.serve({library.name!r}) before the first import of it",
        )
    _finder.served[library.root] = library
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if library.directory not in sys.path:
        sys.path.insert(0, library.directory)
    return True


def _stop(library: Library) -> None:
    """Undo `_start`."""
    del _finder.served[library.root]
    if not _finder.served:
        sys.meta_path.remove(_finder)
    if library.directory in sys.path:
        sys.path.remove(library.directory)
    for name in [n for n in sys.modules if n.partition(".")[0] == library.root]:
        del sys.modules[name]


def _offer(library: Library) -> str:
    """Say which modules are there."""
    importlib.import_module(library.package)
    inner = module_names(library.package)[1:]
    offered = ", ".join(name.replace(library.package, library.root, 1) for name in inner)
    return f"{notice(library)}, which offers {offered}"

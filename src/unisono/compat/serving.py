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

from unisono.compat.libraries import Library, library_named
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
        is_installed = library.installed_at() is not None
        if _hook.start(library) and is_installed:
            warnings.warn(notice(library), UserWarning, stacklevel=2)
    if as_cpu:
        _cuda(names).take_cpu()
        warnings.warn(AS_CPU, UserWarning, stacklevel=2)


@contextlib.contextmanager
def serving(*names: str, as_cpu: bool = False) -> Iterator[None]:
    """Serve these libraries inside, without warnings; what was served before stays.

    `as_cpu` is that of `serve`.

    >>> with serving("ocpmodels"):
    ...     import ocpmodels.common
    >>> ocpmodels.common.__name__
    'unisono.compat.ocpmodels.common'
    """
    libraries = [library_named(name) for name in names]
    cuda = _cuda(names) if as_cpu else None
    with contextlib.ExitStack() as stack:
        if cuda is not None:
            stack.callback(cuda.take_cpu, cuda.take_cpu())
        for library in libraries:
            if _hook.start(library):
                stack.callback(_hook.stop, library)
        yield


def _cuda(names: Sequence[str]) -> Any:
    """Return the module that can take the CPU for CUDA, if one of these libraries asks it."""
    if "pytagi" not in names:
        raise PlatformError.because(
            f"as_cpu for {', '.join(names) or 'no library'}",
            "programs of pytagi ask for CUDA",
            hint="--compat pytagi --as-cpu",
        )
    return importlib.import_module("unisono.bayes.cuda")  # loads torch


def call_served(names: Sequence[str], as_cpu: bool, function: Callable[[], object]) -> object:
    """Call `function` while these libraries are served."""
    with serving(*names, as_cpu=as_cpu):
        return function()


def notice(library: Library) -> str:
    """Return one line that says what answers for the library's name."""
    text = f"`import {library.root}` is served by {library.package}"
    where = library.installed_at()
    return text if where is None else f"{text}; what is installed in {where} is not used"


class _Hook(MetaPathFinder, Loader):
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
            return ModuleSpec(fullname, self, is_package=True)
        for library in self.served.values():
            if fullname.startswith((f"{library.package}.", f"{library.root}.")):
                if (spec := PathFinder.find_spec(fullname, path)) is not None:
                    return spec
                name = fullname.replace(library.package, library.root, 1)
                inner = module_names(library.package)[1:]
                offered = ", ".join(n.replace(library.package, library.root, 1) for n in inner)
                problem = f"{library.package} answers, which offers {offered}"
                message = explain(f"import {name}", problem, hint=library.instead)
                raise ModuleNotFoundError(message, name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put our modules into `sys.modules` under the library's names, where Python takes them."""
        library = self.served[module.__name__]
        importlib.import_module(library.package)
        for name, ours in list(sys.modules.items()):
            if name == library.package or name.startswith(f"{library.package}."):
                sys.modules[name.replace(library.package, library.root, 1)] = ours

    def start(self, library: Library) -> bool:
        """Put the library in place; False if it was."""
        other, present = self.served.get(library.root), sys.modules.get(library.root)
        if other == library:
            return False
        if other is not None or present is not None:
            place = other.package if other else getattr(present, "__file__", None) or str(present)
            raise PlatformError.because(
                f"serving {library.name!r}",
                f"`import {library.root}` finds {place} already",
                hint=f"unisono.compat.serve({library.name!r}) before the first import of it",
            )
        self.served[library.root] = library
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        if library.directory not in sys.path:
            sys.path.insert(0, library.directory)
        return True

    def stop(self, library: Library) -> None:
        """Undo `start`."""
        del self.served[library.root]
        if not self.served:
            sys.meta_path.remove(self)
        if library.directory in sys.path:
            sys.path.remove(library.directory)
        for name in [n for n in sys.modules if n.partition(".")[0] == library.root]:
            del sys.modules[name]


_hook = _Hook()


def stand_in(name: str) -> None:
    """Serve a library from within the file on the search path that has its name."""
    library = library_named(name)
    alias = sys.modules.pop(library.root)
    _hook.start(library)
    _hook.exec_module(alias)

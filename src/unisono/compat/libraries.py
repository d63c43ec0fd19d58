"""The libraries whose import names can be served, and what to do about what is left out of them."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import PlatformError

__all__ = ["ALIASES", "LIBRARIES", "Library", "library_named"]

ALIASES = Path(__file__).with_name("aliases")
"""Holds for each library one directory that can stand on a search path."""


@dataclass(frozen=True)
class Library:
    """One library under its own import name."""

    name: str
    """Its name here, as `--compat` takes it."""
    instead: str
    """What to do when something is not offered."""
    beside: bool = False
    """Whether the library itself does the rest: it is to be kept, and ours imported beside it."""
    release: str = ""
    """Which releases of the library have these names, where that matters."""
    insists_on_cuda: bool = False
    """Whether its programs ask for CUDA first, and the CPU can be taken for it."""

    @property
    def root(self) -> str:
        """What programs import."""
        return self.name.removesuffix("_v2")

    @property
    def package(self) -> str:
        """The package of ours that answers."""
        return f"unisono.compat.{self.name}"

    @property
    def directory(self) -> str:
        """A directory for a search path, on which `import root` leads to the package."""
        return str(ALIASES / self.name)

    def installed_at(self) -> str | None:
        """Return where the library itself is installed, None if it is not."""
        elsewhere = [p for p in sys.path if not p.startswith(str(ALIASES))]
        spec = importlib.machinery.PathFinder.find_spec(self.root, elsewhere)
        if spec is None:
            return None
        # Python takes any directory of that name for a package; one without modules does not count.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        packages = (p for p in places if Path(p).is_file() or any(Path(p).glob("*/*.py")))
        return next(packages, None)


def _graph_parallel(path: str, *, other: str = "") -> str:
    package = path.partition(".")[0].removesuffix("_v2")
    return f"{other}for models and data keep {package} and import unisono.compat.{path} beside it"


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "ddpw",
            "all names of DDPW 6 and of its first releases are served; other tools: unisono.launch",
        ),
        Library("distdl", "layers and operators are in unisono.nn and unisono.operators"),
        Library(
            "fairchem",
            _graph_parallel(
                "fairchem.core.common.gp_utils",
                other="--compat fairchem_v2 serves the names of 2.x; ",
            ),
            beside=True,
            release="1.x",
        ),
        Library(
            "fairchem_v2",
            _graph_parallel(
                "fairchem_v2.core.common.gp_utils",
                other="--compat fairchem serves the names of 1.x; ",
            ),
            beside=True,
            release="2.x",
        ),
        Library(
            "heat",
            "for more of its arrays keep heat, import unisono.compat.heat as ht for the training, "
            "and pass x.larray",
            beside=True,
        ),
        Library("ocpmodels", _graph_parallel("ocpmodels.common.gp_utils"), beside=True),
        Library("pytagi", "everything that is offered is in unisono.bayes", insists_on_cuda=True),
    )
}
"""By name."""


def library_named(name: str) -> Library:
    """Return the library, or raise `PlatformError` with the choices."""
    if name not in LIBRARIES:
        raise PlatformError.because(
            f"serving {name!r}", "no such library among ours", hint=f"one of {', '.join(LIBRARIES)}"
        )
    return LIBRARIES[name]

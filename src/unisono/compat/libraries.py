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
    root: str
    """What programs import."""
    package: str
    """The package of ours that answers."""
    instead: str
    """What to do when something is not offered."""
    release: str = ""
    """Which releases of the library have these names, where that matters."""
    beside: bool = False
    """Whether the library itself does the rest: it is to be kept, and ours imported beside it."""

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
        # Python takes any directory of that name for a package; one without modules is none.
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        found = (p for p in places if Path(p).is_file() or any(Path(p).glob("*/*.py")))
        return next(found, None)


LIBRARIES = {
    library.name: library
    for library in (
        Library(
            "ddpw",
            "ddpw",
            "unisono.compat.ddpw",
            "all names of DDPW 6 and of its first releases are served; other tools: unisono.launch",
        ),
        Library(
            "distdl",
            "distdl",
            "unisono.compat.distdl",
            "layers and operators are in unisono.nn and unisono.operators",
        ),
        Library(
            "fairchem",
            "fairchem",
            "unisono.compat.fairchem",
            "--compat fairchem_v2 serves the names of 2.x; for models and data keep fairchem and "
            "import unisono.compat.fairchem.core.common.gp_utils beside it",
            release="1.x",
            beside=True,
        ),
        Library(
            "fairchem_v2",
            "fairchem",
            "unisono.compat.fairchem_v2",
            "--compat fairchem serves the names of 1.x; for models and data keep fairchem and "
            "import unisono.compat.fairchem_v2.core.common.gp_utils beside it",
            release="2.x",
            beside=True,
        ),
        Library(
            "heat",
            "heat",
            "unisono.compat.heat",
            "for arrays keep heat, import unisono.compat.heat as ht for the training, and pass "
            "x.larray",
            beside=True,
        ),
        Library(
            "ocpmodels",
            "ocpmodels",
            "unisono.compat.ocpmodels",
            "for models and data keep ocpmodels and import unisono.compat.ocpmodels.common.gp_utils"
            " beside it",
            beside=True,
        ),
        Library(
            "pytagi",
            "pytagi",
            "unisono.compat.pytagi",
            "everything that is offered is in unisono.bayes",
        ),
    )
}
"""By name."""


def library_named(name: str) -> Library:
    """Return the library, or raise `PlatformError` with the choices."""
    if name not in LIBRARIES:
        raise PlatformError.because(
            f"serving {name!r}",
            "no such library among ours",
            None,
            f"one of {', '.join(LIBRARIES)}",
        )
    return LIBRARIES[name]

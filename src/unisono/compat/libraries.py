"""The libraries whose import names can be served, and what to do about what is left out of them."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import PlatformError

__all__ = ["LIBRARIES", "Library", "library_named"]

_ALIASES = Path(__file__).with_name("aliases")
"""Holds for each library one directory that can stand on a search path."""
_GRAPH_PARALLEL = "for models and data keep {0} and import unisono.compat.{1} beside it"


@dataclass(frozen=True)
class Library:
    """One library under its own import name."""

    name: str
    """Its name here, as `--compat` takes it."""
    instead: str
    """What to do when something is not offered."""

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
        return str(_ALIASES / self.name)

    def installed_at(self) -> str | None:
        """Return where the library itself is installed, None if it is not."""
        elsewhere = [p for p in sys.path if not p.startswith(str(_ALIASES))]
        spec = importlib.machinery.PathFinder.find_spec(self.root, elsewhere)
        return None if spec is None else spec.origin


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
            "--compat fairchem_v2 serves the names of 2.x; "
            + _GRAPH_PARALLEL.format("fairchem", "fairchem.core.common.gp_utils"),
        ),
        Library(
            "fairchem_v2",
            "--compat fairchem serves the names of 1.x; "
            + _GRAPH_PARALLEL.format("fairchem", "fairchem_v2.core.common.gp_utils"),
        ),
        Library(
            "heat",
            "for more of its arrays keep heat, import unisono.compat.heat as ht for the training, "
            "and pass x.larray",
        ),
        Library("ocpmodels", _GRAPH_PARALLEL.format("ocpmodels", "ocpmodels.common.gp_utils")),
        Library("pytagi", "everything that is offered is in unisono.bayes"),
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

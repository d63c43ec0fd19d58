"""Other libraries' names for any launcher, and for editors.

`PYTHONPATH=$(python -m unisono.compat heat) torchrun script.py`: served by the search path.
`python -m unisono.compat --stubs typings heat`: editors and type checkers know the names.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from unisono.compat.libraries import LIBRARIES, library_named
from unisono.compat.modules import stubs
from unisono.errors import PlatformError


def main(arguments: list[str]) -> None:
    """Print the directories that serve libraries, as PYTHONPATH wants them; or write stubs."""
    parser = argparse.ArgumentParser("python -m unisono.compat", description=__doc__)
    parser.add_argument("name", nargs="+", help=", ".join(LIBRARIES))
    parser.add_argument("--stubs", type=Path, metavar="DIR", help="write .pyi files into DIR")
    given = parser.parse_args(arguments)
    try:
        libraries = [library_named(name) for name in given.name]
    except PlatformError as error:
        sys.exit(f"unisono: {error}")
    if given.stubs is None:
        print(os.pathsep.join(library.directory for library in libraries))
    else:
        for library in libraries:
            importlib.import_module(library.package)
            for path, text in stubs(library.package).items():
                # as it is served, and as it is imported from here
                for root in (library.root, library.package.replace(".", "/")):
                    file = given.stubs / root / path
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Other libraries' names for any launcher, by the search path.

`PYTHONPATH=$(python -m unisono.compat heat) torchrun script.py`
"""

from __future__ import annotations

import argparse
import os
import sys

from unisono.compat.libraries import LIBRARIES, library_named
from unisono.errors import PlatformError


def main(arguments: list[str]) -> None:
    """Print the directories that serve libraries, as PYTHONPATH wants them."""
    parser = argparse.ArgumentParser("python -m unisono.compat", description=__doc__)
    parser.add_argument("name", nargs="+", help=", ".join(LIBRARIES))
    try:
        libraries = [library_named(name) for name in parser.parse_args(arguments).name]
    except PlatformError as error:
        sys.exit(f"unisono: {error}")
    print(os.pathsep.join(library.directory for library in libraries))


if __name__ == "__main__":
    main(sys.argv[1:])

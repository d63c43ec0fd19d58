"""`PYTHONPATH=$(python -m unisono.compat heat) torchrun script.py`: served under any launcher."""

from __future__ import annotations

import os
import sys

from unisono.compat.libraries import LIBRARIES, library_named
from unisono.errors import PlatformError


def main(names: list[str]) -> None:
    """Print the directories that serve the libraries `names`, joined as PYTHONPATH wants them."""
    if not names:
        sys.exit(f"usage: python -m unisono.compat NAME ...  (NAME: {', '.join(LIBRARIES)})")
    try:
        print(os.pathsep.join(library_named(name).directory for name in names))
    except PlatformError as error:
        sys.exit(f"unisono: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""HeAT's `utils.vision_transforms`: `torchvision.transforms`, looked up when a name is used."""

from __future__ import annotations

import importlib
from typing import Any

from unisono.errors import MissingExtra


def __getattr__(name: str) -> Any:
    """Return a name of `torchvision.transforms`.

    Raises:
        MissingExtra: torchvision is not installed.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        transforms = importlib.import_module("torchvision.transforms")
    except ImportError as error:
        raise MissingExtra.because(
            f"vision_transforms.{name}", str(error), None, "pip install torchvision"
        ) from error
    return getattr(transforms, name)

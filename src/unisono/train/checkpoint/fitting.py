"""What fits what: objects that are to be restored, and what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.errors import CheckpointError
from unisono.train.checkpoint.folder import Saved
from unisono.train.checkpoint.parts import Part, parts_of
from unisono.train.checkpoint.reading import Reading

_SHOWN = 8
"""Lines of a list of differences."""


def parts_to_restore(saved: Saved, objects: Mapping[str, Any], partial: bool) -> dict[str, Part]:
    """Return the objects as parts, or say which names do not fit the checkpoint. Local."""
    parts, values = parts_of(objects)
    there = saved.manifest.parts
    asked = f"Checkpoint.restore({', '.join(f'{name}=' for name in objects)})"
    held = ", ".join(f"{n} ({kind})" for n, kind in there.items()) or "no object"
    found = f"step {saved.step} holds {held}"
    if values:
        name = next(iter(values))
        raise CheckpointError.because(
            asked,
            f"{name} is a plain value, {type(values[name]).__name__}",
            None,
            f"restored = checkpoint.restore(...); then restored[{name!r}]",
        )
    # Parts with a "~" are made by us, for objects that may be wrapped differently now.
    unknown = [name for name in parts if name not in there and "~" not in name]
    if unknown:
        raise CheckpointError.because(
            asked, found, f"nothing under {', '.join(unknown)}", "the names that save() was given"
        )
    left_out = [name for name in there if name not in parts and "~" not in name]
    if left_out and not partial:
        raise CheckpointError.because(
            asked,
            found,
            f"not asked for: {', '.join(left_out)}",
            f"restore(..., {left_out[0]}=...), or partial=True to leave them as they are",
        )
    return {name: part for name, part in parts.items() if name in there}


def check_fits(reading: Reading, parts: Mapping[str, Part]) -> None:
    """Raise if a part is not what was saved. Local."""
    for name, told in reading.problems(parts).items():
        rest = f"\nand {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
        raise CheckpointError.because(
            f"Checkpoint.restore({name}=...) into {parts[name].kind}: what was saved does not fit",
            "\n".join(told[:_SHOWN]) + rest,
            None,
            f"build {name} as it was when it was saved",
        )

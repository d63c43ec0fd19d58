"""The directory of a recorded run: which file is what, and how a free name is found.

`runs/<name>/` holds what each rank wrote (`rank-0.jsonl`, `rank-0.json`, `rank-0.log`) and what is
made of it: `metrics.csv`, `trace.json`, `report.html`. No torch here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError

PARENT = "runs"
"""Where runs are kept, below the working directory."""
CONFIG = "config.json"
METRICS = "metrics.csv"
TRACE = "trace.json"
REPORT = "report.html"
TENSORBOARD = "tensorboard"


def make_run_directory(name: str, parent: str | Path = PARENT) -> Path:
    """Make the directory of a new run and return it; `name-2`, ... where `name` is taken.

    A `name` with a slash in it is a path of its own. What another run wrote is never touched.
    """
    plain = "".join(c if c.isalnum() or c in "._-/" else "_" for c in name).strip("/.")
    if not plain:
        raise PlatformError.because(
            f"a run named {name!r}", "no letter or digit in it", hint='record("digits")'
        )
    first = Path(name) if "/" in name else Path(parent, plain)
    for number in range(1, 100_000):
        path = (first if number == 1 else first.with_name(f"{first.name}-{number}")).absolute()
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):
                return path
        except OSError as error:
            raise PlatformError.because(
                f"a run named {name!r}",
                f"{path} cannot be made: {error.strerror}",
                hint="a working directory that you may write to",
            ) from error
        else:
            return path
    raise PlatformError.because(f"a run named {name!r}", f"no free name beside {first}")


def log_path(directory: Path, rank: int) -> Path:
    """Return where the output of a rank is kept."""
    return directory / f"rank-{rank}.log"


def lines_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes what it logs, one JSON object a line."""
    return directory / f"rank-{rank}.jsonl"


def part_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes what it is, and at the end what it has measured."""
    return directory / f"rank-{rank}.json"


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have left something in the directory of a run."""
    found = {
        int(path.stem.removeprefix("rank-"))
        for path in directory.glob("rank-*")
        if path.stem.removeprefix("rank-").isdigit()
    }
    return sorted(found)


def write_json(path: Path, value: Any) -> None:
    """Replace a file by a value, as `write_private` does."""
    write_private(path, json.dumps(value))


def write_private(path: Path, text: str) -> None:
    """Replace a file at one stroke, so that a reader finds the old text or the new one.

    Only its owner can read it, whatever the umask: command lines and tracebacks may hold secrets.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; nothing if it is not there or not whole."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def check_run(directory: Path, asked: str) -> None:
    """Raise `PlatformError` unless `directory` is one of a run."""
    if not (directory / CONFIG).is_file():
        near = sorted(p.parent for p in Path(PARENT).glob(f"*/{CONFIG}"))
        raise PlatformError.because(
            asked,
            f"no {CONFIG} in {directory}",
            hint=f"runs here: {', '.join(map(str, near[-8:]))}"
            if near
            else "unisono run --record NAME script.py writes one",
        )

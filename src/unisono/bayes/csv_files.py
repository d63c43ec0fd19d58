"""Nets as text files of one number a line, in walk order.

Four files are pytagi's; running values of batch norms are two more, which it does not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.bayes.writing import write_whole
from unisono.errors import PartitionError, explain

if TYPE_CHECKING:
    from unisono.bayes.sequential_state import StoredState

Columns = dict[str, tuple[Any, ...]]
"""Lists of numbers for each file, by layer."""
ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")
RUNNING = ("_5_mra.csv", "_6_Sra.csv")


def save(net: StoredState, prefix: str | Path) -> None:
    """Write the four files, and two more if there are batch norms."""
    _write(prefix, ENDINGS, net.state_dict())
    if norms := _running(net):
        _write(prefix, RUNNING, norms)


def load(net: StoredState, prefix: str | Path) -> None:
    """Read the files; nothing is written to the net before all of them fit."""
    state, norms = _read(net, prefix, ENDINGS, net.state_dict()), _running(net)
    if norms and all(Path(f"{prefix}{ending}").exists() for ending in RUNNING):
        state |= _read(net, prefix, RUNNING, norms)
    elif norms:
        warnings.warn(
            explain(
                f"load_csv({str(prefix)!r})",
                f"no {prefix}{RUNNING[0]}: the {len(norms)} batch norms keep their running values",
                None,
                "net.save_csv writes them too; or a training batch before net.eval()",
            ),
            stacklevel=3,
        )
    net.load_state_dict(state)


def _running(net: StoredState) -> Columns:
    """Return running mean and variance of each batch norm."""
    state = net.state_dict(running=True)
    return {key: values[:2] for key, values in state.items() if key.endswith(".running")}


def _write(prefix: str | Path, endings: tuple[str, ...], columns: Columns) -> None:
    for kind, ending in enumerate(endings):
        text = "".join(f"{value!r}\n" for values in columns.values() for value in values[kind])
        write_whole(f"{prefix}{ending}", lambda path, text=text: path.write_text(text))


def _read(net: StoredState, prefix: str | Path, endings: tuple[str, ...], now: Columns) -> Columns:
    """Return what the files hold, cut as the columns of `now`."""
    found: list[list[list[float]]] = []
    for kind, ending in enumerate(endings):
        values = [_number(word, f"{prefix}{ending}", n) for n, word in _words(f"{prefix}{ending}")]
        sizes = [len(values_of[kind]) for values_of in now.values()]
        if len(values) != sum(sizes):
            raise PartitionError.because(
                f"load_csv: {prefix}{ending}",
                f"{len(values)} numbers for layers {' '.join(net._infos())}",
                f"{len(values)} != {' + '.join(map(str, sizes))} = {sum(sizes)}",
                "files of a net with the same layers",
            )
        found.append(_cut(values, sizes))
    return dict(zip(now, zip(*found, strict=True), strict=True))


def _words(path: str) -> Iterator[tuple[int, str]]:
    """Yield what stands in a file, with the numbers of the lines."""
    for n, line in enumerate(Path(path).read_text().splitlines(), 1):
        for word in line.split():
            yield n, word


def _number(word: str, path: str, line: int) -> float:
    try:
        return float(word)
    except ValueError:
        raise PartitionError.because(
            f"load_csv: {path}",
            f"{word!r} in line {line}",
            None,
            "one number a line, as net.save_csv writes them; no header",
        ) from None


def _cut(values: list[float], sizes: list[int]) -> list[list[float]]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]

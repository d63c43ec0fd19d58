"""Nets as four text files of one number a line, in walk order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.bayes.writing import write_whole
from unisono.errors import PartitionError

if TYPE_CHECKING:
    from unisono.bayes.sequential_state import StoredState

ENDINGS = ("_1_mw.csv", "_2_Sw.csv", "_3_mb.csv", "_4_Sb.csv")


def save(net: StoredState, prefix: str | Path) -> None:
    """Write the four files."""
    rows = list(zip(*net.parameters(), strict=True)) or [()] * 4
    for ending, columns in zip(ENDINGS, rows, strict=True):
        text = "".join(f"{value!r}\n" for column in columns for value in column)
        write_whole(f"{prefix}{ending}", lambda path, text=text: path.write_text(text))


def load(net: StoredState, prefix: str | Path) -> None:
    """Read the four files."""
    now = net.state_dict()
    columns: list[list[list[float]]] = []
    for kind, ending in enumerate(ENDINGS):
        values = [float(line) for line in Path(f"{prefix}{ending}").read_text().split()]
        sizes = [len(values_of[kind]) for values_of in now.values()]
        if len(values) != sum(sizes):
            raise PartitionError.because(
                f"load_csv: {prefix}{ending}",
                f"{len(values)} numbers for layers {' '.join(net._infos())}",
                f"{len(values)} != {' + '.join(map(str, sizes))} = {sum(sizes)}",
                "files of a net with the same layers",
            )
        columns.append(_cut(values, sizes))
    net.load_state_dict(dict(zip(now, zip(*columns, strict=True), strict=True)))


def _cut(values: list[float], sizes: list[int]) -> list[list[float]]:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return [values[start : start + size] for start, size in zip(starts, sizes, strict=True)]

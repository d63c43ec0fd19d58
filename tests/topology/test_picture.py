"""Partitions as images: what can be read in them, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from unisono.errors import MissingExtra, PartitionError
from unisono.topology import draw

pytest.importorskip("matplotlib")
GRID = SimpleNamespace(shape=(1, 1, 2, 2), ranks=(4, 5, 6, 7))


def words_of(path):
    """Return the texts of an SVG."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_an_svg_tells_ranks_blocks_halos_and_bytes(tmp_path):
    path = tmp_path / "grid.svg"
    text = draw(GRID, (1, 3, 9, 8), {"kernel_size": (3, 3), "padding": 1}, file=path)
    assert text == draw(GRID, (1, 3, 9, 8), {"kernel_size": (3, 3), "padding": 1})
    words = words_of(path)
    assert {"rank 4", "rank 5", "rank 6", "rank 7", "dim 2", "dim 3"} <= set(words)
    assert words.count("1 \u00d7 3 \u00d7 5 \u00d7 4") == 2
    assert "halo \u2195 0/1  \u2194 1/0" in words
    assert "sends 120 B" in words
    assert "\u21c4 120 B" in words  # 60 bytes each way between ranks 4 and 5
    assert "96 B" in words
    assert any(word.startswith("12 messages, 456 B in all") for word in words)
    assert (
        "Partition 1 \u00d7 1 \u00d7 2 \u00d7 2 of a tensor 1 \u00d7 3 \u00d7 9 \u00d7 8" in words
    )


def test_an_svg_shows_beyond_each_end_whose_points_wrap_around(tmp_path):
    path = tmp_path / "grid.svg"
    circular = {"kernel_size": (3, 3), "padding": 1, "padding_mode": "circular"}
    draw(GRID, (1, 3, 9, 8), circular, file=path)
    words = words_of(path)
    across = {"rank 4: 60 B", "rank 5: 60 B", "rank 6: 48 B", "rank 7: 48 B"}
    assert across | {"rank 4: 48 B", "rank 5: 48 B"} <= set(words)
    assert words.count("rank 6: 48 B") == 2  # above rank 4, and right of rank 7
    assert words.count("\u21c4 120 B") == 1  # what wraps is not counted at the inner seam
    assert any(word.endswith("coloured rims: points of the other end") for word in words)
    # One rank alone wraps onto itself; windows wholly in the padding do not write twice.
    draw(
        SimpleNamespace(shape=(1,), ranks=(3,)), (5,), {**circular, "kernel_size": (3,)}, file=path
    )
    assert words_of(path).count("rank 3") == 3
    wide = {"kernel_size": (1,), "padding": 3, "padding_mode": "circular"}
    draw(SimpleNamespace(shape=(4,), ranks=(0, 1, 2, 3)), (5,), wide, file=path)
    assert {"ranks 1, 2, 3: 12 B", "ranks 0, 1: 8 B"} <= set(words_of(path))
    assert sum(": " in word and word.startswith("rank") for word in words_of(path)) == 2


def test_a_png_of_three_split_dims_has_one_grid_for_each_outer_index(tmp_path):
    from matplotlib.image import imread

    grid = SimpleNamespace(shape=(2, 2, 3), ranks=tuple(range(12)))
    draw(grid, (4, 64, 60), [(1, 1), (2, 2)], file=str(tmp_path / "grid.png"))
    height, width = imread(tmp_path / "grid.png").shape[:2]
    assert width > 2 * height
    draw(grid, (4, 64, 60), file=tmp_path / "grid.svg")
    words = words_of(tmp_path / "grid.svg")
    assert {"dim 0 = 0", "dim 0 = 1", "rank 11"} <= set(words)
    assert not any("halo" in word or "messages" in word for word in words)


@pytest.mark.parametrize("shape", [(3,), (1,), (1, 4, 1), (1, 1), (6, 1)])
def test_any_grid_can_be_drawn_with_and_without_a_tensor(shape, tmp_path):
    count = max(shape)
    grid = SimpleNamespace(shape=shape, ranks=tuple(range(count)))
    path = tmp_path / "grid.svg"
    draw(grid, file=path)
    assert f"rank {count - 1}" in words_of(path)
    small = tuple(2 if n == count else 1 for n in shape)  # fewer points than ranks
    draw(grid, small, [(1, 1)], file=path)
    assert sum(word.startswith("rank ") for word in words_of(path)) == count


def test_names_that_are_no_images_are_refused(tmp_path):
    with pytest.raises(PartitionError, match=r"\.png, \.svg, \.pdf[\s\S]*HINT: file='grid.png'"):
        draw(GRID, file=tmp_path / "grid.txt")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r'pip install "unisono\[plot\]"'):
        draw(GRID, file=tmp_path / "grid.png")
    assert "rank 4" in draw(GRID)


def test_text_alone_loads_no_matplotlib():
    code = (
        "import sys; from types import SimpleNamespace as N; from unisono.topology import draw;"
        "draw(N(shape=(2,), ranks=(0, 1)), (4,)); print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""Pictures of partitions, as text and as images: what a user reads in them must be true."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from unisono.errors import MissingExtra, PartitionError
from unisono.topology import draw

GRID = SimpleNamespace(shape=(1, 1, 2, 2), ranks=(4, 5, 6, 7))


def test_picture_shows_ranks_blocks_halos_and_bytes() -> None:
    picture = draw(GRID, (1, 3, 9, 8), {"kernel_size": (3, 3), "padding": 1})
    assert picture.splitlines() == [
        "partition 1 x 1 x 2 x 2 of a tensor 1 x 3 x 9 x 8",
        "+-----------------+-----------------+",
        "|      rank 4     |      rank 5     |",
        "|   (0, 0, 0, 0)  |   (0, 0, 0, 1)  |",
        "|  1 x 3 x 5 x 4  |  1 x 3 x 5 x 4  |",
        "| halo dim 2: 0/1 | halo dim 2: 0/1 |",
        "| halo dim 3: 0/1 | halo dim 3: 1/0 |",
        "+-----------------+-----------------+",
        "|      rank 6     |      rank 7     |",
        "|   (0, 0, 1, 0)  |   (0, 0, 1, 1)  |",
        "|  1 x 3 x 4 x 4  |  1 x 3 x 4 x 4  |",
        "| halo dim 2: 1/0 | halo dim 2: 1/0 |",
        "| halo dim 3: 0/1 | halo dim 3: 1/0 |",
        "+-----------------+-----------------+",
        "rank 4 sends 60 bytes to 5, 48 bytes to 6, 12 bytes to 7",
        "rank 5 sends 60 bytes to 4, 12 bytes to 6, 48 bytes to 7",
        "rank 6 sends 48 bytes to 4, 12 bytes to 5, 48 bytes to 7",
        "rank 7 sends 12 bytes to 4, 48 bytes to 5, 48 bytes to 6",
    ]


def test_picture_tells_what_a_circular_padding_takes_from_the_other_end() -> None:
    circular = {"kernel_size": (5,), "padding": 2, "padding_mode": "circular"}
    picture = draw(SimpleNamespace(shape=(3,), ranks=(5, 6, 7)), (9,), circular)
    assert picture.splitlines()[5:] == [
        "| halo dim 0: 0/2  | halo dim 0: 2/2  | halo dim 0: 2/0  |",
        "| wraps dim 0: 2/0 | wraps dim 0: 0/0 | wraps dim 0: 0/2 |",
        "+------------------+------------------+------------------+",
        "rank 5 sends 8 bytes to 6, 8 bytes to 7 (wraps)",
        "rank 6 sends 8 bytes to 5, 8 bytes to 7",
        "rank 7 sends 8 bytes to 5 (wraps), 8 bytes to 6",
    ]
    # On two ranks the same neighbour is met inside and round the ends.
    circular = {"kernel_size": (3, 3), "padding": 1, "padding_mode": "circular"}
    both = draw(GRID, (1, 3, 9, 8), circular)
    assert "rank 4 sends 120 bytes to 5 (60 of them wrap)" in both
    assert "wrap" not in draw(GRID, (1, 3, 9, 8), {"kernel_size": (3, 3), "padding": 1})


def test_bytes_follow_the_element_size() -> None:
    once = draw(GRID, (1, 1, 4, 4), [(1, 1), (0, 0)], itemsize=1)
    assert "rank 4 sends 2 bytes to 6" in once
    assert "rank 4 sends 16 bytes to 6" in draw(GRID, (1, 1, 4, 4), [(1, 1), (0, 0)], itemsize=8)


def test_picture_without_a_tensor_shows_the_grid_alone() -> None:
    picture = draw(SimpleNamespace(shape=(3,), ranks=(0, 1, 2)))
    assert picture.count("rank") == 3
    assert "halo" not in picture
    assert "x" not in picture


def test_one_split_dim_runs_down_unless_it_is_the_last() -> None:
    down = draw(SimpleNamespace(shape=(1, 2, 1), ranks=(0, 1)))
    across = draw(SimpleNamespace(shape=(1, 1, 2), ranks=(0, 1)))
    assert not any("rank 0" in line and "rank 1" in line for line in down.splitlines())
    assert any("rank 0" in line and "rank 1" in line for line in across.splitlines())


def test_three_split_dims_make_one_grid_for_each_outer_index() -> None:
    picture = draw(SimpleNamespace(shape=(2, 2, 3), ranks=tuple(range(12))))
    assert "dim 0 = 0" in picture
    assert "dim 0 = 1" in picture
    assert picture.index("rank 5") < picture.index("dim 0 = 1") < picture.index("rank 6")


def test_a_kernel_without_halo_sends_no_messages() -> None:
    assert draw(GRID, (1, 1, 4, 4), {"kernel_size": (2, 2), "stride": 2}).endswith("no messages")


def test_halo_without_sizes_is_refused() -> None:
    with pytest.raises(PartitionError, match="global_shape"):
        draw(GRID, halo=[(1, 1)])
    with pytest.raises(PartitionError, match="2 dims != 4 dims"):
        draw(GRID, (4, 4))


images = pytest.mark.skipif(find_spec("matplotlib") is None, reason="images need matplotlib")


def words_of(path):
    """Return the texts of an SVG; images need matplotlib."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@images
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


@images
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
    assert {"ranks 1-3: 12 B", "ranks 0-1: 8 B"} <= set(words_of(path))
    assert sum(": " in word and word.startswith("rank") for word in words_of(path)) == 2


@images
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


@images
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

"""Pictures of partitions as text: what a user reads in them must be true."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unisono.errors import PartitionError
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


def test_picture_without_a_tensor_shows_the_grid_alone() -> None:
    picture = draw(SimpleNamespace(shape=(3,), ranks=(0, 1, 2)))
    assert picture.count("rank") == 3
    assert "halo" not in picture
    assert "x" not in picture


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

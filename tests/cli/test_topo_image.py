"""`unisono topo --image`: the picture as a file."""

from __future__ import annotations

import pytest

from unisono.cli import main


def test_topo_writes_its_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "grid.svg"
    words = ["--mesh", "2x2", "--shape", "8x6", "--kernel", "3x3", "--image", str(path)]
    assert main(["topo", *words]) == 0
    shown = capsys.readouterr().out
    assert "rank 3" in shown
    assert shown.endswith(f"written to {path}\n")
    assert ">rank 3</text>" in path.read_text()


@pytest.mark.parametrize("words", [["--image", "a.png"], ["--mesh", "2", "--image", "a.gif"]])
def test_topo_refuses_images_it_cannot_draw(words, capsys):
    assert main(["topo", *words]) != 0
    assert "HINT" in capsys.readouterr().err

"""Every example runs as a user would run it, is short, and ends well."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
SHORTER = {
    "digits_data_parallel": ["--epochs", "3"],
    "dp_transformer_amp_clip": ["--epochs", "2"],
    "elastic_digits": ["--epochs", "3", "--seconds", "0.5"],
    "forces_graph_parallel": ["--steps", "30", "--atoms", "300"],
    "heat_mnist": ["--epochs", "2"],
    "mace_split": ["--cubes", "2", "--steps", "6"],
    "morse_potential": ["--atoms", "150"],
    "potential_gp": ["--steps", "40", "--check-serial"],
    "spatial_cnn": ["--epochs", "2"],
}
"""What an example claims of its ranks, and checks itself, it shows in a shorter training too."""
UNLOADED = ("bayes_ddp", "checkpoint_resume", "composed", "launch_hello", "mpi_style")
"""Those that have a world in their own process, and a plain one, end to the last destructor."""


ELSEWHERE = ("digits_compared", "trainers")
"""The first is `unisono demo`, which has a test of its own."""


@pytest.mark.parametrize(
    "example", [p for p in EXAMPLES if p.stem not in ELSEWHERE], ids=lambda path: path.stem
)
def test_an_example_runs(example, interpreter, tmp_path):
    if example.stem == "mace_split" and find_spec("mace") is None:
        pytest.skip('no MACE here: pip install "unisono[potentials]"')
    words = [str(example), "--ranks", "2", *SHORTER.get(example.stem, [])]
    unload = example.stem in UNLOADED
    done = interpreter.run(words, cwd=tmp_path, timeout_s=110.0, unload=unload)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), "an example shows something"
    assert list(tmp_path.glob("unisono-*")) == []


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_a_trainer_of_another_library_gives_the_weights_of_one_rank(trainer, interpreter, tmp_path):
    pytest.importorskip(trainer, reason=f"{trainer} is not installed")
    example = next(path for path in EXAMPLES if path.stem == "trainers")
    words = [str(example), "--trainer", trainer]
    done = interpreter.run(words, cwd=tmp_path, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "differ by" in done.stdout


@pytest.mark.parametrize("name", ["checkpoint_resume", "composed", "save_on_two_load_on_one"])
def test_an_example_that_shares_files_or_a_mesh_can_be_recorded(name, interpreter, tmp_path):
    example = next(path for path in EXAMPLES if path.stem == name)
    words = ["-m", "unisono", "run", "--record", "--ranks", "2", str(example)]
    done = interpreter.run(words, cwd=tmp_path, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / name / "report.html").exists()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example):
    assert len(example.read_text().splitlines()) < 120


def test_there_are_examples():
    assert EXAMPLES

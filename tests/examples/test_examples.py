"""Every example runs as a user would run it, and ends well."""

from __future__ import annotations

import difflib
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
SHORTER = {
    "elastic_digits": ["--epochs", "3", "--seconds", "0.5"],
    "forces_graph_parallel": ["--steps", "30", "--atoms", "300"],
    "heat_mnist": ["--epochs", "2"],
    "mace_split": ["--cubes", "2", "--steps", "6"],
    "morse_potential": ["--atoms", "150"],
}
"""What an example claims of its ranks, and checks itself, it shows in a shorter training too."""
UNLOADED = ("bayes_ddp", "checkpoint_resume", "composed", "launch_hello", "mpi_style")
"""Those that have a world in their own process, and a plain one, end to the last destructor."""


ELSEWHERE = ("digits_compared", "trainers", "your_script")
"""The first is `unisono demo`; each of them has tests of its own."""


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


def your_script(interpreter, folder, *words: str) -> list[float]:
    """Run the script; return epoch, loss and accuracy of every epoch that its tracker has."""
    example = next(path for path in EXAMPLES if path.stem == "your_script")
    command = [str(example), "--folder", str(folder), *words]
    done = interpreter.run(command, cwd=folder.parent, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = (folder / "history.csv").read_text().splitlines()
    return [float(number) for row in rows for number in row.split(",")]


@pytest.fixture(scope="module")
def losses_of_one_rank(interpreter, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    return your_script(interpreter, folder, "--ranks", "1", "--epochs", "2", "--full-precision")


@pytest.mark.parametrize(
    ("ranks", "words", "tolerance"),
    [
        ("4", ["--full-precision"], 1e-4),
        ("2", ["--full-precision", "--compile", "aot_eager"], 1e-4),
        ("2", [], 0.05),
    ],
    ids=["four ranks", "two ranks, compiled", "two ranks, mixed precision"],
)
def test_an_ordinary_script_has_the_losses_of_one_rank(
    ranks, words, tolerance, losses_of_one_rank, interpreter, tmp_path
):
    assert losses_of_one_rank[4] < 0.6 * losses_of_one_rank[1], "it learns"
    losses = your_script(interpreter, tmp_path / "run", "--ranks", ranks, "--epochs", "2", *words)
    assert losses == pytest.approx(losses_of_one_rank, rel=tolerance)


def test_an_ordinary_script_resumes_on_another_number_of_ranks(
    losses_of_one_rank, interpreter, tmp_path
):
    words = ("--epochs", "2", "--full-precision")
    your_script(interpreter, tmp_path / "run", "--ranks", "2", "--stop-after", "1", *words)
    losses = your_script(interpreter, tmp_path / "run", "--ranks", "4", *words)
    assert losses == pytest.approx(losses_of_one_rank, rel=1e-4)


def test_the_page_of_the_script_shows_every_line_that_differs():
    page = (EXAMPLES[0].parents[1] / "docs" / "your_script.md").read_text()
    plain = page.partition('title="train.py"\n')[2].partition("\n```")[0]
    shown = page.partition("```diff\n")[2].partition("\n```")[0]
    example = next(path for path in EXAMPLES if path.stem == "your_script").read_text()
    lines = difflib.unified_diff(
        plain.splitlines(), example.splitlines(), "train.py", "your_script.py", n=1, lineterm=""
    )
    assert shown == "\n".join(lines)


@pytest.mark.parametrize("name", ["checkpoint_resume", "composed"])
def test_an_example_that_shares_files_or_a_mesh_can_be_recorded(name, interpreter, tmp_path):
    example = next(path for path in EXAMPLES if path.stem == name)
    words = ["-m", "unisono", "run", "--record", "--ranks", "2", str(example)]
    done = interpreter.run(words, cwd=tmp_path, timeout_s=110.0)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "runs" / name / "report.html").exists()


def test_there_are_examples():
    assert len(EXAMPLES) == 20

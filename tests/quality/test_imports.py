"""What must not be imported: start-up time is a promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unisono

HEAVY = ("torch", "numpy", "cloudpickle", "sklearn", "tqdm")


def imported_by(code: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has loaded after `code`."""
    report = "import sys; print('MODULES', *sorted({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES ")[2].split())


def test_importing_unisono_loads_nothing_heavy():
    assert not imported_by("import unisono, unisono.errors") & set(HEAVY)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"], ["nonsense"]])
def test_help_and_argument_errors_load_nothing_heavy(words):
    code = (
        "from unisono.cli import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit as leaving:\n"
        f"    assert leaving.code == {2 if words == ['nonsense'] else 0}, leaving.code\n"
        "else:\n"
        "    raise AssertionError('argparse did not leave')\n"
    )
    assert not imported_by(code) & set(HEAVY)


def test_the_probe_itself_sees_a_heavy_import():
    assert "numpy" in imported_by("import numpy")


@pytest.mark.parametrize("name", unisono.__all__)
def test_a_public_name_is_there(name):
    assert getattr(unisono, name) is not None

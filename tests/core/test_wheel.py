"""What is installed: with the compiled core, without a compiler, and with the core switched off."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import unisono
from unisono.cli import doctor


def step():
    import torch
    import torch.distributed as dist
    import unisono as inside

    x = torch.ones(1000)
    inside.comm.world().all_reduce_(x)
    return dist.get_backend(), inside.__file__, x.sum().item()


if __name__ == "__main__":
    check = doctor.check_core()
    ranks = list(unisono.run(step, ranks=2))
    print(json.dumps({"check": [check.status, check.found, check.fix], "ranks": ranks}))
"""


def build(folder, **env):
    """Build a wheel of a copy of this checkout."""
    copy = folder / "checkout"
    copy.mkdir()
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "build")
    for name in ("src", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run = subprocess.run(  # as pip does, which takes seconds to come to it
        [sys.executable, "-c", code],
        cwd=copy,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def quick_compilers(folder):
    """Return compilers that do not optimize: what is in the wheel is the question here."""
    found = {}
    for name, usual in (("CC", "gcc"), ("CXX", "g++")):
        found[name] = folder / name
        found[name].write_text(f'#!/bin/sh\nexec {os.environ.get(name, usual)} "$@" -O0\n')
        found[name].chmod(0o755)
    return {name: str(path) for name, path in found.items()}


def run_program(folder, python=sys.executable, **env):
    (folder / "program.py").write_text(PROGRAM)
    run = subprocess.run(
        [python, "-W", "ignore", "program.py"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def assert_whole(names):
    assert "unisono/py.typed" in names
    for part in ("unisono/train/recording/assets/", "unisono/_benchmarks/", "unisono/_examples/"):
        assert any(name.startswith(part) for name in names), part


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_compiler_the_wheel_builds_and_ranks_use_gloo(tmp_path):
    wheel = build(tmp_path, CXX="/bin/false", CC="/bin/false")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert_whole(names)
    assert not [name for name in names if "_core" in name]
    found = run_program(tmp_path, PYTHONPATH=str(site))
    for backend, file, total in found["ranks"]:
        assert (backend, total) == ("gloo", 2000.0)
        assert Path(file).is_relative_to(site)
    status, text, fix = found["check"]
    assert status == "warn"
    assert "gloo" in text
    assert "apt install g++" in fix


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_wheel_is_one_for_every_python_and_brings_the_core(tmp_path):
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no compiler")
    wheel = build(tmp_path, **quick_compilers(tmp_path))
    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        core = archive.read("unisono/_core.abi3.so")
    assert_whole(names)
    assert b"all_reduce" in core
    assert b"fault_after" not in core, "what makes calls fail is for tests only"
    assert not [name for name in names if name.startswith(("core/", "tests/"))]


def test_the_core_can_be_switched_off(forked_python, tmp_path):
    found = run_program(tmp_path, UNISONO_CORE="0")
    assert [(backend, total) for backend, _, total in found["ranks"]] == [("gloo", 2000.0)] * 2
    assert found["check"][0] == "warn"
    assert "UNISONO_CORE=0" in found["check"][1]
    assert found["check"][2] == "unset UNISONO_CORE"
    with_core = run_program(tmp_path, forked_python, UNISONO_CORE="")
    assert [backend for backend, _, _ in with_core["ranks"]] == ["shm"] * 2
    assert with_core["check"][0] == "ok"

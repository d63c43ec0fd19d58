"""The device is built once, by one process, with the compiler that is there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.accelerator import build


@pytest.fixture
def compiler_log(tmp_path, monkeypatch):
    """A compiler that takes its time and notes what it makes."""
    log = tmp_path / "log"
    log.touch()
    program = tmp_path / "compiler"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "${VERSION:-1}"\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'sleep 0.05; touch "$2"; echo "$2" >> "{log}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setenv("SIMDEV_CACHE", str(tmp_path / "cache"))
    return log


def test_two_that_need_it_at_once_build_it_once(compiler_log):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build.ensure(), range(2))
    assert first == second
    assert (first / "simdev" / "__init__.py").exists()
    assert len(compiler_log.read_text().split()) == len(build.UNITS) + 1


def test_another_compiler_builds_it_anew(compiler_log, monkeypatch):
    first = build.ensure()
    monkeypatch.setenv("VERSION", "2")
    assert build.ensure() != first
    assert len(compiler_log.read_text().split()) == 2 * (len(build.UNITS) + 1)


def test_a_compiler_that_fails_is_quoted_and_leaves_no_build(compiler_log, monkeypatch, tmp_path):
    program = tmp_path / "compiler"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho "no such flag" >&2; exit 1\n')
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such flag"):
            build.ensure()


def test_without_a_compiler_there_is_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.compiler() is None
    with pytest.raises(FileNotFoundError, match="CXX"):
        build.ensure()

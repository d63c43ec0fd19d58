"""The console: what it shows of ranks that print at the same time, and which rank reads it."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pty
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import unisono
from unisono.errors import PlatformError, RankFailed
from unisono.launch.logs import STDIN_VARIABLE, Console, stdin_rank

QUIET = unisono.Logs(console="none")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(pieces, *, ranks=2, show=None, file=None, prefix=True):
    """Feed `(rank, bytes)` pieces to one console and return what it wrote."""
    file = io.StringIO() if file is None else file
    console = Console(
        range(ranks) if show is None else show, prefix=prefix, stdout=file, stderr=file
    )
    streams = [console.stream(rank, 0) for rank in range(ranks)]
    for rank, data in pieces:
        streams[rank].feed(data)
    for stream in streams:
        stream.close()
    return file.getvalue()


def test_hidden_ranks_are_hidden_and_the_prefix_can_be_left_out():
    pieces = [(0, b"a\n"), (1, b"b\n")]
    assert shown(pieces, show=[1]) == "[1] b\n"
    assert shown(pieces, show=[0], prefix=False) == "a\n"


def test_a_progress_bar_in_a_file_is_its_last_state_only():
    pieces = [(0, b"\r 10%"), (1, b"\r 20%"), (0, b"\r 50%"), (0, b"\r100%\n")]
    assert shown(pieces) == "[0] 100%\n[1]  20%\n"


def test_a_progress_bar_of_rank_0_moves_on_a_terminal_and_comes_back_below_other_lines():
    text = shown([(0, b"\r10%"), (1, b"\r99%"), (1, b"\rline\n"), (0, b"\r20%\n")], file=Terminal())
    clear = "\r\x1b[K"
    assert text == f"{clear}[0] 10%{clear}[1] line\n{clear}[0] 10%{clear}[0] 20%\n"


@given(st.text(st.characters(exclude_characters="\r", codec="utf-8")), st.data())
def test_any_cut_of_the_bytes_gives_the_same_lines(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    edges = [0, *cuts, len(raw)]
    pieces = [(0, raw[a:b]) for a, b in itertools.pairwise(edges)]
    lines = text.split("\n")
    expected = [f"[0] {line}\n" for line in (lines if lines[-1] else lines[:-1])]
    assert shown(pieces) == "".join(expected)


class BelowCell(Terminal):
    """What ipykernel puts in the place of a stream."""

    __module__ = "ipykernel.iostream"

    def isatty(self):
        return False


def test_a_progress_bar_of_rank_0_moves_below_the_cell_of_a_notebook():
    file = BelowCell()
    console = Console({0, 1}, prefix=True, stdout=file, stderr=file)
    bar, other = console.stream(0, 1), console.stream(1, 0)
    bar.feed(b"\r 10%")
    assert file.getvalue() == "\r[0]  10%"
    other.feed(b"hello\n")
    bar.feed(b"\r  9%\r 20%")
    bar.feed(b"\n")
    assert "\x1b" not in file.getvalue()
    shown: list[str] = []  # as a notebook does: a carriage return goes back, and writes over
    for line in file.getvalue().split("\n"):
        screen = ""
        for part in line.split("\r"):
            screen = part + screen[len(part) :]
        shown.append(screen.rstrip())
    assert shown == ["[1] hello", "[0]  20%", ""]


def test_one_rank_may_read_the_standard_input(forked_python, tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import unisono\n"
        "def ask():\n"
        "    rank = unisono.world().rank\n"
        "    return input('your name? ') if rank == 1 else __import__('sys').stdin.read()\n"
        "platform = unisono.Platform(device='cpu', ranks=2, spawn_method='spawn')\n"
        "print(list(unisono.run(ask, on=platform)))\n"
    )
    env = {**os.environ, STDIN_VARIABLE: "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [forked_python, script], env=env, input="Ada\n", capture_output=True, text=True, timeout=90
    )
    assert done.stdout.endswith("['', 'Ada']\n"), done.stdout + done.stderr
    assert "your name? " in done.stdout


def test_a_debugger_works_in_the_forked_rank_at_the_terminal_and_others_read_nothing(tmp_path):
    script = tmp_path / "debug.py"
    script.write_text(
        "import sys\n"
        "import unisono\n"
        "def look():\n"
        "    if unisono.world().rank == 0:\n"
        "        breakpoint()\n"  # not at the terminal: passed over
        "        return sys.stdin.read()\n"
        "    secret = 6 * 7\n"
        "    breakpoint()\n"
        "    return secret\n"
        "print('RESULTS', list(unisono.run(look, on='cpu', ranks=2)))\n"
    )
    ours, theirs = pty.openpty()
    env = {**os.environ, STDIN_VARIABLE: "1", "TMPDIR": str(tmp_path), "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, script],
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(theirs)
    try:
        seen = read_until(ours, b"(Pdb) ")
        os.write(ours, b"p secret + 1\n")
        assert b"43" in read_until(ours, b"(Pdb) ", seen)
        os.write(ours, b"c\n")
        assert b"RESULTS ['', 42]" in read_until(ours, b"42]")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(fd, words, start=b"", seconds=60.0):
    import select

    end, seen = time.monotonic() + seconds, b""
    while words not in seen:
        assert time.monotonic() < end, start + seen
        if select.select([fd], [], [], 0.5)[0]:
            try:
                seen += os.read(fd, 4096)
            except OSError:  # the program has ended
                raise AssertionError(start + seen) from None
    return seen


def test_a_launcher_without_streams_shows_nothing(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert list(unisono.run(lambda: print("unseen") or 3, on="cpu", ranks=2)) == [3, 3]


def test_a_console_that_breaks_ends_the_run_and_leaves_nothing_open(monkeypatch):
    class Broken(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    unisono.run(int, on="cpu", ranks=2, logs=QUIET)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises(BrokenPipeError):
        unisono.run(lambda: print("line\nrest", end=""), on="cpu", ranks=2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_rank_without_a_terminal_says_how_to_get_one():
    with pytest.raises(RankFailed, match="UNISONO_STDIN_RANK=0 gives it yours"):
        unisono.run(breakpoint, on="cpu", ranks=1, logs=QUIET)
    with pytest.raises(PlatformError, match="ranks of a world of 2 are 0 to 1"):
        stdin_rank({STDIN_VARIABLE: "2"}, 2)

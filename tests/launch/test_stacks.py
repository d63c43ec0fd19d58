"""Stacks and tracebacks: the user's lines are shown, ours are folded."""

from __future__ import annotations

import functools
import inspect
import linecache
import sysconfig
import time
import traceback
from pathlib import Path

import pytest
import torch

import unisono
from unisono.errors import PlatformError, RankFailed, RankTimeout
from unisono.launch.pool.stacks import (
    folded_threads,
    is_own_file,
    outside_collectives,
    user_line,
    user_threads,
)

DUMP = """\
Thread 0x00007f1200000640 (most recent call first):
  File "/env/unisono/launch/pool/rank.py", line 60 in _read_orders
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f1300000740 (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 5000 in barrier
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 30 in train
  File "/env/unisono/launch/pool/rank.py", line 86 in _live
  File "/env/unisono/launch/pool/rank.py", line 61 in main
  File "<string>", line 1 in <module>
"""
QUIET = unisono.Logs(console="none")


def test_stacks_show_the_users_code_and_not_ours():
    text = user_threads(DUMP)
    assert "_read_orders" not in text
    assert "rank.py" not in text
    assert text.splitlines()[-1] == '  File "/home/me/train.py", line 30 in train'
    assert outside_collectives({0: text, 1: 'File "/home/me/train.py", line 3 in f'}) == [1]
    bottom = [line for line in DUMP.splitlines() if "barrier" not in line and "train" not in line]
    text = user_threads("\n".join(bottom))  # run(time.sleep, 60)
    assert text.splitlines()[1:] == ["  in a function that is not written in Python"]


def test_the_innermost_user_line_skips_installed_packages():
    package = Path(unisono.__file__).parent
    for site in (sysconfig.get_path("purelib"), "/usr/lib/python3/dist-packages"):
        dump = DUMP.replace("/env/", f"{site}/")
        for home in ("/home/me", f"{package}-of-mine", f"{package}/_examples"):
            assert user_line(dump.replace("/home/me", home)) == "train.py:12 in step"
    assert user_line("") == "no Python code"


def wait_for_rank_1():
    if unisono.world().rank == 1:
        time.sleep(60)  # the late one
    unisono.world().barrier()


def test_a_deadline_shows_the_line_of_each_rank_with_its_source_and_folds_the_rest():
    with pytest.raises(RankTimeout) as late:
        unisono.run(wait_for_rank_1, on="cpu", ranks=3, timeout_s=1, logs=QUIET)
    text = str(late.value)
    assert text.startswith("rank 1 of 3 not done within timeout_s=1; ranks 0, 2 waited for it\n")
    places = text.partition("--- ")[2].partition("\nHINT")[0]
    begin = inspect.getsourcelines(wait_for_rank_1)[1]
    frame = f'  File "{__file__}", line {{}} in wait_for_rank_1: `{{}}`'
    lines = places.splitlines()
    assert lines[:2] == ["rank 1", frame.format(begin + 2, "time.sleep(60)  # the late one")]
    # Those that wait share a stack, unless one was caught between two looks.
    waiting = ["  ... in unisono", frame.format(begin + 3, "unisono.world().barrier()")]
    assert lines[2].startswith("--- rank")
    assert [line for line in lines[2:5] if not line.startswith("---")] == waiting


def test_frames_of_libraries_are_folded_and_the_innermost_stays_where_there_is_no_other():
    dump = DUMP.replace("/env/", "/env/site-packages/")
    assert folded_threads(dump).splitlines() == [
        "  ... in torch",
        '  File "/home/me/train.py", line 12 in step',
        '  File "/home/me/train.py", line 30 in train',
    ]
    of_torch = [line for line in dump.splitlines() if "/home/me" not in line]
    assert folded_threads("\n".join(of_torch)) == (
        '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 5000 in barrier'
    )


def test_tracebacks_of_cells_have_their_source_lines(monkeypatch):
    source = "def cell_function():\n    value = 0\n    return 1 / value  # in the cell\n"
    name = "<ipython-input-7-abcdef>"
    monkeypatch.setitem(
        linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name)
    )
    space = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    with pytest.raises(RankFailed) as caught:
        unisono.run(space["cell_function"], on="cpu", ranks=1, logs=QUIET)
    assert "return 1 / value  # in the cell" in caught.value.traceback


def send_nonsense():
    unisono.world().all_reduce("no tensor")


def test_our_own_frames_are_folded_and_a_variable_shows_them(monkeypatch):
    def shown():
        with pytest.raises(RankFailed) as caught:
            unisono.run(send_nonsense, on="cpu", ranks=2, logs=QUIET)
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        return caught.value.traceback, sum(map(is_own_file, files))

    text, frames = shown()
    assert 'unisono.world().all_reduce("no tensor")' in text
    assert "unisono/comm/" not in text
    assert "UNISONO_FRAMES=all shows them" in text
    assert frames == 0
    with pytest.raises(PlatformError) as caught:
        unisono.run(send_nonsense, ranks=0)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [__file__]
    for call in (
        unisono.submit(send_nonsense, on="cpu", ranks=1).result,
        functools.partial(unisono.Wrapper(unisono.Platform(device="cpu")).start, len, nothing=1),
    ):
        with pytest.raises((RankFailed, PlatformError)) as caught:
            call()
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert not any(map(is_own_file, files)), files

    monkeypatch.setenv("UNISONO_FRAMES", "all")
    text, frames = shown()
    assert "unisono/comm/" in text
    assert frames > 1


def test_frames_with_which_torch_calls_a_module_are_folded():
    class Net(torch.nn.Module):
        def forward(self, x):
            return x.reshape(7)

    def wrong_shape():
        torch.nn.Sequential(Net())(torch.ones(3))

    with pytest.raises(RankFailed) as caught:
        unisono.run(wrong_shape, on="cpu", ranks=1, logs=QUIET)
    text = caught.value.traceback
    assert "torch.nn.Sequential(Net())" in text
    assert "return x.reshape(7)" in text
    assert "frames of torch" in text
    assert "_call_impl" not in text


def test_the_users_frames_stay_where_ours_stand_between_them():
    def inner():
        raise KeyError("mine")

    def outer():
        try:
            unisono.run(inner, on="inline")
        except KeyError as error:
            raise ValueError("led to this") from error

    with pytest.raises(KeyError) as caught:
        unisono.run(inner, on="inline")
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "inner"
    assert not {"run", "execute", "_run_inline"} & set(names)
    with pytest.raises(RankFailed) as failed:
        unisono.run(outer, on="cpu", ranks=1, logs=QUIET)
    text = failed.value.traceback
    assert text.index("in inner") < text.index("direct cause") < text.rindex("in outer")
    assert "src/unisono" not in text

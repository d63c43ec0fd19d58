"""What surrounds a run: ports, terminals, threads left behind, large payloads, notebooks."""

from __future__ import annotations

import atexit
import functools
import linecache
import logging
import multiprocessing
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch

import unisono
from unisono.cores import usable_cores
from unisono.errors import PlatformError, RankFailed, RankTimeout
from unisono.launch import console
from unisono.launch.pool import payload
from unisono.launch.pool.stacks import is_own_file
from unisono.launch.results import Elsewhere, Results
from unisono.launch.stopping import signals_of_launcher

QUIET = unisono.Logs(console="none")


def test_a_given_port_is_used_and_a_busy_one_names_its_owner():
    def where():
        unisono.world().barrier()
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        platform = unisono.Platform(device="cpu", ranks=2, master_port=port)
        probe.listen()
        with pytest.raises(PlatformError) as caught:
            unisono.run(where, on=platform, logs=QUIET)
        message = str(caught.value)
        assert f"port {port} is in use" in message
        assert f"(process {os.getpid()}) has it" in message
        assert "leave master_port out" in message
    results = unisono.run(where, on=platform, logs=QUIET)
    assert list(results) == [("127.0.0.1", str(port))] * 2


def test_a_thread_left_running_is_named_and_does_not_hold_the_run_up():
    def forget_a_thread():
        threading.Thread(target=time.sleep, args=(600,), name="uploader").start()
        return 7

    begin = time.monotonic()
    match = "rank 0 returned its result, .*running: uploader"
    with pytest.warns(RuntimeWarning, match=match) as caught:
        results = unisono.run(forget_a_thread, on="cpu", ranks=1, logs=QUIET)
    assert list(results) == [7]
    assert [warning.filename for warning in caught] == [__file__]
    assert time.monotonic() - begin < 15


def test_a_thread_that_ends_by_itself_is_waited_for(tmp_path):
    def write_later():
        def write():
            time.sleep(0.3)
            (tmp_path / "written").touch()

        threading.Thread(target=write).start()

    unisono.run(write_later, on="cpu", ranks=1, logs=QUIET)
    assert (tmp_path / "written").exists()


def test_a_large_payload_is_worth_a_warning_that_names_it(monkeypatch):
    monkeypatch.setattr(payload, "LARGE_BYTES", 1 << 20)
    table = np.zeros(1 << 18)
    match = r"sent 2 MB, of which kwargs\['table'\] is 2 MB"
    with pytest.warns(RuntimeWarning, match=match) as caught:
        unisono.run(lambda _x, table: table.sum(), 1, table=table, on="cpu", ranks=1, logs=QUIET)
    assert [warning.filename for warning in caught] == [__file__]


class Counter:
    def __init__(self, start):
        self.start = start

    def count(self, by=1):
        return self.start + by

    def __call__(self):
        return self.start


def test_anything_that_can_be_called_runs_also_a_cell_edited_between_runs():
    def run(function, *args):
        return unisono.run(function, *args, on="cpu", ranks=1, logs=QUIET)[0]

    cell = {"__name__": "__main__", "STEP": 2}  # where a notebook, or `python -`, keeps its names
    for step in (1, 3):
        exec(f"def shift(x):\n    return x * STEP + {step}", cell)
        assert run(cell["shift"], 10) == 20 + step
    calls = Counter(3).count, Counter(4), functools.partial(Counter(5).count, by=2), lambda: 8
    assert [run(call) for call in calls] == [4, 4, 7, 8]
    assert run(Counter, 9).start == 9


def test_a_rank_may_start_a_world_of_its_own_and_more_ranks_than_cores_work():
    def outer():
        platform = unisono.Platform(device="cpu", ranks=2, detect=False)
        return list(unisono.run(lambda: unisono.world().size, on=platform, logs=QUIET))

    assert list(unisono.run(outer, on="cpu", ranks=1, logs=QUIET)) == [[2, 2]]
    many = 2 * usable_cores() + 1
    ones = unisono.run(lambda: sum(unisono.world().all_gather_object(1)), ranks=many, logs=QUIET)
    assert list(ones) == [many] * many


def test_results_are_a_short_table_in_a_notebook():
    values = [*range(16), "<b>", Elsewhere(17, "Model")]
    results = Results(values, hosts=["n<1>"] * 18, platform="cpu", wall_s=1.5)
    table = results._repr_html_()
    assert table.count("<tr>") == 18
    assert "18 ranks on cpu, 1.500 s" in table
    assert "n&lt;1&gt;" in table
    assert "<b>" not in Results(["<b>"], hosts=["h"], platform="cpu")._repr_html_()
    assert "x" * 500 not in Results(["x" * 500], hosts=["h"], platform="cpu")._repr_html_()


def test_one_rank_may_read_the_standard_input(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(
        "import unisono\n"
        "def ask():\n"
        "    rank = unisono.world().rank\n"
        "    return input('your name? ') if rank == 1 else __import__('sys').stdin.read()\n"
        "platform = unisono.Platform(device='cpu', ranks=2, spawn_method='spawn')\n"
        "print(list(unisono.run(ask, on=platform)))\n"
    )
    env = {**os.environ, console.STDIN_VARIABLE: "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script], env=env, input="Ada\n", capture_output=True, text=True, timeout=90
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
    env = {**os.environ, console.STDIN_VARIABLE: "1", "TMPDIR": str(tmp_path), "TERM": "dumb"}
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
            seen += os.read(fd, 4096)
    return seen


def test_a_rank_without_a_terminal_says_how_to_get_one():
    with pytest.raises(RankFailed, match="UNISONO_STDIN_RANK=0 gives it yours"):
        unisono.run(breakpoint, on="cpu", ranks=1, logs=QUIET)
    with pytest.raises(PlatformError, match="ranks of a world of 2 are 0 to 1"):
        console.stdin_rank({console.STDIN_VARIABLE: "2"}, 2)


def test_a_deadline_holds_in_a_world_that_exists_already():
    def outer():
        try:
            unisono.run(time.sleep, 600, timeout_s=0.5)
        except RankTimeout as error:
            return sorted(error.stacks), str(error).splitlines()[0], error.rank

    def fine():
        return list(unisono.run(lambda: unisono.world().rank, timeout_s=60))

    found = unisono.run(outer, on="cpu", ranks=2, logs=QUIET, timeout_s=60)
    for rank, (stacks, headline, culprit) in enumerate(found):
        assert rank in stacks
        assert headline == f"rank {rank} of 2 not done within timeout_s=0.5"
        assert culprit == rank
    assert list(unisono.run(fine, on="cpu", ranks=2, logs=QUIET)) == [[0, 1], [0, 1]]


def test_ranks_take_over_what_the_script_has_set_in_torch():
    def modes():
        return torch.ones(1).dtype, torch.are_deterministic_algorithms_enabled()

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        assert list(unisono.run(modes, on="cpu", ranks=1, logs=QUIET)) == [(torch.float64, True)]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert list(unisono.run(modes, on="cpu", ranks=1, logs=QUIET)) == [(torch.float32, False)]


def test_ranks_of_one_host_listen_on_loopback_only():
    def listening():
        unisono.world().barrier()
        folder = Path("/proc/self/fd")
        mine = {str(fd.readlink()) for fd in folder.iterdir() if fd.is_symlink()}
        rows = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path("/proc/net", table).read_text().splitlines()[1:]
        ]
        return [r[1].partition(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in mine]

    platform = unisono.Platform(device="cpu", ranks=2, backend="gloo")
    first, second = unisono.run(listening, on=platform, logs=QUIET)
    assert first  # rank 0 has the store
    assert {*first, *second} == {"0100007F"}


def test_a_rank_that_crashes_after_it_returned_is_a_warning_and_its_result_counts():
    def crashes_late():
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
        return 5

    with pytest.warns(RuntimeWarning, match="rank 0 returned its result, then was killed by SIGSE"):
        assert list(unisono.run(crashes_late, on="cpu", ranks=1, logs=QUIET)) == [5]


def test_a_hang_up_of_the_terminal_ends_a_launcher_as_an_exception_first(tmp_path):
    def launcher():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
        with signals_of_launcher():
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(60)
            finally:
                (tmp_path / "finally").touch()

    with pytest.raises(RankFailed) as caught:
        unisono.run(launcher, on="cpu", ranks=1, logs=QUIET)
    assert (caught.value.signal, (tmp_path / "finally").exists()) == ("SIGHUP", True)


def test_the_users_multiprocessing_is_left_alone():
    def state():
        method = multiprocessing.get_start_method(allow_none=True)
        return method, dict(vars(forkserver._forkserver)), dict(vars(tracker))

    tracker = resource_tracker._resource_tracker
    before = state()
    unisono.run(os.getpid, on="cpu", ranks=1, logs=QUIET)
    assert state() == before


@pytest.mark.parametrize("spawn_method", ["auto", "spawn"])
def test_the_root_loggers_level_and_format_reach_the_ranks(spawn_method, monkeypatch):
    def work():
        logging.getLogger("my.module").info("a word")
        logging.getLogger().debug("too low")

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler := logging.StreamHandler(sys.stdout)])
    handler.setFormatter(logging.Formatter("{levelname}|{name}|{message}", style="{"))
    monkeypatch.setattr(root, "level", logging.INFO)
    platform = unisono.Platform(device="cpu", ranks=1, spawn_method=spawn_method)
    assert unisono.run(work, on=platform, logs=QUIET).log(0) == "INFO|my.module|a word\n"


def test_a_module_that_sets_up_logging_in_the_rank_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "own_logging.py").write_text(
        "import logging\n"
        "logging.basicConfig(format='mine %(message)s')\n"
        "def work(): logging.warning('a word')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler()])
    from own_logging import work  # pyright: ignore[reportMissingImports]

    assert unisono.run(work, on="cpu", ranks=1, logs=QUIET).log(0) == "mine a word\n"


def test_a_seed_is_an_argument_and_means_the_same_everywhere():
    def draw():
        return torch.rand(1).item(), float(np.random.rand())

    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, second = unisono.run(draw, on="cpu", ranks=2, seed=5, logs=QUIET)
    assert first != second
    assert list(unisono.run(draw, on="cpu", ranks=2, seed=5, logs=QUIET)) == [first, second]
    assert list(unisono.run(draw, on="inline", seed=5)) == [first]

    def inside():
        return unisono.run(draw, seed=5)[unisono.world().rank]

    assert list(unisono.run(inside, on="cpu", ranks=2, logs=QUIET)) == [first, second]
    job = unisono.submit(draw, on="cpu", ranks=1, seed=6)
    assert list(job.result()) == [second]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()


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
        functools.partial(unisono.Wrapper(unisono.Platform(device="cpu")).start, print, nothing=1),
    ):
        with pytest.raises((RankFailed, PlatformError)) as caught:
            call()
        files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert not any(map(is_own_file, files)), files

    monkeypatch.setenv("UNISONO_FRAMES", "all")
    text, frames = shown()
    assert "unisono/comm/" in text
    assert frames > 1


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

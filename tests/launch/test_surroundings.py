"""What ranks take over from their launcher, and what a run leaves alone."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import torch

import unisono

QUIET = unisono.Logs(console="none")


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


def test_the_root_loggers_level_and_format_reach_the_ranks(monkeypatch):
    def work():
        logging.getLogger("my.module").info("a word")
        logging.getLogger().debug("too low")

    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [handler := logging.StreamHandler(sys.stdout)])
    handler.setFormatter(logging.Formatter("{levelname}|{name}|{message}", style="{"))
    monkeypatch.setattr(root, "level", logging.INFO)
    assert unisono.run(work, on="cpu", ranks=1, logs=QUIET).log(0) == "INFO|my.module|a word\n"


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
    shared = unisono.Platform(device="cpu", ranks=2, seed=5, seed_per_rank=False)
    assert list(unisono.run(draw, on=shared, logs=QUIET)) == [first, first]

    def inside():
        return unisono.run(draw, seed=5)[unisono.world().rank]

    assert list(unisono.run(inside, on="cpu", ranks=2, logs=QUIET)) == [first, second]
    job = unisono.submit(draw, on="cpu", ranks=1, seed=6)
    assert list(job.result()) == [second]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()

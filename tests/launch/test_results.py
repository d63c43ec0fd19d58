"""What a run gives back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unisono.errors import PlatformError
from unisono.launch.attempts import Progress, results_of
from unisono.launch.in_process import pack, unpack
from unisono.launch.pool.payload import dump_value
from unisono.launch.pool.protocol import RankState
from unisono.launch.pool.verdict import Ending
from unisono.launch.results import Elsewhere, Results


def test_plain_data_is_shared_in_a_world_and_other_objects_stay():

    value = {"a": [1, 2.5, "x"], "t": torch.arange(3), "n": np.float32(2), "m": np.ones((2, 2))}
    copy = unpack(pack(value), 1)
    assert copy["a"] == value["a"]
    assert torch.equal(copy["t"], value["t"])
    assert np.array_equal(copy["m"], value["m"])
    assert unpack(pack(Results), 1) == Elsewhere(1, "ABCMeta")
    assert unpack(pack(lambda: 1), 2) == Elsewhere(2, "function")


def test_results_are_a_sequence_with_facts():
    logs = ["", "x", ""]
    results = Results([3, 4, Elsewhere(2, "Model")], hosts=["a"] * 3, platform="cpu", logs=logs)
    assert (results[0], results[-2], results[:2]) == (3, 4, (3, 4))
    assert (results.log(1), results.log(0)) == ("x", "")
    with pytest.raises(PlatformError, match="stayed on rank 2"):
        results[2]
    with pytest.raises(IndexError):
        results[3]
    assert repr(results) == "Results([3, 4, <Model on rank 2>], platform='cpu', wall_s=0.000)"


def test_the_kept_log_of_a_survivor_is_its_own(tmp_path):
    for rank in range(3):
        (tmp_path / f"rank-{rank}.log").write_text(f"I am {rank}")
    states = [RankState(rank=rank) for rank in range(3)]
    states[0].take({"state": "died"})  # as in an elastic job
    for state in states[1:]:
        state.take({"state": "returned"})
    ending = Ending(state="done", attempt=0, was_ready=True, start_s=0.1, wall_s=0.2)
    results = results_of(
        Progress(ending=ending),
        states,
        dump_value,
        place="cpu",
        threads=1,
        job_dir=tmp_path,
        is_kept=True,
    )
    assert [results.log(i) for i in range(2)] == ["I am 1", "I am 2"]

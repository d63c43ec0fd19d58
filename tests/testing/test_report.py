"""The text of the report, its stacks, the marker: all that needs no process."""

from __future__ import annotations

import pickle
import threading

import pytest

from unisono.errors import PlatformError
from unisono.testing.leaks import Holdings
from unisono.testing.plugin import RanksMarker
from unisono.testing.report import Findings, Raised, RankFailure, headline, how_it_died

A, B = Raised(text="a"), Raised(text="b")


@pytest.mark.parametrize(
    ("findings", "line"),
    [
        (
            Findings(world=4, raised={0: A, 2: B}, died={1: 7}, waiting={3: ""}),
            "2 of 4 ranks raised, 1 died (exit code 7), 1 still waiting",
        ),
        (
            Findings(world=3, died={0: 7, 1: -9}, waiting={2: ""}),
            "2 of 3 ranks died (exit code 7 / killed by SIGKILL), 1 still waiting",
        ),
        (Findings(world=2, waiting={1: ""}), "1 of 2 ranks still waiting, 1 returned"),
        (Findings(world=2, raised={1: A}, doing="x"), "1 of 2 ranks raised, 1 returned, while x"),
    ],
)
def test_headline_counts_every_rank(findings, line):
    assert headline(findings) == line


def test_unknown_signal_is_numbered():
    assert how_it_died(-100) == "killed by signal 100"


def test_texts_that_differ_in_addresses_are_shown_once():
    one = "Read error [127.0.0.1]:1708: closed, <f at 0x7f00>"
    two = "Read error [127.0.0.1]:4242: closed, <f at 0x7f99>"
    text = str(
        RankFailure(Findings(world=3, raised={0: Raised(text=one), 2: Raised(text=two), 1: A}))
    )
    assert "---- ranks 0, 2 raised" in text
    assert one in text
    assert two not in text


def test_long_output_is_cut_at_its_start():
    printed = "\n".join(f"line {i}" for i in range(100))
    text = str(RankFailure(Findings(world=1, raised={0: A}, output={0: printed})))
    assert "... 60 lines before ..." in text
    assert "line 99" in text
    assert "line 59\n" not in text


def test_failure_survives_pickling():
    failure = RankFailure(Findings(world=2, raised={1: A}, died={0: -9}))
    copy = pickle.loads(pickle.dumps(failure))
    assert str(copy) == str(failure)
    assert copy.died == {0: "killed by SIGKILL"}


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.ranks(),
        pytest.mark.ranks(0),
        pytest.mark.ranks(2.0),
        pytest.mark.ranks([]),
        pytest.mark.ranks([2, 0]),
        pytest.mark.ranks("2"),
        pytest.mark.ranks(2, timeout=0),
        pytest.mark.ranks(2, timeout="20"),
        pytest.mark.ranks(2, backends="gloo"),
        pytest.mark.ranks(2, 3),
    ],
    ids=str,
)
def test_marker_that_makes_no_sense_is_refused(mark):
    with pytest.raises(PlatformError, match=r"@pytest.mark.ranks\(.*\n.*\n  HINT: @pytest"):
        RanksMarker.read(mark.mark, 20.0)


def test_marker_is_read():
    marker = RanksMarker.read(pytest.mark.ranks([1, 2], timeout=3, backend="shm").mark, 20.0)
    listed = {"rank_count": (1, 2)}
    assert marker == RanksMarker(count=1, backend="shm", timeout_s=3.0, listed=listed)
    both = RanksMarker.read(pytest.mark.ranks(2, backend=["gloo", "shm"]).mark, 20.0)
    assert (both.count, both.listed) == (2, {"rank_backend": ("gloo", "shm")})


def test_things_that_end_by_themselves_are_no_leaks():
    before = Holdings.now()
    thread = threading.Timer(0.1, lambda: None)
    thread.start()
    found = before.new()
    found.pop("shared memory", None)  # which tests in other processes may make meanwhile
    assert found == {}
    thread.join()


def test_ignored_keys_do_not_count(tmp_path):
    before = Holdings.now(["files"])
    with (tmp_path / "file").open("w") as file:
        assert list(before.new(patience_s=0)) == ["files"]
        assert before.new(ignore=[f"fd:{file.fileno()}"], patience_s=0) == {}

"""Settings from a file: which one wins, and what is wrong with a bad one."""

from __future__ import annotations

import os

import pytest

import unisono
from unisono.errors import PlatformError
from unisono.launch import settings
from unisono.launch.request import checked_request
from unisono.launch.settings import read_configuration


def request(**given):
    """Check a request as `run` does."""
    asked = dict.fromkeys(("on", "ranks", "nodes", "timeout_s", "max_restarts", "logs"))
    return checked_request(print, (), {}, **{**asked, **given})


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A project with a file, seen from a directory inside."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "inner").mkdir()
    (tmp_path / "unisono.toml").write_text(
        '[run]\nranks = 3\ntimeout_s = 60\ncomm_timeout_s = 30.0\non = "cpu"\n'
        '[platform.small]\ndevice = "cpu"\nn_gpus_per_node = 2\nseed = 4\n'
    )
    monkeypatch.chdir(tmp_path / "inner")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def test_the_later_word_wins():
    found = request()
    assert (found.ranks, found.timeout_s, found.platform.comm_timeout_s) == (3, 60, 30.0)
    found = request(timeout_s=5)
    assert (found.ranks, found.timeout_s) == (3, 5)
    assert request(ranks=5).ranks == 5


def test_the_device_of_the_general_table_is_the_place(project):
    (project / "unisono.toml").write_text('[run]\ndevice = "inline"\n')
    assert request().place == "inline"
    assert request(on="cpu").place == "cpu"


def test_a_profile_is_a_place_and_an_explicit_platform_keeps_its_fields():
    found = request(on="small", ranks=2)
    assert (found.place, found.ranks, found.platform.seed) == ("cpu", 2, 4)
    own = request(on=unisono.Platform(device="cpu", n_gpus_per_node=2, comm_timeout_s=9))
    assert (own.ranks, own.platform.comm_timeout_s) == (2, 9)
    assert request(on=unisono.Platform(device="cpu")).platform.comm_timeout_s == 30.0


def test_a_profile_goes_before_the_general_table(monkeypatch, project):
    with (project / "unisono.toml").open("a") as file:
        file.write('[platform.slow]\ndevice = "cpu"\ncomm_timeout_s = 90.0\n')
    found = request(on="small")
    assert (found.ranks, found.platform.seed, found.platform.comm_timeout_s) == (2, 4, 30.0)
    found = request(on="slow")  # says nothing of its size
    assert (found.ranks, found.platform.comm_timeout_s) == (3, 90.0)
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    assert request(on="small").platform.seed == 4


def test_one_variable_goes_before_an_explicit_platform(monkeypatch):
    monkeypatch.setenv("UNISONO_FORCE_ON", "cpu")
    gpu = unisono.Platform(device="gpu", n_gpus_per_node=4)
    assert (request(on=gpu).place, request(on=gpu).ranks) == ("cpu", 4)
    assert gpu.device is unisono.Device.GPU
    two_nodes = unisono.Platform(device="slurm", n_nodes=2, n_gpus_per_node=2)
    assert request(on=two_nodes).ranks == 4
    assert request(on="gpu", ranks=2).place == "cpu"
    assert (request(on="slurm", nodes=3).place, request(on="slurm", nodes=3).ranks) == ("cpu", 3)
    assert request(on="mpi", nodes=2, ranks=6).ranks == 6
    assert request(on=two_nodes, nodes=4, ranks=8).ranks == 8


def test_the_search_ends_where_a_project_begins(project):
    assert read_configuration().path == project / "unisono.toml"
    (project / "inner" / ".git").mkdir()
    assert read_configuration().path is None  # another project begins here


def test_a_file_of_another_user_is_never_used(monkeypatch, project):
    strange = project / "inner" / "unisono.toml"
    strange.write_text('[run]\nmpiexec = "/tmp/evil"\nenv = {LD_PRELOAD = "/tmp/evil.so"}\n')
    is_root = os.getuid() == 0
    if is_root:
        os.chown(strange, 12345, 12345)
    else:  # nobody can give files away: let this process be somebody else instead
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        found = request(on="mpi", ranks=2)
    assert (found.platform.mpiexec, found.platform.env) == (None, None)
    assert found.timeout_s == (60 if is_root else None)  # the one further up is root's own


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link away")
def test_a_link_of_another_user_is_not_followed(project):
    own = project / "own.toml"
    own.write_text('[run]\nmpiexec = "/tmp/evil"\n')
    link = project / "inner" / "unisono.toml"
    link.symlink_to(own)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    with pytest.warns(RuntimeWarning, match="belongs to user 12345"):
        assert request(on="mpi", ranks=2).platform.mpiexec is None


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_file_that_others_may_write_is_refused_with_the_cure(project, mode):
    (project / "unisono.toml").chmod(mode)
    with pytest.raises(PlatformError, match=f"mode is {mode:04o}") as caught:
        request()
    assert f"HINT: chmod go-w {project / 'unisono.toml'}" in str(caught.value)
    (project / "unisono.toml").chmod(0o644)
    assert request().ranks == 3


def test_the_search_ends_at_the_home_directory(monkeypatch, project):
    (project / ".git").rmdir()
    monkeypatch.setenv("HOME", str(project))
    assert read_configuration().path == project / "unisono.toml"
    monkeypatch.setenv("HOME", str(project / "inner"))
    assert read_configuration().path is None


def test_what_a_file_decides_is_said_once_and_what_the_caller_gives_is_not_its_doing(
    monkeypatch, project, capfd
):
    monkeypatch.setattr(settings, "_said", set())
    (project / "unisono.toml").write_text(
        '[run]\nranks = 1\ntimeout_s = 60\non = "cpu"\nenv = {TOKEN = "secret"}\n'
    )
    for _ in range(2):
        unisono.run(len, "ab", timeout_s=50)
    said = [line for line in capfd.readouterr().err.splitlines() if "decides" in line]
    line = f"unisono: {project / 'unisono.toml'} decides: ranks=1, on='cpu', env=['TOKEN']"
    assert said == [line]
    own = request(on=unisono.Platform(device="cpu", ranks=2, env={}), timeout_s=1)
    assert own.decided_by_file == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nrnaks = 2\n", ["rnaks", "did you mean ranks?"]),
        ("[rum]\n", ["rum", "did you mean run?"]),
        ("[platform.x]\nranks = 2\n", ["[platform.x]", "no device"]),
        ('[platform.x]\ndevice = "cpu"\nn_gpu = 1\n', ["n_gpu", "did you mean n_gpus_per_node?"]),
        ("ranks = ", ["unisono.toml", "Invalid"]),
        ("run = 3", ["3 where a table is expected"]),
        ("[run]\nranks = 0\n", ["ranks=0"]),
    ],
)
def test_a_bad_file_says_what_is_wrong(project, text, words):
    (project / "unisono.toml").write_text(text)
    with pytest.raises(PlatformError) as caught:
        request()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_variable_that_means_nothing_is_named(monkeypatch):
    monkeypatch.setenv("UNISONO_CHEK", "1")
    with pytest.warns(RuntimeWarning, match="did you mean UNISONO_CHECK") as caught:
        request()
    assert [warning.filename for warning in caught] == [__file__]

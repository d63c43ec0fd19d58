"""How a task is called, rule by rule. No process here."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

from unisono.errors import PlatformError
from unisono.launch import Platform, Wrapper, wrapper
from unisono.launch.context import Here
from unisono.launch.logs import IO
from unisono.launch.tasks import Task, as_task

HERE = Here(
    rank=3, local_rank=1, platform=Platform(device="cpu"), device=torch.device("cpu"), group=None
)


@pytest.fixture(autouse=True)
def rank_3(monkeypatch):
    monkeypatch.setattr(Task, "_this_rank", lambda _task: HERE)


def called(fn, *args, is_decorated=False, kind="auto", **kwargs):
    """Make a task of `fn`, call it on rank 3, and return what it got."""
    options = {"convention": kind, "is_decorated": is_decorated}
    return as_task(fn, args, kwargs, HERE.platform, **options)(*args, **kwargs)


def test_the_seed_pages_task_gets_its_one_tuple_as_written():
    def task(global_rank, local_rank, process_group, args):
        return global_rank, local_rank, process_group, args

    assert called(task, ("example",)) == (3, 1, None, ("example",))
    assert called(task) == (3, 1, None, None)
    with pytest.raises(PlatformError, match="one tuple"):
        called(task, 1, 2)
    with pytest.raises(PlatformError, match="'lr'"):
        called(task, lr=1)


def test_without_a_fourth_parameter_the_value_is_left_out():
    def task(global_rank, local_rank, process_group):
        return global_rank, local_rank, process_group

    assert called(task) == (3, 1, None)


def test_a_task_with_keywords_gets_the_four_of_the_present_release():
    def task(a, **kwargs):
        return a, sorted(kwargs), kwargs["global_rank"], kwargs["platform"].world_size

    assert called(task, 7, lr=1) == (
        7,
        ["global_rank", "group", "local_rank", "lr", "platform"],
        3,
        1,
    )
    with pytest.raises(PlatformError, match="each rank gets its own group"):
        called(task, 7, group=1)


def test_named_parameters_get_exactly_what_they_name():
    def task(a, global_rank, *, platform):
        return a, global_rank, platform.world_size

    assert called(task, 7) == (7, 3, 1)

    def filled(global_rank):
        return global_rank

    assert called(filled, 9) == 9  # the user's value fills it


def test_four_plain_parameters_are_the_seeds_in_start_and_the_users_in_the_decorator():
    def task(rank, local, ranks, options):
        return rank, local, ranks, options

    assert called(task, (1, 2)) == (3, 1, None, (1, 2))
    assert called(task, 1, 2, 3, 4, is_decorated=True) == (1, 2, 3, 4)
    assert called(task, 1, 2, 3, 4) == (1, 2, 3, 4)
    with pytest.raises(PlatformError, match="missing a required argument"):
        called(task, (1, 2), is_decorated=True)


def test_everything_else_is_called_plainly_and_a_wish_goes_before_the_rules():
    assert called(lambda a, b: (a, b), 1, b=2) == (1, 2)

    def greedy(*args, **kwargs):
        return args, kwargs

    assert called(greedy, 1, kind="plain") == ((1,), {})
    assert called(lambda a, b, c, d: a, kind="seed") == 3
    with pytest.raises(PlatformError, match="'ddpw6'"):
        called(greedy, kind="ddpw7")


def test_a_wrapper_keeps_its_platform_and_a_decorated_function_its_name(monkeypatch):
    monkeypatch.setattr(IO, "verbose", True)
    platform = Platform(device="cpu", n_gpus_per_node=2, verbose=False)
    assert Wrapper(platform).platform is platform
    assert IO.verbose is False

    def train(a, b=2):
        """Train."""

    decorated = wrapper(platform)(train)
    assert (decorated.__name__, decorated.__doc__) == ("train", "Train.")
    assert inspect.signature(decorated) == inspect.signature(train)


@pytest.mark.parametrize("device", ["mpi", "ray"])
def test_one_rank_elsewhere_does_not_run_in_this_process(monkeypatch, device):
    import unisono.launch.tasks as launching

    monkeypatch.setattr(launching, "checked_request", lambda *_a, on, **_k: request_on(on))
    monkeypatch.setattr(launching, "execute", lambda request: request.place)
    monkeypatch.setattr(launching, "run_in_process", lambda _request: "in this process")
    for ranks in (1, 2):
        platform = Platform(device=device, ranks=ranks)
        assert Wrapper(platform).start(print) == device
    assert Wrapper(Platform(device="cpu")).start(print) == "in this process"


def request_on(platform):
    """Return what a checked request of one place has, without asking for mpiexec or Ray."""
    return SimpleNamespace(
        platform=platform, place=platform.kind.value, ranks=platform.ranks or 1, joins_world=False
    )

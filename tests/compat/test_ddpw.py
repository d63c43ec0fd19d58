"""Programs written for DDPW: only the import line changes."""

from __future__ import annotations

import os
import pickle
import tempfile

import pytest

from unisono.compat.ddpw import Device, Platform, Wrapper, wrapper
from unisono.compat.ddpw import functional as DF
from unisono.compat.ddpw.io import IO
from unisono.compat.ddpw.wrapper import setup
from unisono.errors import PlatformError
from unisono.launch.checks import check_platform

# As printed on the first page of the library's documentation; the import line alone is ours.
FIRST_SNIPPET = """\
from unisono.compat.ddpw import Platform, Wrapper

# some task
def task(global_rank, local_rank, process_group, args):
    print(f'This is GPU {global_rank}(G)/{local_rank}(L); args = {args}') 

# platform (e.g., 4 GPUs)
platform = Platform(device='gpu', n_gpus=4)

# wrapper
wrapper = Wrapper(platform=platform)

# start
wrapper.start(task, ('example',))
"""  # noqa: W291
SECOND_SNIPPET = """\
from unisono.compat.ddpw import Platform, wrapper

@wrapper(Platform(device='gpu', n_gpus=2, n_cpus=2))
def run(a, b):
    # some task
    pass
"""


@pytest.fixture(autouse=True)
def quiet(warm_python, hygiene, monkeypatch, tmp_path):  # the first outlives a test
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # failed runs keep their logs
    monkeypatch.setattr(IO, "verbose", False)


@pytest.fixture
def printed(printed_by, tmp_path):
    """Return a function that runs a script as a user does, on a laptop without GPUs."""

    def run(text):
        (tmp_path / "script.py").write_text(text)
        return printed_by("script.py", UNISONO_FORCE_ON="cpu", TMPDIR=str(tmp_path))

    return run


def test_the_first_snippet_prints_from_every_rank(printed):
    out = printed(FIRST_SNIPPET)
    lines = [line for line in out.splitlines() if "This is GPU" in line]
    assert sorted(lines) == [
        f"[{r}] This is GPU {r}(G)/{r}(L); args = ('example',)" for r in range(4)
    ]


def test_the_decorator_snippet_runs_when_called(printed):
    body = SECOND_SNIPPET + "\nprint('returned', list(run(1, b=2)))\n"
    assert "returned [None, None]" in printed(body)


def test_old_names_of_fields_are_understood_and_fields_can_be_set():
    platform = Platform(device="gpu", n_gpus=2, n_cpus=3, ram=8)
    assert (platform.world_size, platform.cpus_per_rank, platform.mem_per_node) == (2, 3, 8)
    check_platform(platform)  # the CPUs are those of a rank, so nothing has to be divided
    twin = pickle.loads(pickle.dumps(platform))
    assert (twin, twin.cpus_per_rank, twin.n_cpus) == (platform, 3, 3)
    twin.n_gpus, twin.n_cpus_per_node = 4, 8  # the last one said is the one that counts
    assert twin.cpus_per_rank == 2
    twin.n_cpus = 8
    assert twin.cpus_per_rank == 8
    platform.n_gpus, platform.ram, platform.device = 4, 16, "cpu"
    assert (platform.world_size, platform.ram, platform.device) == (4, 16, Device.CPU)
    assert Platform(device="gpu", n_gpus_per_node=2, n_cpus_per_node=4).cpus_per_rank == 2
    with pytest.raises(PlatformError, match="n_gpus is an old name of n_gpus_per_node"):
        Platform(n_gpus=2, n_gpus_per_node=3)


def test_fields_have_ddpws_order_and_defaults():
    platform = Platform("job", "CUDA", "part", 1, 2, 4, 16)
    assert (platform.name, platform.device, platform.partition) == ("job", Device.GPU, "part")
    assert (platform.n_gpus_per_node, platform.n_cpus_per_node) == (2, 4)
    plain = Platform()
    assert (plain.name, plain.device, plain.seed) == ("ddpw", Device.GPU, 1889)
    assert (plain.mem_per_node, plain.ipc_groups, plain.verbose) == (32, [], True)
    assert plain.partition == "general"
    assert not plain.is_explicit("partition")  # a cluster without it may take its default
    assert platform.but(ranks=3).is_explicit("partition")
    assert not plain.but(ranks=3).is_explicit("partition")
    with pytest.raises(PlatformError, match="did you mean n_nodes"):
        Platform(n_node=2)


def test_the_present_spelling_gets_ranks_group_and_platform():
    def task(a, global_rank, local_rank, group, platform, **kwargs):
        import torch
        import torch.distributed as dist

        x = torch.tensor([global_rank + 1.0])
        dist.all_reduce(x, group=group)
        port = os.environ["MASTER_PORT"] == str(platform.master_port)
        return a, global_rank, local_rank, x.item(), port, sorted(kwargs), torch.rand(1).item()

    finished = []
    platform = Platform(
        device=Device.CPU,
        n_gpus_per_node=4,
        ipc_groups=[[0, 3], [1, 2]],
        verbose=False,
        upon_finish=lambda: finished.append(True),
    )
    results = Wrapper(platform).start(task, 5, lr=0.1)
    assert [value[:6] for value in results] == [
        (5, rank, rank, 5.0, True, ["lr"]) for rank in range(4)
    ]
    assert len({value[6] for value in results}) == 1  # one seed for all, as DDPW has it
    assert finished == [True]
    assert (platform.master_port, platform.seed_per_rank) == (None, None)  # a copy was used


@pytest.mark.leaks("files")  # torch keeps one pipe from the first group of a process on
def test_one_rank_runs_in_the_calling_process_and_leaves_no_trace():
    import random

    import torch
    import torch.distributed as dist

    seen = []

    @wrapper(Platform(device="cpu", verbose=False))
    def train(value, group=None):
        dist.barrier(group)
        seen.append((value, os.getpid(), random.random(), os.environ["RANK"]))
        return torch.rand(1).item()

    before, state = dict(os.environ), random.getstate()
    first, second = train(3)[0], train(3)[0]
    assert first == second  # seeded
    assert [entry[:2] for entry in seen] == [(3, os.getpid())] * 2
    assert (dict(os.environ), random.getstate()) == (before, state)
    assert not dist.is_initialized()
    assert train.__name__ == "train"


def test_without_groups_each_rank_is_alone():
    def task(group, **_kwargs):
        import torch.distributed as dist

        import unisono

        return group, dist.is_initialized(), unisono.world().size

    platform = Platform(device="cpu", ranks=2, ipc_groups=None, verbose=False)
    assert list(Wrapper(platform).start(task)) == [(None, False, 1)] * 2


def test_ranks_can_meet_at_a_file_and_are_told_of_an_error():
    def task(global_rank):
        import unisono

        unisono.world().barrier()
        if global_rank == 1:
            raise KeyError("here")

    told = []
    platform = Platform(
        device="cpu", ranks=2, ipc_protocol="file", verbose=False, upon_error=told.append
    )
    with pytest.raises(Exception, match="rank 1 of 2") as caught:
        Wrapper(platform).start(task)
    assert told == [caught.value]


def test_setup_makes_this_process_the_given_rank():
    def target(global_rank, local_rank, process_group, args):
        return global_rank, local_rank, process_group.size(), args

    platform = Platform(device="cpu", verbose=False)
    assert setup(0, 0, 0, platform, target, ("x",)) == (0, 0, 1, ("x",))


def test_the_module_tree_is_ddpws():
    import unisono.compat.ddpw as ddpw

    assert ddpw.__version__ == "6.1.3"
    assert "MIT" in ddpw.__licence__
    assert callable(ddpw.wrapper)
    names = "seed_generators average_params_grads optimiser_to has_batch_norm to device"
    assert all(callable(getattr(DF, name)) for name in names.split())
    assert ddpw.platform.Platform is DF.Platform

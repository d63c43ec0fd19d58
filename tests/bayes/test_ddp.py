"""Replicas on many ranks: the same start, the same step, the same numbers as one process."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile

import numpy as np
import pytest
import torch
from tests.bayes.nets import learn, trained

import unisono
from unisono.bayes import (
    BatchNorm2d,
    Conv2d,
    DDPConfig,
    DDPSequential,
    LayerBlock,
    Linear,
    ReLU,
    ResNetBlock,
    Sequential,
    batches,
    manual_seed,
)
from unisono.comm import trace, world
from unisono.errors import CollectiveMismatch, PlatformError, RankFailed

AUTO = DDPConfig([], backend="auto")


def build(kind):
    if kind == "mlp":
        return Sequential(Linear(4, 6), ReLU(), Linear(6, 2))
    main = LayerBlock(Conv2d(2, 2, 3, padding=1), BatchNorm2d(2), ReLU())
    return Sequential(
        Conv2d(1, 2, 3, padding=1),
        BatchNorm2d(2),
        ReLU(),
        ResNetBlock(main, Conv2d(2, 2, 1)),
        Linear(2 * 3 * 4, 2),
    )


def data(kind, rows, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, 4) if kind == "mlp" else (rows, 1, 3, 4)
    x = torch.tensor(rng.normal(size=shape), dtype=torch.float64)
    return x, torch.tensor(rng.normal(size=(rows, 2)), dtype=torch.float64)


def shares(rows, size, split):
    """Rows of each rank: even, uneven, or one rank without any."""
    if split == "even" or size == 1:
        return [len(part) for part in np.array_split(np.arange(rows), size)]
    if split == "uneven":
        return [1] * (size - 1) + [rows - size + 1]
    return [rows, *[0] * (size - 1)]


@pytest.mark.ranks([1, 2, 3, 4], backend=["gloo", "shm"])
def test_summed_deltas_equal_one_process_on_the_whole_batch():
    comm = world()
    for kind, split, steps in (
        ("mlp", "even", 20),
        ("mlp", "uneven", 20),
        ("mlp", "empty", 5),
        ("conv", "even", 5),
        ("conv", "empty", 5),
    ):
        manual_seed(comm.rank)  # replicas start apart; rank 0 decides
        net = DDPSequential(
            build(kind).double(),
            AUTO,
            average=False,
            cap_batch="global",
            sync_norm_stats="batch" if kind == "conv" else False,
        )
        manual_seed(0)
        alone = build(kind).double()
        counts = shares(8, comm.size, split)
        start = sum(counts[: comm.rank])
        for step in range(steps):
            x, y = data(kind, 8, seed=step)
            trained(alone, x, y)
            mine = slice(start, start + counts[comm.rank])
            if counts[comm.rank] or kind == "conv":
                learn(net, x[mine], y[mine])
            net.step()
        net.check_sync()
        want = alone.state_dict(running=True)
        for key, values in net.state_dict(running=True).items():
            for got, one in zip(values, want[key], strict=True):
                assert np.allclose(got, one, rtol=1e-6, atol=1e-6), (kind, split, key)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
@pytest.mark.parametrize(("average", "factor"), [(False, 3.0), (True, 1.5)])
def test_deltas_are_summed_or_averaged(average, factor):
    net = DDPSequential(Sequential(Linear(3, 1)), AUTO, average)
    layer = net.model[0]
    layer.mu_w, layer.var_w, layer.mu_b, layer.var_b = [0.0] * 3, [400.0] * 3, [0.0], [400.0]
    strength = world().rank + 1
    layer.delta_mu_w = np.array([1.0, 2.0, 3.0]) * strength
    layer.delta_mu_b = [4.0 * strength]
    layer.delta_var_w = np.array([-1.0, -2.0, -3.0]) * strength
    net.step()
    assert np.allclose(layer.delta_mu_w, np.array([1, 2, 3]) * factor)
    assert np.allclose(layer.mu_w, np.array([1, 2, 3]) * factor)
    assert np.allclose(layer.mu_b, 4 * factor)
    assert np.allclose(layer.var_w, 400 - np.array([1, 2, 3]) * factor)
    after = net.state_dict()
    net.step()  # nobody has anything new
    assert net.state_dict() == after


@pytest.mark.ranks(2)
def test_a_net_that_changes_its_dtype_keeps_learning_and_keeps_what_waits():
    net = DDPSequential(build("conv"), AUTO, sync_norm_stats="running")
    rows = world().rank + 2
    x, y = data("conv", rows)
    trained(net, x, y)
    net.model.double()
    learn(net, x, y)  # deltas wait in the net's own memory
    before = net.state_dict()
    net.step()
    assert net.state_dict() != before
    net.check_sync()


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_layer_that_one_rank_also_puts_into_another_net_keeps_nobody_waiting():
    """As rank 0 does to look at the features of a layer: only its own memory moves."""
    net, twin = (DDPSequential(build("mlp"), AUTO, timeout_s=20) for _ in range(2))
    twin.model.params_from(net.model)
    x, y = data("mlp", 4, seed=world().rank)
    for one in (net, twin):
        learn(one, x, y)
        if one is net and world().rank == 0:
            Sequential(*net.model.layers[:2])(x)
            learn(one, x, y)
        one.step()
    net.check_sync()
    assert net.state_dict() == twin.state_dict()


@pytest.mark.ranks(2)
def test_running_values_of_nobody_do_not_weigh_in_the_first_batch():
    net = DDPSequential(Sequential(BatchNorm2d(1)), AUTO, sync_norm_stats="running")
    net.model[0].delta_mu_w = [0.0]
    net.step()
    trained(net, [[1.0], [3.0]], 0.0)
    assert net.model[0].running_mean.tolist() == [2.0]


@pytest.mark.ranks([2, 3])
def test_everybody_starts_from_rank_0():
    comm = world()
    manual_seed(100 + comm.rank)
    model = build("conv")
    model[1].running_mean += comm.rank + 1
    before = comm.all_gather_object(model.state_dict(running=True))
    assert before[0] != before[1]
    net = DDPSequential(model, AUTO)
    assert net.state_dict(running=True) == before[0]
    net.check_sync()
    assert (net.rank, net.world_size) == (comm.rank, comm.size)


@pytest.mark.ranks(2)
def test_replicas_stay_bit_identical_with_different_batches_and_one_all_reduce_a_step():
    comm = world()
    net = DDPSequential(build("conv"), AUTO, sync_norm_stats="running")
    rows = 1 if comm.rank == 0 else 300  # cap classes 0.1 and 3: the tighter one counts
    with trace() as seen:
        for step in range(3):
            x, y = data("conv", rows, seed=10 * step + comm.rank)
            trained(net, x.float(), y.float())
    assert [event.op for event in seen.events] == ["all_reduce"] * 3
    net.check_sync()
    norms = comm.all_gather_object(net.model.get_norm_mean_var()["BatchNorm2d()_1"][:2])
    assert norms[0] == norms[1]
    net.eval()
    with trace() as seen:
        net(data("conv", 2)[0])
    assert seen.events == []


@pytest.mark.ranks(2)
def test_the_tightest_bound_present_counts_for_all():
    comm = world()
    net = DDPSequential(Sequential(Linear(1, 1, bias=False)), AUTO, average=False)
    net.model[0].mu_w, net.model[0].var_w = [0.0], [1.0]
    rows = 1 if comm.rank == 0 else 300
    net(np.ones(rows))
    net.model.set_delta_z(np.full(rows, 1e6), np.zeros(rows))
    net.backward()
    net.step()
    assert net.model[0].mu_w[0] == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.ranks(2)
def test_ranks_that_differ_are_told_where():
    comm = world()
    layers = [Linear(2, 3), ReLU()] if comm.rank == 0 else [Linear(2, 4), ReLU()]
    with pytest.raises(CollectiveMismatch, match=r"rank 1: Linear\(2,4\)"):
        DDPSequential(Sequential(*layers), AUTO)
    net = Sequential(Linear(2, 3))
    with pytest.raises(CollectiveMismatch, match=r"torch\.float64"):
        DDPSequential(net.double() if comm.rank else net, AUTO)
    good = DDPSequential(Sequential(Linear(2, 2), ReLU(), Linear(2, 1)), AUTO)
    if comm.rank == 1:
        good.model[2].mu_b = [17.0]
    with pytest.raises(CollectiveMismatch, match=r"Linear\.2 differs"):
        good.check_sync()


@pytest.mark.ranks(2)
def test_a_place_that_contradicts_the_world_is_refused():
    with pytest.raises(PlatformError, match=r"\(1, 3\) != \("):
        DDPSequential(build("mlp"), DDPConfig([], "auto", 1, 3))
    rank = world().rank
    net = DDPSequential(build("mlp"), DDPConfig([], "auto", rank, 2))
    assert net.get_device_with_index() == "cpu"
    net.barrier()


@pytest.mark.ranks(2, backend="gloo")
def test_a_named_backend_gets_a_group_of_its_own():
    net = DDPSequential(build("mlp"), DDPConfig([], "shm"))
    assert net.comm.backend == "shm"
    x, y = data("mlp", 4)
    trained(net, x.float(), y.float())
    net.check_sync()


@pytest.mark.ranks(4)
def test_a_part_of_the_world_can_train_alone():
    comm = world()
    pair = comm.split(comm.rank // 2)
    manual_seed(comm.rank)
    net = DDPSequential(build("mlp"), AUTO, comm=pair)
    assert net.world_size == 2
    states = comm.all_gather_object(net.state_dict())
    assert states[0] == states[1]
    assert states[2] == states[3]
    assert states[0] != states[2]


@pytest.mark.ranks(2)
def test_rank_0_writes_the_file(tmp_path):
    net = DDPSequential(build("conv"), AUTO)
    net.save(tmp_path / "net.pt")
    other = build("conv")
    other.load(tmp_path / "net.pt")
    assert other.state_dict() == net.state_dict()


@pytest.mark.ranks(3)
def test_a_whole_epoch_of_batches_reaches_every_row():
    comm = world()
    x = np.arange(10.0)
    net = DDPSequential(Sequential(Linear(1, 1)), AUTO)
    seen = []
    for a, b in batches(x, x, 2, seed=3):
        trained(net, a, b)
        seen += a.tolist()
    everything = sorted(v for share in comm.all_gather_object(seen) for v in share)
    assert everything == x.tolist()
    net.check_sync()


def test_one_process_is_a_world():
    model = build("mlp")
    net = DDPSequential(model, AUTO, average=True)
    twin = build("mlp")
    twin.params_from(model)
    x, y = data("mlp", 5)
    for one in (net, twin):
        trained(one, x.float(), y.float())
    assert net.state_dict() == twin.state_dict()
    assert (net.rank, net.world_size) == (0, 1)
    assert np.array_equal(net.get_outputs()[0], net.model.get_outputs()[0])
    assert len(net.output_to_host()) == 10
    assert net.output_z_buffer is model.output_z_buffer
    assert net.input_delta_z_buffer is model.input_delta_z_buffer
    assert DDPConfig([0, 1], "gloo", 1, 2).device_ids == [0, 1]


def _train(fails):
    net = DDPSequential(build("mlp"), AUTO, timeout_s=20)
    x, y = data("mlp", 4, seed=world().rank)
    learn(net, x.float(), y.float())
    if fails and world().rank == 1:
        raise ValueError("between forward and step")
    net.step()
    net.check_sync()
    return net.state_dict()["Linear.0"][0][0]


def test_it_runs_inside_unisono_run_and_a_raising_rank_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # failed runs keep their logs
    results = unisono.run(_train, False, ranks=2, timeout_s=60)
    assert results[0] == results[1]
    with pytest.raises(RankFailed, match="between forward and step"):
        unisono.run(_train, True, ranks=2, timeout_s=60)


SCRIPT = """
import os
import sys
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
child = os.fork()  # a second process, which has no launcher either
from unisono.bayes import DDPConfig, DDPSequential, Linear, Sequential
net = DDPSequential(Sequential(Linear(2, 2)), DDPConfig([], "gloo", int(child == 0), 2))
net.check_sync()
print(f"agreed {net.rank} {net.world_size}\\n", end="", flush=True)
if child:
    sys.exit(os.waitpid(child, 0)[1] != 0)
"""


def test_it_starts_a_world_by_itself_where_an_address_is_known(tmp_path, monkeypatch, interpreter):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    for _ in range(3):  # a port that is free now may be taken a moment later
        done = interpreter.run(["train.py", str(free_port())], cwd=tmp_path)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "agreed 0 2", "agreed 1 2"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


UNDER_A_LAUNCHER = """
import sys
import numpy as np
from unisono.bayes import DDPConfig, DDPSequential, Linear, OutputUpdater, Sequential, manual_seed
from unisono.comm import close_world
for backend in sys.argv[1:]:
    net = DDPSequential(Sequential(Linear(2, 2)), DDPConfig([], backend=backend))
    net(np.ones((net.rank + 1, 2)))
    OutputUpdater("cpu").update(
        net.output_z_buffer, np.ones(2 * net.rank + 2), 0.1, net.input_delta_z_buffer
    )
    net.backward()
    net.step()
    net.check_sync()
    with open(f"{backend}{net.rank}.txt", "w") as file:  # two ranks may print into one line
        file.write(f"agreed {net.rank} {net.world_size} {net.comm.backend}")
    if backend != sys.argv[-1]:
        close_world()  # the next one starts a world, as the first did
"""


def launched(tmp_path, *command):
    script = tmp_path / "train.py"
    script.write_text(UNDER_A_LAUNCHER)
    done = subprocess.run(
        [*command],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.stem: path.read_text() for path in tmp_path.glob("*[01].txt")}


def test_a_script_runs_under_unisono_run(forked_python, tmp_path):
    command = [forked_python, "-m", "unisono", "run", "--ranks", "2", "train.py", "--", "auto"]
    found = launched(tmp_path, *command)
    assert found == {"auto0": "agreed 0 2 shm", "auto1": "agreed 1 2 shm"}


@pytest.fixture(scope="module")
def under_mpiexec(mpiexec, interpreter, tmp_path_factory):
    """What each rank of one MPI job said of each backend."""
    words = [mpiexec, "-n", "2", interpreter.python, "train.py", "mpi", "auto"]
    return launched(tmp_path_factory.mktemp("mpi"), *words)


@pytest.mark.mpi
@pytest.mark.parametrize(("backend", "used"), [("auto", "shm"), ("mpi", "shm")])
def test_a_script_runs_under_mpiexec(under_mpiexec, backend, used):
    found = [under_mpiexec[f"{backend}{rank}"] for rank in (0, 1)]
    assert found == [f"agreed 0 2 {used}", f"agreed 1 2 {used}"]


@pytest.mark.ranks(2)
def test_a_size_that_only_some_ranks_know_is_no_difference():
    net = Sequential(Conv2d(1, 2, 3), ReLU())
    if world().rank == 1:
        net(np.zeros((1, 1, 5, 5)))
    DDPSequential(net, AUTO).check_sync()
    with pytest.raises(CollectiveMismatch, match="layer 0 differs"):
        DDPSequential(Sequential(Conv2d(1, 2 + world().rank, 3)), AUTO)

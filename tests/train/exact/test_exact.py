"""One hash of weights, buffers and optimizer state: any number of ranks, whoever dies."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset

import unisono
from unisono.errors import (
    CheckpointError,
    CollectiveMismatch,
    PlatformError,
    RankFailed,
    UnisonoError,
)
from unisono.launch.elastic.policy import read_events
from unisono.train.exact.data import Shards
from unisono.train.exact.shards import fresh, nodes_in, tree_sum

MODELS = ("mlp", "cnn", "transformer", "lstm")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 24, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(x)[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.into(x)).mean(1))


def made(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a model and the shape of one input."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 5)), (30,)
    if name == "cnn":
        first = (nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
        rest = (nn.Dropout(0.2), nn.Flatten(), nn.Linear(6 * 16, 5))
        return nn.Sequential(*first, *rest), (2, 8, 8)
    return (Recurrent() if name == "lstm" else Attending()), (6, 8)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the sha256 of weights, buffers and optimizer state."""
    found = hashlib.sha256()
    states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
    for tensor in [*model.state_dict().values(), *states]:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(name: str, steps: int = 6, shards: int = 8, pause_s: float = 0.0, **more: object) -> str:
    """Train, and return the hash."""
    torch.manual_seed(0)
    model, shape = made(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, *shape, generator=generator)
    y = torch.randint(0, 5, (200,), generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    settings = {"batch_size": 50, "shards": shards, "steps": steps, "clip": 1.0, **more}
    run = unisono.train.elastic(model, optimizer, (x, y), scheduler=scheduler, **settings)
    for step in run:
        step(lambda batch: functional.cross_entropy(model(batch.x), batch.y))
        time.sleep(pause_s)
    return digest(model, optimizer)


def small_loop(samples: int = 64, **settings: object) -> Iterator[object]:
    """Yield the steps of a small training, each after it was taken."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(samples, 2, generator=torch.Generator().manual_seed(1))
    for step in unisono.train.elastic(model, optimizer, data, batch_size=8, **settings):
        step(lambda batch: model(batch[0]).mean())
        yield step


# The same bits.


@pytest.mark.parametrize(
    ("name", "shards"), [*((name, count) for name in MODELS for count in (8, 6)), ("mlp", 3)]
)
def test_three_ranks_end_with_the_bits_of_one_process(name, shards):
    alone = train(name, shards=shards)
    assert set(unisono.run(train, name, shards=shards, ranks=3, elastic=True)) == {alone}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_has_the_same_hash_also_in_fresh_processes(ranks):
    method = "spawn" if ranks == 2 else "auto"
    spawned = unisono.Platform(device="cpu", ranks=ranks, spawn_method=method)
    assert set(unisono.run(train, "cnn", on=spawned, elastic=True)) == {train("cnn")}


@pytest.mark.filterwarnings("default:elastic")
def test_more_ranks_than_shards_leave_some_without_work_and_the_bits_alone(capfd):
    found = set(unisono.run(train, "mlp", shards=2, ranks=3, elastic=True))
    assert found == {train("mlp", shards=2)}
    assert capfd.readouterr().err.count("on up to 3 ranks: 1 of them") == 1


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_step_is_that_of_the_whole_batch(shards):
    torch.manual_seed(0)
    model, twin = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(21, 6).double(), torch.randn(21, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 7, "shards": shards, "shuffle": False}
    losses = [
        step(lambda b: functional.mse_loss(model(b.x), b.y))
        for step in unisono.train.elastic(model, optimizer, (x, y), **settings)
    ]
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    for begin, found in zip((0, 7, 14), losses, strict=True):
        loss = functional.mse_loss(twin(x[begin : begin + 7]), y[begin : begin + 7])
        other.zero_grad()
        loss.backward()
        other.step()
        assert found == pytest.approx(loss.item())
    torch.testing.assert_close(model.weight, twin.weight)


class Noisy(Dataset):
    """Samples with noise of three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(30) + random.random() + np.random.rand()
        return noise.float() * index, index % 5


def train_noisy(workers: int) -> str:
    torch.manual_seed(0)
    model, _ = made("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    settings = {"batch_size": 16, "shards": 4, "steps": 5, "workers": workers}
    for step in unisono.train.elastic(model, optimizer, Noisy(), **settings):
        step(lambda batch: functional.cross_entropy(model(batch.x), batch.y))
    return digest(model, optimizer)


def test_workers_that_fetch_ahead_change_no_bit():
    assert set(unisono.run(train_noisy, 1, ranks=2, elastic=True)) == {train_noisy(0)}


def test_generators_and_threads_of_the_user_are_not_touched():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    threads = torch.get_num_threads()
    model, _ = made("mlp")
    torch.set_rng_state(states[0])
    data = torch.zeros(20, 30), torch.zeros(20, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in unisono.train.elastic(model, optimizer, data, batch_size=10, threads=1):
        step(lambda b: functional.cross_entropy(functional.dropout(model(b.x)), b.y))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert torch.get_num_threads() == threads


def test_buffers_that_do_not_change_keep_their_bits_infinities_too():
    model = nn.Linear(3, 1)
    model.register_buffer("mask", torch.tensor([-torch.inf, 0.1, 0.3]))
    model.register_buffer("count", torch.tensor(7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.mask.clone()
    for step in unisono.train.elastic(model, optimizer, torch.randn(18, 3), batch_size=6, shards=6):
        step(lambda batch: model(batch[0]).mean())
    assert torch.equal(model.mask, before)
    assert model.count == 7


def test_a_parameter_without_gradient_stays_out_of_the_step():
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model["idle"].weight.detach().clone()
    for step in unisono.train.elastic(model, optimizer, torch.randn(16, 3), batch_size=8):
        step(lambda batch: model["used"](batch[0]).mean())
    assert torch.equal(model["idle"].weight, before)
    assert model["idle"].weight.grad is None


def test_metrics_and_a_gradient_scaler():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    x = torch.arange(24.0).reshape(8, 3)
    run = unisono.train.elastic(model, optimizer, x, batch_size=8, shards=4, scaler=scaler)
    gradient = x.mean(0)
    before = model.weight.detach().clone()

    for step in run:

        def loss(batch: list[torch.Tensor], step: object = step) -> torch.Tensor:
            step.log(mean=batch[0].mean())
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
                return model(batch[0]).mean()

        step(loss)
        assert step.metrics == {"mean": pytest.approx(x.mean().item())}
        assert step.is_logger
    torch.testing.assert_close(model.weight[0], before[0] - 0.1 * gradient)


# Whoever dies.


def test_ranks_killed_and_stopped_at_random_moments_change_no_bit():
    chance, ended = random.Random(7), set[int]()
    job = unisono.submit(train, "cnn", 60, pause_s=0.05, ranks=4, elastic=True, timeout_s=100.0)
    while not job.wait(chance.uniform(0.05, 0.4)):
        supervisor = job._launch._supervisor
        pids = [] if supervisor is None else [rank.pid for rank in supervisor.ranks._ranks]
        if job.members() == 4 and len(ended) < 8 and len(set(pids) - ended) > 1:
            ended.add(pid := chance.choice(sorted(set(pids) - ended)))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]))
    assert len(ended) >= 3
    assert set(job.result()) == {train("cnn", 60)}


class Mischief:
    """Ends ranks at moments that can be told; each happens once, one after the other.

    As a part of the state that newcomers get, it also knows when they get it, and from whom.
    """

    PLAN = ("rank 0", "one of two", "two of two", "first", "in recovery", "stopped")

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.step, self.calls = -1, 0

    def take(self, what: str) -> bool:
        """Whether it is on this process to have it happen."""
        try:
            file = (self.folder / what).open("x")
        except FileExistsError:
            return False
        with file:
            file.write(str(self.step))
        return True

    def look(self, step: int, members: int) -> None:
        """Come by in a closure; with four members each has two shards, and more in recovery."""
        self.calls = self.calls + 1 if step == self.step else 1
        self.step = step
        done = [self.folder / what for what in self.PLAN if (self.folder / what).exists()]
        if len(done) == len(self.PLAN):
            return
        what = self.PLAN[len(done)]
        latest = int(done[-1].read_text() or step) if done else 0
        if what in ("two of two", "in recovery"):
            is_due = step == latest and (what == "two of two" or self.calls > 2)
        else:
            is_due = step > latest and members == 4
        is_due &= what != "rank 0" or os.environ["RANK"] == "0"
        if is_due and self.take(what):
            os.kill(os.getpid(), signal.SIGSTOP if what == "stopped" else signal.SIGKILL)

    def state_dict(self) -> dict[str, int]:
        if self.step > 0 and self.take("donor"):
            os.kill(os.getpid(), signal.SIGKILL)
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["step"] > 0 and self.take("newcomer"):
            os.kill(os.getpid(), signal.SIGKILL)


def train_in_mischief(steps: int, folder: str) -> tuple[str, int]:
    torch.manual_seed(0)
    model, shape = made("cnn")
    x, y = torch.ones(40, *shape), torch.zeros(40, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())
    mischief = Mischief(folder)
    run = unisono.train.elastic(model, optimizer, (x, y), batch_size=16, steps=steps)
    if folder:
        run.state(mischief=mischief)
    for step in run:

        def loss(batch: object, step: object = step) -> torch.Tensor:
            if folder:
                mischief.look(step.number, run.members)
            return functional.cross_entropy(model(batch.x), batch.y)

        step(loss)
        time.sleep(0.03 if folder else 0.0)
    return digest(model, optimizer), run.members


def test_rank_0_two_at_once_deaths_in_recovery_donors_newcomers_and_a_stop(tmp_path):
    found = unisono.run(train_in_mischief, 100, str(tmp_path), ranks=4, elastic=True)
    assert {path.name for path in tmp_path.iterdir()} == {*Mischief.PLAN, "donor", "newcomer"}
    assert {bits for bits, _ in found} == {train_in_mischief(100, "")[0]}


def test_a_member_for_which_others_wait_too_long_is_ended_and_replaced(tmp_path, capfd):
    def slow() -> str:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = unisono.train.elastic(model, optimizer, torch.ones(16, 2), batch_size=8, steps=8)
        for step in run:
            step(lambda batch: model(batch[0]).mean())
            if step.number == 3 and os.environ["RANK"] == "1":
                with contextlib.suppress(FileExistsError):
                    (tmp_path / "slept").touch(exist_ok=False)
                    time.sleep(100.0)
        return str(model.weight.tolist())

    patient = unisono.Platform(device="cpu", ranks=2, comm_timeout_s=3.0)
    assert len(set(unisono.run(slow, on=patient, elastic=True, timeout_s=60))) == 1
    assert "is ended: quiet for" in capfd.readouterr().err


def test_a_job_can_be_resized_while_it_trains(tmp_path):
    job = unisono.submit(train, "cnn", 60, pause_s=0.1, ranks=(1, 4), logs=tmp_path)
    sizes = [1, 4, 2, 3]
    for size in sizes:
        job.resize(size)
        end = time.monotonic() + 30
        while job.members() != size and time.monotonic() < end and not job.done():
            time.sleep(0.05)
    assert set(job.result(100)) == {train("cnn", 60)}
    seen = [event["members"] for event in read_events(job.dir)]
    assert [size for size in (4, 2, 3) if size in seen] == [4, 2, 3]
    with pytest.raises(PlatformError, match="ranks from 1 to 4"):
        job.resize(5)
    with pytest.raises(PlatformError, match="it has ended"):
        job.resize(2)
    shutil.rmtree(job.dir)  # as it goes without `logs`
    with pytest.raises(PlatformError, match="it has ended"):
        job.resize(2)


def test_when_all_ranks_die_the_error_says_so(tmp_path):
    def die() -> None:
        for step in small_loop(epochs=9):
            if step.number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed, match="killed by SIGKILL") as caught:
        unisono.run(die, ranks=1, elastic=True)
    assert "from a checkpoint" in "".join(caught.value.__notes__)


# With the rest of unisono.


def train_and_save(place: str, steps: int, stop_at: int | None = None, **more: object) -> str:
    torch.manual_seed(0)
    model, shape = made("cnn")
    x, y = torch.ones(40, *shape), torch.zeros(40, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())
    seen: list[int] = []
    settings = {"batch_size": 20, "shards": 4, "steps": steps, **more}
    run = unisono.train.elastic(model, optimizer, (x, y), **settings)
    run.state(seen=seen)
    checkpoint = unisono.Checkpoint(place)
    checkpoint.restore(run=run)
    for step in run:
        step(lambda batch: functional.cross_entropy(model(batch.x), batch.y))
        seen.append(step.number)
        if step.number == stop_at and step.is_logger:
            unisono.launch.simulate_preemption()
        if unisono.should_stop():
            checkpoint.save(step.number + 1, run=run)
            break
    assert seen == list(range(run.number))
    return digest(model, optimizer)


def test_a_stop_that_all_members_agree_on_and_a_checkpoint_for_another_number_of_ranks(tmp_path):
    whole = train_and_save(str(tmp_path / "none"), 8)
    place = str(tmp_path / "saved")
    first = set(unisono.run(train_and_save, place, 8, 2, ranks=3, elastic=True))
    assert len(first) == 1
    assert first != {whole}
    assert set(unisono.run(train_and_save, place, 8, ranks=2, elastic=True)) == {whole}
    with pytest.raises(CheckpointError, match="seed: 0 there, 1 here"):
        train_and_save(place, 8, seed=1)
    with pytest.warns(UserWarning, match="the bits will differ"):
        train_and_save(place, 8, seed=1, strict=False)


def test_a_record_of_an_elastic_run_has_one_curve(tmp_path):
    record = str(tmp_path / "digits")
    results = unisono.run(lambda: len(list(small_loop(48))), ranks=2, elastic=True, record=record)
    lines = (Path(results.report.dir) / "metrics.csv").read_text().splitlines()
    assert ("loss" in lines[0], len(lines)) == (True, 1 + 6)


# What cannot be right is refused.


def test_a_loop_that_ends_on_one_member_alone_is_an_error():
    def leaves_early() -> None:
        for step in small_loop():
            if step.is_logger and step.number == 2:
                break

    with pytest.raises(CollectiveMismatch, match="ended their loop before step 3"):
        unisono.run(leaves_early, ranks=2, elastic=True)


def changed(what: str, everywhere: bool, killed: str | None = None) -> str:
    """Train while the program changes something between steps: on all members, or on one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    for step in unisono.train.elastic(model, optimizer, data, batch_size=16, epochs=2):
        step(lambda batch: model(batch[0]).square().mean())
        if killed and step.number == 3 and not step.is_logger and not Path(killed).exists():
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step.number >= 2 and (everywhere or step.is_logger):
            with torch.no_grad():
                if what == "weights":
                    model[0].weight.clamp_(-0.1, 0.1)
                elif what == "buffers":
                    model[1].running_mean.mul_(0.5)
                else:
                    optimizer.param_groups[0]["lr"] *= 0.5
    return digest(model, optimizer)


@pytest.mark.parametrize("what", ["weights", "buffers", "learning rate"])
def test_what_a_program_changes_between_steps_it_changes_on_all_members(what, tmp_path):
    alone, killed = changed(what, True), str(tmp_path / "killed")
    assert set(unisono.run(changed, what, True, killed, ranks=2, elastic=True)) == {alone}
    with pytest.raises(CollectiveMismatch, match="came to step 3 with other parameters"):
        unisono.run(changed, what, False, ranks=2, elastic=True)


class Drifting(nn.Module):
    """Has a buffer that steps change and that no state_dict of it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.lerp_(x.mean(0), 0.5)
        return self.inner(x - self.seen)


def test_a_state_holds_buffers_that_are_not_persistent_and_names_are_not_taken_twice():
    def loop() -> unisono.train.ElasticRun:
        torch.manual_seed(0)
        model, data = Drifting(), torch.randn(16, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return unisono.train.elastic(
            model, optimizer, data, batch_size=8, epochs=2, scheduler=schedule
        )

    whole, again = loop(), loop()
    for step in whole:
        step(lambda batch: whole.model(batch[0]).mean())
        if step.number == 1:
            state = copy.deepcopy(whole.state_dict())
    again.load_state_dict(state)
    for step in again:
        step(lambda batch: again.model(batch[0]).mean())
    assert torch.equal(whole.model.seen, again.model.seen)
    assert torch.equal(whole.model.inner.weight, again.model.inner.weight)
    with pytest.raises(UnisonoError, match=r"run.state\(my_scheduler="):
        whole.state(scheduler=[])
    whole.state(scaler=[])  # there is none


def test_a_function_that_does_not_train_elastically_is_refused():
    with pytest.raises(PlatformError, match="returned without training"):
        unisono.run(lambda: unisono.world().size, ranks=2, elastic=True)


def mistaken(what: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(batch: list[torch.Tensor]) -> torch.Tensor:
        mean = model(batch[0]).mean()
        if what == "collective":
            mean = mean + unisono.world().all_reduce(batch[0].sum())
        return mean.detach() if what == "detached" else mean

    data = torch.randn(64, 2, generator=torch.Generator().manual_seed(1))
    for step in unisono.train.elastic(model, optimizer, data, batch_size=8):
        if what != "idle":
            step(loss)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("collective", "it called all_reduce: a closure runs once per shard"),
        ("detached", "requires_grad=True, outside of torch.no_grad"),
        ("idle", "the body of the loop did not call it"),
    ],
)
def test_a_loop_that_cannot_be_right_is_the_error(what, message):
    with pytest.raises(RankFailed, match=message):
        unisono.run(mistaken, what, ranks=3, elastic=True)
    with pytest.raises(UnisonoError, match=message):
        mistaken(what)


def train_unlike(what: str) -> None:
    """Train with another seed, or with other data from the start or from step 10 on, on rank 1."""
    rank = int(os.environ["RANK"])
    seeds = {"data": rank if what == "data" else 0, "seed": rank if what == "seed" else 0}
    data = torch.randn(200, 3, generator=torch.Generator().manual_seed(seeds["data"]))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"batch_size": 8, "steps": 80, "seed": seeds["seed"]}
    for step in unisono.train.elastic(model, optimizer, data, **settings):
        if what == "later data" and step.number == 10 and rank:
            data.add_(1.0)
        step(lambda batch: model(batch[0]).square().mean())


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("seed", RankFailed, r"seed: \d"),
        ("data", RankFailed, r"data: \d+"),
        ("later data", CollectiveMismatch, "sample 64 is not the same"),
    ],
)
def test_members_that_are_unlike_are_refused(what, kind, message):
    with pytest.raises(kind, match=message):
        unisono.run(train_unlike, what, ranks=2, elastic=True)


def test_an_ordinary_world_is_refused():
    with pytest.raises(RankFailed, match="elastic=True"):
        unisono.run(train, "mlp", ranks=2)


class Stream(IterableDataset):
    def __iter__(self) -> object:
        yield torch.ones(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 4}, "4 < 8"),
        ({"batch_size": 99}, "99 > 20"),
        ({"data": (torch.ones(20, 2), torch.ones(15))}, "20 != 15"),
        ({"data": Stream()}, "no length"),
        ({"model": nn.SyncBatchNorm(2)}, "SyncBatchNorm"),
        ({"model": nn.Linear(2, 2)}, "not parameters of the model"),
        ({"shards": 0}, "shards=0"),
    ],
)
def test_bad_input_is_refused(change, message):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "data": torch.randn(20, 2), "batch_size": 8, **change}
    with pytest.raises(PlatformError, match=message):
        unisono.train.elastic(given.pop("model"), optimizer, given.pop("data"), **given)


def test_ranks_that_cannot_be_fewest_and_most_are_refused():
    for ranks in ((3, 2), (0, 2), (1, 2, 3)):
        with pytest.raises(PlatformError, match="fewest and the most"):
            unisono.run(train, "mlp", ranks=ranks)
    with pytest.raises(PlatformError, match="ranks of MPI end together"):
        unisono.run(train, "mlp", on="mpi", ranks=2, elastic=True)


# The arithmetic.


def test_sums_of_subtrees_are_those_of_the_whole_tree():
    values = [1e16, 1.0, -1e16, 1.0, 3.0, 1e-9]
    whole = tree_sum(0, 6, lambda a, n: values[a] if n == 1 else None, lambda a, b: a + b)
    for cuts in ([(0, 6)], [(0, 1), (1, 5), (5, 6)], [(0, 3), (3, 6)]):
        nodes = {node for run in cuts for node in nodes_in(run, 0, 6)}
        known = {
            (a, n): tree_sum(a, n, lambda s, m: values[s] if m == 1 else None, lambda x, y: x + y)
            for a, n in nodes
        }
        assert tree_sum(0, 6, lambda a, n, k=known: k.get((a, n)), lambda x, y: x + y) == whole


def test_batches_of_any_kind_of_dict_have_memory_of_their_own():
    given = defaultdict(list, x=torch.arange(9.0)[1:], more=[torch.arange(9.0)[3:]])
    batch = fresh(given)
    assert (type(batch), batch["none"]) == (defaultdict, [])
    for old, new in ((given["x"], batch["x"]), (given["more"][0], batch["more"][0])):
        assert torch.equal(old, new)
        assert new.storage_offset() == 0


def test_an_epoch_holds_each_sample_once_whatever_the_shards():
    data = torch.arange(40.0)
    for shards in (1, 3, 4):
        cut = Shards(data, 10, shards, 5, shuffle=True, collate=None)
        seen = [int(i) for step in range(4) for s in range(shards) for i in cut.indices(step, s)]
        assert sorted(seen) == list(range(40))
        again = Shards(data, 10, 1, 5, shuffle=True, collate=None)
        assert seen == [int(i) for step in range(4) for i in again.indices(step, 0)]

"""What `Checkpoint` does with files, with ranks that disagree, and with damage."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

import unisono
from unisono import bayes
from unisono.cli import main
from unisono.comm import world
from unisono.comm.machine import own_card
from unisono.data_parallel import DataParallel
from unisono.errors import CheckpointError, RankFailed
from unisono.launch.pool import monitor
from unisono.nn import DistributedLinear, full_state_dict
from unisono.topology import Partition
from unisono.train import Checkpoint
from unisono.train.checkpoint import folder, saving


def model(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


def visible(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def everything(directory):
    return sorted(str(path.relative_to(directory)) for path in Path(directory).rglob("*"))


def test_without_a_checkpoint_restore_returns_none_and_changes_nothing(tmp_path):
    net = model()
    before = [p.clone() for p in net.parameters()]
    state = torch.get_rng_state()
    checkpoint = Checkpoint(tmp_path / "new" / "place")
    assert checkpoint.restore(model=net) is None
    assert checkpoint.latest is None
    assert checkpoint.steps == []
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, net.parameters()))


def test_values_generators_and_anything_with_a_state_come_back(tmp_path):
    class Counter:
        def __init__(self):
            self.seen = {"of": [torch.arange(3.0)], "n": 1}

        def state_dict(self):
            return self.seen

        def load_state_dict(self, state):
            self.seen = state

    generator = torch.Generator().manual_seed(5)
    counter = Counter()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(
        7,
        counter=counter,
        generator=generator,
        scaler=scaler,
        epoch=2,
        losses=[0.5, torch.tensor(0.25)],
        config={"a.b": 1, "a": {"b": torch.ones(2)}, "array": np.arange(3)},
    )
    expected = torch.rand(3, generator=generator)
    counter.seen["of"][0].zero_()
    counter.seen["n"] = 9
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    restored = checkpoint.restore(counter=counter, generator=generator, scaler=other)
    assert restored.step == 7
    assert restored.ranks == 1
    assert restored["epoch"] == 2
    assert "losses" in restored
    assert "counter" not in restored
    assert (restored.get("epoch"), restored.get("other", 5)) == (2, 5)
    assert list(restored) == list(restored.keys()) == ["epoch", "losses", "config"]
    assert len(restored) == 3
    assert restored["losses"] == [0.5, torch.tensor(0.25)]
    assert restored["config"]["a"]["b"].tolist() == [1, 1]
    assert restored["config"]["a.b"] == 1
    assert restored["config"]["array"].tolist() == [0, 1, 2]
    assert torch.equal(counter.seen["of"][0], torch.arange(3.0))
    assert counter.seen["n"] == 1
    assert torch.equal(torch.rand(3, generator=generator), expected)
    assert other.state_dict()["scale"] == 128.0


class WithExtra(nn.Linear):
    """A layer that adds something to its state."""

    def __init__(self, extra):
        super().__init__(2, 1)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_an_extra_state_may_hold_tensors_and_change_its_kind(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    for number, extra in enumerate([torch.arange(3), {"of": torch.arange(3)}, [1, torch.ones(2)]]):
        layer = WithExtra(extra)
        checkpoint.save(number, model=layer)
        layer.extra = "nothing"
        checkpoint.restore(model=layer)
        assert str(layer.extra) == str(extra)


def test_a_quantized_tensor_comes_back(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give them up
        value = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
        checkpoint = Checkpoint(tmp_path)
        checkpoint.save(1, value=value)
        assert torch.equal(checkpoint.restore()["value"], value)


def test_a_series_is_smoothed_over_the_steps_before_and_after_a_restart(tmp_path):
    def taught(net, series):
        updater = bayes.OutputUpdater(net.device)
        for y in series:
            net(np.array([[y - 0.1]]))
            updater.update(net.output_z_buffer, [y], 0.1, net.input_delta_z_buffer)
            net.backward()
            net.step()

    net, again = (bayes.Sequential(bayes.SLSTM(1, 3, 1), bayes.SLinear(3, 1)) for _ in range(2))
    checkpoint, series = Checkpoint(tmp_path), np.sin(np.arange(6.0))
    taught(net, series[:4])
    checkpoint.save(4, net=net)
    taught(net, series[4:])
    taught(again, series[2:])  # a life of its own before
    checkpoint.restore(net=again)
    taught(again, series[4:])
    for found, want in zip(again.smoother(), net.smoother(), strict=True):
        assert found.tolist() == want.tolist()
        assert len(want) == 6


def test_random_states_are_left_alone_when_asked(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1)
    torch.rand(1), random.random(), np.random.rand()
    now = torch.get_rng_state()
    checkpoint.restore(random_states=False)
    assert torch.equal(now, torch.get_rng_state())
    checkpoint.restore()
    assert not torch.equal(now, torch.get_rng_state())


def test_the_last_ones_and_the_best_one_are_kept(tmp_path):
    net = model()
    checkpoint = Checkpoint(tmp_path, keep=2, keep_best="min")
    for step, loss in [(1, float("nan")), (2, 0.1), (3, 0.3), (4, torch.tensor(0.4))]:
        checkpoint.save(step, metric=loss, model=net)
    assert checkpoint.steps == [2, 3, 4]
    assert checkpoint.best == 2
    assert checkpoint.latest == 4
    assert checkpoint.restore(checkpoint.best, model=net).step == 2
    with pytest.raises(CheckpointError, match=r"steps \[2, 3, 4\]"):
        checkpoint.restore(1, model=net)
    Checkpoint(tmp_path, keep=None).save(5, model=net)
    assert checkpoint.steps == [2, 3, 4, 5]
    for wrong in (0, -1, "3"):
        with pytest.raises(CheckpointError, match="keep=3"):
            Checkpoint(tmp_path, keep=wrong)
    with pytest.raises(CheckpointError, match="min"):
        Checkpoint(tmp_path, keep_best="smallest")


def test_after_going_back_the_latest_is_the_one_saved_last(tmp_path):
    net = model()
    checkpoint = Checkpoint(tmp_path, keep=3)
    for step in (10, 20, 30):
        checkpoint.save(step, model=net)
    checkpoint.restore(10, model=net)
    with torch.no_grad():
        net[0].weight.fill_(7)
    checkpoint.save(20, model=net)  # replaces the other 20; 30 is from a future that was given up
    assert checkpoint.steps == [10, 30, 20]
    assert checkpoint.latest == 20
    fresh = model(1)
    assert checkpoint.restore(model=fresh).step == 20
    assert fresh[0].weight[0, 0] == 7
    assert len(visible(tmp_path)) == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_the_files(tmp_path):
    net = model()
    Checkpoint(tmp_path).save(3, model=net)
    target = {"model": {name: torch.zeros_like(t) for name, t in net.state_dict().items()}}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000003", no_dist=True)
    assert torch.equal(target["model"]["0.weight"], net[0].weight)


def save_blocks(directory):
    torch.manual_seed(1)
    size = world().size
    layer = DistributedLinear(Partition([1, 1]), Partition([1, size]), Partition([size, 1]), 5, 7)
    Checkpoint(directory).save(3, model=layer)
    return {name: value.clone() for name, value in full_state_dict(layer).items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [2, 3])
def test_plain_torch_reads_whole_tensors_of_uneven_blocks(rank_pool, tmp_path, ranks):
    expected = rank_pool.run(save_blocks, tmp_path, world=ranks)[0]
    target = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000003", no_dist=True)
    assert expected
    for name, value in expected.items():
        assert torch.equal(target["model"][name], value)
    dcp_to_torch_save(tmp_path / "step-00000003", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert all(torch.equal(whole["model"][name], value) for name, value in expected.items())


def test_a_restore_reads_into_the_tensors_that_are_there(tmp_path):
    net, other = model(), model(1)
    optimizers = [torch.optim.Adam(n.parameters()) for n in (net, other)]
    for n, optimizer in zip((net, other), optimizers, strict=True):
        n(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    Checkpoint(tmp_path).save(1, model=net, optimizer=optimizers[0])
    state = [s["exp_avg"] for s in optimizers[1].state.values()]
    places = [x.data_ptr() for x in (*other.parameters(), *state)]
    Checkpoint(tmp_path).restore(model=other, optimizer=optimizers[1])
    state = [s["exp_avg"] for s in optimizers[1].state.values()]
    assert places == [x.data_ptr() for x in (*other.parameters(), *state)]
    assert all(map(torch.equal, state, (s["exp_avg"] for s in optimizers[0].state.values())))
    with pytest.raises(CheckpointError, match=r"float32 in the checkpoint, \[4, 3\] of float64"):
        Checkpoint(tmp_path).restore(model=other.double(), partial=True)
    with pytest.raises(CheckpointError, match="meta device"):
        Checkpoint(tmp_path).restore(model=model().to("meta"), partial=True)


@pytest.mark.ranks(2)
def test_models_that_differ_between_ranks_are_saved_for_each_of_them(tmp_path):
    net = nn.Linear(300, 300)
    nn.init.constant_(net.weight, float(world().rank))
    Checkpoint(tmp_path).save(1, model=net)
    nn.init.zeros_(net.weight)
    Checkpoint(tmp_path).restore(model=net)
    assert bool((net.weight == world().rank).all())


def test_wrapped_compiled_and_bare_modules_have_one_state(tmp_path):
    class Compiled(nn.Module):  # names are those of torch.compile, without what it loads
        def __init__(self, module):
            super().__init__()
            self._orig_mod = module

    net = model()
    inner = nn.Sequential(Compiled(net[0]), net[1])
    Checkpoint(tmp_path).save(1, model=Compiled(DataParallel(inner)))
    plain = model(1)
    Checkpoint(tmp_path).restore(model=plain)
    assert torch.equal(plain[0].weight, net[0].weight)


def test_what_does_not_fit_is_told_before_anything_changes(tmp_path):
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, model=net, optimizer=optimizer, epoch=1)

    def refuses(text, **objects):
        with pytest.raises(CheckpointError, match=text):
            checkpoint.restore(**objects)

    wide = model(width=5)
    before = [p.clone() for p in wide.parameters()]
    refuses(
        r"0\.weight: \[4, 3\] of float32 in the checkpoint, \[5, 3\] of float32 here",
        model=wide,
        optimizer=optimizer,
    )
    assert all(map(torch.equal, before, wide.parameters()))
    longer = nn.Sequential(*model(), nn.Linear(2, 2))
    refuses(r"2\.weight: not in the checkpoint", model=longer, optimizer=optimizer)
    refuses(r"1\.weight: only in the checkpoint", model=nn.Sequential(net[0]), optimizer=optimizer)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    refuses("Adam in the checkpoint, SGD here", model=net, optimizer=sgd)
    half = torch.optim.Adam(net[0].parameters())
    refuses("group 0: 4 parameters in the checkpoint, 2 here", model=net, optimizer=half)
    groups = torch.optim.Adam([{"params": net[0].parameters()}, {"params": net[1].parameters()}])
    refuses("1 parameter groups in the checkpoint, 2 here", model=net, optimizer=groups)
    refuses("not asked for: optimizer", model=net)
    refuses("nothing under network", network=net)
    refuses("restored\\['epoch'\\]", model=net, optimizer=optimizer, epoch=0)
    refuses("differing in", optimizer=optimizer, partial=True)  # whose parameters?
    assert checkpoint.restore(model=net, partial=True).step == 1
    checkpoint.save(2, net=bayes.Sequential(bayes.Linear(2, 3)))
    for other, text in ((bayes.Linear(2, 4), "in the checkpoint"), (bayes.ReLU(), "only in the")):
        refuses(rf"bayes Sequential(.|\n)*{text}", net=bayes.Sequential(other))


def test_a_loader_without_a_position_is_refused(tmp_path):
    loader = torch.utils.data.DataLoader(torch.arange(4))
    with pytest.raises(CheckpointError, match=r"Resumable\(loader\)"):
        Checkpoint(tmp_path).save(1, loader=loader)


def damage_truncate(step):
    path = next(step.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-40])


def damage_flip(step):
    path = next(step.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_table(step):
    (step / ".metadata").unlink()


def damage_manifest(step):
    (step / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    "harm", [damage_truncate, damage_flip, damage_table, damage_manifest], ids=lambda f: f.__name__
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, harm):
    net = model()
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, model=net)
    checkpoint.save(2, model=net)
    harm(tmp_path / "step-00000002")
    with pytest.warns(UserWarning, match="step 1 is restored, a damaged checkpoint passed over"):
        assert checkpoint.restore(model=net).step == 1
    harm(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoint.restore(model=net)


@pytest.mark.ranks(2, timeout=60)
def test_a_file_that_one_rank_cannot_read_is_damage_for_all(tmp_path, monkeypatch):
    net, checkpoint = model(), Checkpoint(tmp_path)
    checkpoint.save(1, model=net)
    checkpoint.save(2, model=net)
    measured = folder._measured

    def fails(path):
        if world().rank == 1 and path.parent.name == "step-00000002":
            raise OSError(errno.EIO, "Input/output error")
        return measured(path)

    monkeypatch.setattr(folder, "_measured", fails)
    with pytest.warns(UserWarning, match="cannot be read: .*Input/output error"):
        assert checkpoint.restore(model=net).step == 1


def test_leftovers_of_killed_runs_are_swept_by_the_next_save(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1)
    (tmp_path / ".saving-abc-1").mkdir()
    (tmp_path / ".saving-abc-1" / "__0_0.distcp").write_bytes(b"half")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".removed-step-00000000")
    reader = Checkpoint(tmp_path)
    restored = reader.restore()
    assert restored, "though it has no plain values"
    assert (restored.step, len(restored)) == (1, 0)
    assert ".saving-abc-1" in visible(tmp_path), "who only reads must not disturb a writer"
    Checkpoint(tmp_path).save(2)
    assert visible(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.ranks(2)
def test_ranks_that_disagree_are_told_so_on_all_ranks(tmp_path, rank_count):
    rank = world().rank
    with pytest.raises(CheckpointError, match=r"rank 1 looks into .* does not see what rank 0"):
        Checkpoint(tmp_path / f"of-{rank}")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="rank 0 has step 10, rank 1 has 11"):
        checkpoint.save(10 + rank, model=model())
    with pytest.raises(CheckpointError, match=r"rank 0 has metric .0\.0., rank 1 has .1\.0."):
        checkpoint.save(10, metric=float(rank), model=model())
    with pytest.raises(CheckpointError, match="rank 0 has objects model, rank 1 has model, more"):
        checkpoint.save(10, model=model(), **({"more": model()} if rank else {}))

    for unlike in ({"keep": 2 + rank}, {"keep": 1 - rank}, {"asynchronous": bool(rank)}):
        with pytest.raises(CheckpointError, match=rf"rank 0 has {next(iter(unlike))} .*, rank 1"):
            Checkpoint(tmp_path, **unlike)
    with pytest.raises(CheckpointError, match="rank 0 has keep_best None, rank 1 has 'min'"):
        Checkpoint(tmp_path, keep_best="min" if rank else None)

    class Broken:
        def state_dict(self):
            if rank == 1:
                raise ValueError("no state today")
            return {}

        def load_state_dict(self, state):
            if rank == 1:
                raise ValueError("not mine")

    with pytest.raises(CheckpointError, match="rank 1: ValueError: no state today"):
        checkpoint.save(10, broken=Broken())
    assert visible(tmp_path) == ["of-0"]
    Broken.state_dict = lambda self: {}
    checkpoint.save(10, broken=Broken())
    with pytest.raises(CheckpointError, match="rank 1: ValueError: not mine"):
        checkpoint.restore(broken=Broken())
    other = model(width=5 if rank else 4)
    checkpoint.save(11, model=model())
    with pytest.raises(CheckpointError, match="into Sequential: what was saved does not fit"):
        checkpoint.restore(model=other)
    for step in (10 + rank, 11 + rank):  # both are there; rank 1 asks for one that is not
        with pytest.raises(CheckpointError, match=f"rank 0 has step {step - rank}, rank 1 has"):
            checkpoint.restore(step, partial=True)
    with pytest.raises(CheckpointError, match="rank 0 has objects , rank 1 has model"):
        checkpoint.restore(partial=True, **({"model": model()} if rank else {}))
    with pytest.raises(CheckpointError, match=r"steps \[10, 11\]"):
        checkpoint.restore(12)
    with pytest.raises(CheckpointError, match="not the number of a step"):
        checkpoint.save("last", model=model())
    for metric in ("low", torch.ones(2)):
        with pytest.raises(CheckpointError, match=r"metric=(.|\n)*HINT: metric=loss"):
            checkpoint.save(12, model=model(), metric=metric)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_the_old_one(
    tmp_path, monkeypatch, asynchronous
):
    checkpoint = Checkpoint(tmp_path, asynchronous=asynchronous)
    checkpoint.save(1, model=model())
    checkpoint.wait()
    before = everything(tmp_path)
    if world().rank == 1:

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(FileSystemWriter, "write_data", full)

    def save_and_wait():
        checkpoint.save(2, model=model())
        checkpoint.wait()

    with pytest.raises(CheckpointError, match=r"rank 1: OSError.*No space left"):
        save_and_wait()
    monkeypatch.undo()
    assert everything(tmp_path) == before
    assert checkpoint.restore(model=model()).step == 1
    world().barrier()


@pytest.mark.ranks(2)
def test_a_save_in_the_background_holds_the_state_of_its_own_time(tmp_path, monkeypatch):
    net, go_on = model(), threading.Event()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    expected = net[0].weight.detach().clone()
    write = FileSystemWriter.write_data
    monkeypatch.setattr(
        FileSystemWriter, "write_data", lambda *to_write: go_on.wait(20) and write(*to_write)
    )
    with Checkpoint(tmp_path, asynchronous=True) as checkpoint:
        checkpoint.save(1, model=net, optimizer=optimizer, epoch=[1])
        with torch.no_grad():
            net[0].weight.zero_()
        assert checkpoint.steps == []  # nothing is there before it is whole
        go_on.set()
        checkpoint.save(2, model=net, optimizer=optimizer)  # waits for the first
        assert 1 in checkpoint.steps
    assert checkpoint.steps == [1, 2]
    assert checkpoint.restore(1, model=net, optimizer=optimizer)["epoch"] == [1]
    assert torch.equal(net[0].weight, expected)
    assert not [t for t in threading.enumerate() if "checkpoint" in t.name]
    assert not [name for name in everything(tmp_path) if "outcome" in name]


class Surprise:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_what_ranks_leave_each_other_in_a_checkpoint_is_plain_data(tmp_path):
    index = MetadataIndex("model.weight", [2, 0], 1)
    files = {"__1_0.distcp": (12, 99)}
    results = [WriteResult(index, 12, _StorageInfo("__1_0.distcp", 4, 8))]
    known = saving.Outcome(None, results, files)
    assert saving.Outcome.from_bytes(known.to_bytes()) == known
    elsewhere = saving.Outcome(None, [], {"../../x": (12, 99)})
    order = SimpleNamespace(ranks=2, partial=tmp_path, timeout_s=5.0, cards=[own_card()] * 2)
    for content in (pickle.dumps(Surprise(tmp_path / "unpickled")), elsewhere.to_bytes()):
        (tmp_path / "outcome-1").write_bytes(content)
        with pytest.raises(pickle.UnpicklingError):
            saving.outcomes_of(order, saving.Outcome())  # rank 0 waits for the outcome of rank 1
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.ranks(2)
def test_a_save_in_the_background_is_committed_without_a_word_of_the_foreground(tmp_path):
    checkpoint = Checkpoint(tmp_path, asynchronous=True)
    checkpoint.save(1, model=model())
    end = time.monotonic() + 20
    while checkpoint.latest is None and time.monotonic() < end:
        time.sleep(0.01)
    assert checkpoint.steps == [1]
    checkpoint.wait()


@pytest.mark.ranks(3)
def test_each_rank_writes_its_share_and_equal_tensors_are_written_once(tmp_path):
    net = nn.Sequential(*(nn.Linear(40, 40) for _ in range(6)))
    for p in net.parameters():
        p.data.fill_(1.0)
    mine = torch.full((5,), float(world().rank))
    Checkpoint(tmp_path).save(1, model=net, mine=mine, uneven=torch.zeros(world().rank))
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "step-00000001").glob("*.distcp")}
    assert len(sizes) == 3
    assert max(sizes.values()) < 2 * min(sizes.values())
    manifest = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    several = {name: v for name, v in manifest["versions"].items() if "random" not in name}
    assert several == {"~values.mine": [0, 1, 2], "~values.uneven": [0, 1, 2]}
    restored = Checkpoint(tmp_path).restore(model=net)
    assert torch.equal(restored["mine"], mine)
    assert restored["uneven"].shape == (world().rank,)


def draws(directory, seed, saves):
    torch.manual_seed(seed + (world().rank if seed else 0))
    checkpoint = Checkpoint(directory)
    if saves:
        checkpoint.save(1)
    else:
        checkpoint.restore()
    return torch.rand(3).tolist()


def test_random_streams_on_another_number_of_ranks(rank_pool, tmp_path):
    saved = rank_pool.run(draws, tmp_path / "own", 1, True, world=2)
    more = rank_pool.run(draws, tmp_path / "own", 1, False, world=3)
    assert more[:2] == saved
    assert more[2] not in saved
    assert rank_pool.run(draws, tmp_path / "own", 5, False, world=3) == more, "not from this run"
    alike = rank_pool.run(draws, tmp_path / "alike", 0, True, world=2)
    assert rank_pool.run(draws, tmp_path / "alike", 3, False, world=3) == [alike[0]] * 3


def test_what_cannot_be_written_comes_with_what_to_type_instead(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(CheckpointError, match=r"(?s)file.*HINT: a directory of its own"):
            Checkpoint(tmp_path / place)
    checkpoint = Checkpoint(tmp_path / "here")
    with pytest.raises(CheckpointError, match=r"(?s)lambda.*HINT: save values, not code"):
        checkpoint.save(1, rule=lambda x: x)
    model = nn.Linear(2, 1)
    checkpoint.save(1, optimizer=torch.optim.Adam(model.parameters()))
    with pytest.raises(CheckpointError, match=r"(?s)into SGD: .* does not fit.*Adam in the check"):
        checkpoint.restore(optimizer=torch.optim.SGD(model.parameters()))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    with pytest.raises(CheckpointError, match=r"(?s)denied.*HINT: a directory that you may write"):
        Checkpoint(tmp_path / "there")


def begin_slow_save(directory, seconds):
    """In a rank: begin a save in the background that takes `seconds`."""
    write = FileSystemWriter.write_data

    def wait_and_write(*to_write):
        time.sleep(seconds)
        return write(*to_write)

    FileSystemWriter.write_data = wait_and_write
    Checkpoint(directory, asynchronous=True).save(3, model=model())


@pytest.mark.parametrize(("on", "raising"), [("cpu", 0), ("mpi", 1)])
def test_a_save_in_the_background_is_finished_when_the_function_raises(
    tmp_path, on, raising, request, monkeypatch
):
    if on == "mpi":  # its ranks are forks of the warm interpreter
        monkeypatch.setenv("MPIEXEC", request.getfixturevalue("mpiexec"))
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("forked_python"))

    def train():
        begin_slow_save(tmp_path, 1.5)
        if unisono.world().rank == raising:
            raise ValueError("the loss is NaN")
        unisono.world().barrier()

    with pytest.raises(RankFailed, match="the loss is NaN"):
        unisono.run(train, on=on, ranks=2)
    assert visible(tmp_path) == ["step-00000003"]
    assert Checkpoint(tmp_path).restore(model=model()).step == 3


def test_a_save_in_the_background_outlives_the_time_to_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "LEAVE_S", 0.5)
    unisono.run(begin_slow_save, tmp_path, 1.2, on="cpu", ranks=2)
    assert visible(tmp_path) == ["step-00000003"]


def test_a_save_whose_rank_is_killed_is_given_up_soon_and_leaves_nothing(tmp_path):
    place, killed = tmp_path / "saved", tmp_path / "killed"

    def train():
        rank = unisono.world().rank
        begin_slow_save(place, 3600.0 * rank)
        if rank == 1:
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        unisono.world().barrier()

    with pytest.raises(RankFailed, match=r"rank 1 of 2 on .* was killed by SIGKILL") as caught:
        unisono.run(train, on="cpu", ranks=2)
    assert time.time() - killed.stat().st_mtime < 10.0
    assert visible(place) == []
    log = Path(caught.value.job_dir, "rank-0.log").read_text()
    assert re.search(r"the save of step 3 .* failed: ranks \[1\] ended before their part", log)


def test_saves_that_fail_at_the_last_moment_leave_nothing(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, model=model())
    before = everything(tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "finish", full)
    for step in (2, 3, 4):
        with pytest.raises(CheckpointError, match="remove files there"):
            checkpoint.save(step, model=model())
    assert everything(tmp_path) == before


OF_02 = Path(__file__).parent / "data" / "checkpoint_0.2.zip"
"""Saved by unisono 0.2 on two ranks: a model, AdamW, a scheduler and two values."""


def restore_02(directory: str) -> tuple[float, float, int, str, float]:
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    found = Checkpoint(directory).restore(model=net, optimizer=optimizer, scheduler=scheduler)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))
    total = net(x).sum().item()
    return total, scheduler.get_last_lr()[0], found["epoch"], found["note"], found.step


def test_a_checkpoint_of_0_2_is_read_by_other_numbers_of_ranks(tmp_path):
    shutil.unpack_archive(OF_02, tmp_path)
    assert "format" not in json.loads((tmp_path / "step-00000003" / folder.MANIFEST).read_text())
    for ranks in (1, 3):
        for total, *rest in unisono.run(restore_02, str(tmp_path), ranks=ranks):
            assert total == pytest.approx(1.1149952, abs=1e-6)
            assert rest == [pytest.approx(0.001), 2, "of 0.2", 3]


def test_a_checkpoint_of_0_2_is_converted(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.unpack_archive(OF_02, old)
    before = everything(old)
    assert main(["checkpoint", "convert", str(old), str(new)]) == 0
    assert capsys.readouterr().out.split() == [str(new / "step-00000003")]
    assert everything(old) == before
    assert everything(new) == before
    assert (
        json.loads((new / "step-00000003" / folder.MANIFEST).read_text())["format"] == folder.FORMAT
    )
    assert restore_02(str(new))[0] == pytest.approx(1.1149952, abs=1e-6)
    damage_flip(old / "step-00000003")
    for place in (old, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"damaged|no checkpoint"):
            folder.convert(place, tmp_path / "other")
    with pytest.raises(CheckpointError, match="not empty"):
        folder.convert(new, new)
    assert not (tmp_path / "other").exists()


def test_a_format_of_a_later_version_is_named(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(1, epoch=1)
    manifest = tmp_path / "step-00000001" / folder.MANIFEST
    said = json.loads(manifest.read_text())
    assert said["format"] == folder.FORMAT
    manifest.write_text(json.dumps(said | {"format": 99, "news": True}))
    with pytest.raises(CheckpointError, match="format 99 of a later unisono"):
        checkpoint.restore()


def test_restore_runs_no_code_of_the_files_unless_asked_to(tmp_path):
    mark = tmp_path / "mark"
    checkpoint = Checkpoint(tmp_path / "saved")
    checkpoint.save(1, value=Surprise(mark))
    with pytest.raises(CheckpointError, match=r"(?s)more than plain data.*weights_only=False"):
        checkpoint.restore()
    assert not mark.exists()
    checkpoint.restore(weights_only=False)
    assert mark.exists()


def test_a_table_of_contents_that_would_run_code_is_refused(tmp_path):
    mark = tmp_path / "mark"
    checkpoint = Checkpoint(tmp_path / "saved")
    checkpoint.save(1, epoch=1)
    saved = tmp_path / "saved" / "step-00000001"
    (saved / ".metadata").write_bytes(pickle.dumps(Surprise(mark)))
    manifest = json.loads((saved / folder.MANIFEST).read_text())
    content = (saved / ".metadata").read_bytes()
    manifest["files"][".metadata"] = len(content), zlib.crc32(content)
    (saved / folder.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="table of contents"):
        checkpoint.restore()
    assert not mark.exists()

"""A DASO run that is saved and continued goes on bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from unisono.comm import world
from unisono.data_parallel import DASO, DataParallelMultiGPU, Skips

N, EPOCHS = 6, 3


def make(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    inner = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.9)
    daso = DASO(inner, EPOCHS, warmup_epochs=1, cooldown_epochs=0, scheduler=scheduler, **options)
    daso.add_scaler(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
    wrapped = DataParallelMultiGPU(model, daso)
    daso.last_batch = N
    return daso, wrapped


def advance(daso, model, first, last):
    """Make the batches `first` to `last` of the whole run."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * world().rank + step)
        x = torch.randn(4, 3, generator=generator)
        daso.zero_grad()
        daso.scaler.scale(model(x).square().mean()).backward()
        daso.step()
        if step % N == N - 1:
            daso.epoch_loss_logic(1.0)
            if daso.phase == "cycling":
                daso.schedule.skips = Skips(3, 2, 1)


def saved(daso, model):
    file = io.BytesIO()
    torch.save({"daso": daso.state_dict(), "model": model.module.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def flat_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.ranks([1, 2, 4], timeout=150)
def test_a_run_continues_bit_for_bit_from_any_batch(rank_count):
    options = {"ranks_per_node": 2 if rank_count == 4 else 1}
    total = N * EPOCHS
    daso, model = make(options)
    states = []
    for step in range(total):
        states.append(saved(daso, model))
        advance(daso, model, step, step + 1)
    uninterrupted, other = make(options)
    advance(uninterrupted, other, 0, total)
    assert torch.equal(flat_of(other), flat_of(model)), "saving changed the run"
    for step in range(0, total, 1 if rank_count == 2 else 5):
        resumed, again = make(options)
        again.module.load_state_dict(states[step]["model"])
        resumed.load_state_dict(states[step]["daso"])
        advance(resumed, again, step, total)
        assert torch.equal(flat_of(again), flat_of(model)), f"resumed at batch {step}"
        assert resumed.epoch == daso.epoch
        assert resumed.param_groups[0]["lr"] == daso.param_groups[0]["lr"]


@pytest.mark.ranks(2, timeout=90)
def test_after_the_last_batch_of_an_epoch_one_state_serves_all():
    options = {"ranks_per_node": 1}
    daso, model = make(options)
    advance(daso, model, 0, 2 * N)
    state = copy.deepcopy(saved(daso, model))
    everybody = world().broadcast_object(state, 0)
    resumed, again = make(options)
    again.module.load_state_dict(everybody["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(everybody["daso"])
        advance(resumed, again, 2 * N, 3 * N)
    assert world().all_equal(flat_of(again))
    assert resumed.epoch == 3


@pytest.mark.ranks(2, timeout=90)
def test_one_state_from_the_middle_leaves_out_what_travelled_with_one_warning():
    options = {"ranks_per_node": 1}
    daso, model = make(options)
    advance(daso, model, 0, N + 1)
    assert daso.sent_at == 0
    everybody = world().broadcast_object(saved(daso, model), 0)
    resumed, again = make(options)
    again.module.load_state_dict(everybody["model"])
    resumed.load_state_dict(everybody["daso"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advance(resumed, again, N + 1, 2 * N)
    assert sum("in flight is left out" in str(w.message) for w in caught) == 1
    assert world().all_equal(flat_of(again))
    assert resumed.epoch == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(duplicate):
    for original in make({}):
        with pytest.raises(TypeError, match="groups of ranks"):
            duplicate(original)


def test_a_state_without_a_model_or_of_something_else_is_refused():
    model = nn.Linear(1, 1)
    daso = DASO(torch.optim.SGD(model.parameters(), 0.1), 3)
    with pytest.raises(ValueError, match="no model yet"):
        daso.load_state_dict(daso.state_dict())
    daso.set_model(model)
    with pytest.raises(ValueError, match="load_state_dict of"):
        daso.load_state_dict(daso.local_optimizer.state_dict())

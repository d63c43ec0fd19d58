"""DASO around the numbers: epochs, schedulers, scalers, buffers, errors on all ranks alike."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.repeated import repeated
from torch import nn

from unisono.comm import Communicator, world
from unisono.data_parallel import DASO, DataParallelMultiGPU, Skips
from unisono.errors import CollectiveMismatch, MeshError


def make(blocks=1, total_epochs=6, model=None, scheduler=None, lr=0.1, **options):
    torch.manual_seed(world().rank)
    model = model or nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr)
    options = {"warmup_epochs": 1, "cooldown_epochs": 1, **options}
    if scheduler is not None:
        options["scheduler"] = scheduler(inner)
    daso = DASO(inner, total_epochs, ranks_per_node=blocks, **options)
    return daso, DataParallelMultiGPU(model, daso)


def epoch(daso, model, n_batches, scale=1.0):
    for _ in range(n_batches):
        daso.zero_grad()
        x = torch.full((1, 2), scale * (1.0 + world().rank))
        model(x).square().sum().backward()
        daso.step()


def flat_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.ranks(2, timeout=90)
@repeated("told", [6, 5, 9])
def test_a_wrong_number_of_batches_is_healed_with_one_warning(told):
    daso, model = make(total_epochs=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            daso.last_batch = told
            epoch(daso, model, 6)
            daso.epoch_loss_logic(1.0)
            assert daso.epoch == number + 1
            assert daso.current_batch == 0
            assert world().all_equal(flat_of(model))
    texts = [str(w.message) for w in caught if "last_batch" in str(w.message)]
    assert len(texts) == (told != 6)
    if texts:
        assert "6 batches" in texts[0]
        assert f"last_batch is {told}" in texts[0]
        assert daso.last_batch == 6


@pytest.mark.ranks(2, timeout=90)
def test_an_epoch_counts_at_its_last_batch_and_the_loss_decides_the_next():
    daso, model = make(total_epochs=4)
    daso.last_batch = 3
    assert (daso.phase, daso.epoch, daso.last_batch) == ("warmup", 0, 3)
    epoch(daso, model, 2)
    assert (daso.epoch, daso.current_batch) == (0, 2)
    epoch(daso, model, 1)
    assert (daso.epoch, daso.current_batch) == (1, 0)
    daso.epoch_loss_logic(torch.tensor(float(world().rank)))
    assert daso.stability.best == 0.5
    assert (daso.phase, daso.epoch) == ("cycling", 1)
    assert (daso.global_skip, daso.local_skip, daso.batches_to_wait) == (4, 1, 1)
    daso.epoch_loss_logic(0.1 + world().rank, loss_globally_averaged=True)
    assert daso.stability.best == 0.1
    daso.epoch_loss_logic(1)
    assert daso.phase == "cooldown"
    daso.reset()
    assert (daso.phase, daso.epoch, daso.last_batch) == ("warmup", 0, None)


@pytest.mark.ranks(2, timeout=90)
def test_a_reset_in_the_middle_forgets_what_travels_and_clears_gradients():
    daso, model = make(warmup_epochs=0)
    daso.last_batch = 8
    epoch(daso, model, 1)
    assert daso.sent_at == 0
    before = flat_of(model)
    daso.reset()
    assert daso.sent_at is None
    assert daso.exchange.in_flight is None
    assert all(not p.grad.any() for p in model.parameters())
    assert torch.equal(flat_of(model), before)
    daso.last_batch = 2
    epoch(daso, model, 2)
    assert world().all_equal(flat_of(model))


@pytest.mark.ranks([1, 3], timeout=90)
def test_pretrained_weights_of_rank_0_reach_all_and_no_generator_moves(rank_count):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(world().rank + 3.0)
    model[1].running_mean.fill_(world().rank + 5.0)
    daso = DASO(torch.optim.SGD(model.parameters(), 0.1), 3, ranks_per_node=1)
    torch.manual_seed(world().rank)
    state = torch.get_rng_state()
    wrapped = DataParallelMultiGPU(model, daso)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(flat_of(model), torch.full_like(flat_of(model), 3.0))
    assert model[1].running_mean.tolist() == [5.0, 5.0]
    assert wrapped.module is model
    assert daso.module is model
    assert wrapped.loc_gpus == daso.loc_gpus == 1
    assert daso.reduced_ranks == (tuple(range(rank_count)),)
    reset = DataParallelMultiGPU(model, daso, reset_parameters=True)
    assert world().all_equal(flat_of(reset))
    assert not torch.equal(model[0].weight, torch.full((2, 2), 3.0))


@pytest.mark.ranks(2, timeout=90)
def test_nodes_come_from_hostnames_and_a_subset_of_ranks_can_train(monkeypatch):
    monkeypatch.setenv("UNISONO_HOST_ID", f"host{world().rank}")
    model = nn.Linear(2, 1)
    alone = world().sub([world().rank])
    daso = DASO(torch.optim.SGD(model.parameters(), 0.1), 2, alone)
    assert daso.exchange.layout.nodes == ((0,),)
    hosts = Communicator.of(None).hosts
    assert hosts == ("host0", "host1")
    both = DASO(torch.optim.SGD(model.parameters(), 0.1), 2)
    assert both.exchange.layout.nodes == ((0,), (1,))


class WithSpare(nn.Linear):
    """A parameter that no gradient reaches, so that what is wrong with it stays on its rank."""

    def __init__(self):
        super().__init__(2, 1)
        self.spare = nn.Parameter(torch.zeros(3))


@pytest.mark.ranks(2, timeout=90)
def test_a_parameter_that_is_not_finite_on_one_rank_raises_on_all():
    for skips, n_batches in (((0, 0, 0), 3), ((4, 1, 1), 9)):
        daso, model = make([1, 1], warmup_epochs=0, model=WithSpare())
        daso.schedule.skips = Skips(*skips)
        daso.last_batch = n_batches
        if world().rank == 1:
            model.module.spare.data[1] = float("nan")
        with pytest.raises(ValueError, match="spare is not finite on rank 1"):
            epoch(daso, model, n_batches)


@pytest.mark.ranks(2, timeout=90)
def test_a_bad_batch_on_one_rank_of_a_node_raises_on_all():
    daso, model = make([2])
    daso.last_batch = 3
    epoch(daso, model, 1)
    with pytest.raises(ValueError, match="not finite on rank 0"):
        epoch(daso, model, 1, scale=float("nan") if world().rank == 1 else 1.0)


@pytest.mark.ranks(2, timeout=90)
def test_a_sum_too_large_for_the_wire_says_so():
    daso, model = make([1, 1], downcast_type=torch.float16)
    daso.last_batch = 3
    epoch(daso, model, 1, scale=0.0)
    with torch.no_grad():
        model.module.weight.fill_(1e6)
    with pytest.raises(ValueError, match="over nodes overflows"):
        epoch(daso, model, 1, scale=0.0)


@pytest.mark.ranks(2, timeout=90)
def test_schedulers_step_by_batch_or_by_epoch_and_the_optimizer_steps_too():
    per_batch, model = make(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
    per_batch.last_batch = 3
    before = flat_of(model)
    epoch(per_batch, model, 3)
    assert per_batch.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    assert not torch.equal(flat_of(model), before)
    daso, model = make()
    on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(daso, patience=0)
    daso.last_batch = 1
    epoch(daso, model, 1)
    for loss in (1.0, 2.0):
        on_plateau.step(daso.epoch_loss_logic(loss + world().rank))
    assert daso.local_optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.ranks(2, timeout=90)
def test_a_scaler_leaves_out_steps_without_losing_count():
    for blocks in ([2], [1, 1]):
        scheduler = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)  # noqa: E731
        daso, model = make(blocks, scheduler=scheduler)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        plain = nn.Linear(2, 1)
        plain.load_state_dict(model.module.state_dict())
        daso.add_scaler(scaler)
        assert daso.amp
        daso.last_batch = 4
        for batch in range(4):
            daso.zero_grad()
            bad = batch == 1 and world().rank == 1
            x = torch.full((1, 2), float("inf") if bad else 1.0)
            scaler.scale(model(x).sum()).backward()
            daso.step()
        assert daso.epoch == 1
        assert world().all_equal(flat_of(model))
        assert torch.isfinite(flat_of(model)).all()
        left_out = blocks == [2] or world().rank == 1
        assert scaler.get_scale() == (4.0 if left_out else 8.0)
        assert daso.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (3 if left_out else 4))
        moved = (plain.bias - model.module.bias).item()
        both = 0.1 * (1 + 0.5 + 0.25) if blocks == [2] else None
        if both is not None:
            assert moved == pytest.approx(both, rel=1e-5)


def test_a_scaler_that_steps_daso_is_refused():
    daso, model = make()
    daso.last_batch = 4
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"HINT: daso\.add_scaler"):
        scaler.step(daso)


@pytest.mark.ranks(2, timeout=90)
def test_scales_that_went_apart_meet_at_the_smallest_in_the_node():
    daso, model = make([2], warmup_epochs=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    daso.add_scaler(scaler)
    daso.schedule.skips = Skips(8, 4, 1)
    daso.last_batch = 8
    for batch in range(4):
        assert model.require_backward_grad_sync == (batch < 2)
        daso.zero_grad()
        bad = batch == 2 and world().rank == 1
        scaler.scale(model(torch.full((1, 2), float("inf") if bad else 1.0)).sum()).backward()
        daso.step()
    assert scaler.get_scale() == 4.0
    assert model.require_backward_grad_sync


@pytest.mark.ranks(2, timeout=90)
def test_buffers_are_shared_at_the_end_of_an_epoch():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    inner = torch.optim.Adam(model.parameters(), 0.01)
    daso = DASO(inner, 4, ranks_per_node=1, warmup_epochs=0)
    wrapped = DataParallelMultiGPU(model, daso)
    daso.last_batch = 3
    for batch in range(3):
        daso.zero_grad()
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(world().rank))
        wrapped(x * (1 + world().rank) + world().rank).square().sum().backward()
        if batch == 2:
            assert not world().all_equal(model[1].running_mean)
        daso.step()
    assert world().all_equal(model[1].running_mean)
    assert model[1].num_batches_tracked.item() == 3


@pytest.mark.ranks(2, timeout=90)
def test_without_the_wrapper_ranks_of_a_node_meet_at_each_exchange():
    torch.manual_seed(world().rank)
    model = nn.Linear(2, 1)
    daso = DASO(torch.optim.SGD(model.parameters(), 0.1), 3, ranks_per_node=2)
    daso.set_model(model)
    daso.last_batch = 2
    epoch(daso, model, 2)
    assert world().all_equal(flat_of(model))


@pytest.mark.ranks(2, timeout=90)
def test_accumulation_without_synchronisation_in_the_node():
    daso, model = make([2])
    daso.last_batch = 1
    daso.zero_grad()
    x = torch.full((1, 2), 1.0 + world().rank)
    with model.no_sync():
        model(x).sum().backward()
        assert model.module.weight.grad[0, 0].item() == 1.0 + world().rank
    model(x).sum().backward()
    assert model.module.weight.grad[0, 0].item() == 3.0
    daso.step()
    assert world().all_equal(flat_of(model))


@pytest.mark.ranks(2, timeout=90)
def test_mistakes_before_a_step_are_told_on_all_ranks():
    daso, model = make()
    with pytest.raises(ValueError, match=r"last_batch = len\(loader\)"):
        daso.step()
    daso.last_batch = 4 + world().rank
    with pytest.raises(ValueError, match=r"\[4, 5\]"):
        daso.step()
    bare = DASO(torch.optim.SGD(model.parameters(), 0.1), 3)
    bare.last_batch = 2
    with pytest.raises(ValueError, match="no model on rank 0"):
        bare.step()
    with pytest.raises(MeshError, match=r"2 / 3"):
        DASO(torch.optim.SGD(model.parameters(), 0.1), 3, ranks_per_node=3)
    with pytest.raises(MeshError, match=r"2 \+ 1 = 3"):
        DASO(torch.optim.SGD(model.parameters(), 0.1), 3, ranks_per_node=[2, 1])
    unlike = nn.Linear(2, 1 + world().rank)
    with pytest.raises(CollectiveMismatch, match="weight"):
        DataParallelMultiGPU(unlike, DASO(torch.optim.SGD(unlike.parameters(), 0.1), 3))


MODEL = nn.Linear(1, 1)
INNER = torch.optim.SGD(MODEL.parameters(), 0.1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"local_optimizer": "sgd"}, TypeError),
        ({"total_epochs": True}, TypeError),
        ({"total_epochs": 0}, ValueError),
        ({"warmup_epochs": -1}, ValueError),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, TypeError),
        ({"stability_level": -0.1}, ValueError),
        ({"stability_level": float("nan")}, ValueError),
        ({"max_global_skips": -1}, ValueError),
        ({"sending_chunk_size": 0}, ValueError),
        ({"downcast_type": torch.float64}, ValueError),
        ({"use_mpi_groups": 1}, TypeError),
        ({"skip_reduction_factor": 0}, ValueError),
        ({"verbose": "yes"}, TypeError),
        ({"comm": "world"}, TypeError),
        ({"ranks_per_node": "2"}, TypeError),
    ],
)
def test_a_bad_argument_is_named(options, error):
    with pytest.raises(error, match=next(iter(options))):
        DASO(**{"local_optimizer": INNER, "total_epochs": 5, **options})


def test_a_wrong_optimizer_or_module_is_refused_with_the_right_one():
    with pytest.raises(TypeError, match=r"HINT: DASO\(optimizer"):
        DataParallelMultiGPU(MODEL, INNER)
    daso = DASO(INNER, 5)
    with pytest.raises(TypeError, match="module"):
        DataParallelMultiGPU("model", daso)
    with pytest.raises(ValueError, match="bucket_mb=0"):
        DataParallelMultiGPU(MODEL, daso, bucket_mb=0)
    with pytest.raises(ValueError, match="holds 2 parameters, none"):
        DataParallelMultiGPU(nn.Linear(1, 1), daso)
    with pytest.raises(TypeError, match="inside it"):
        DASO(daso, 5)
    other = torch.optim.SGD(MODEL.parameters(), 0.1)
    with pytest.raises(ValueError, match="another optimizer"):
        DASO(INNER, 5, scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(ValueError, match="equal batch counts"):
        DataParallelMultiGPU(MODEL, daso).join()
    with pytest.raises(TypeError, match="last_batch"):
        daso.last_batch = 2.5
    with pytest.raises(TypeError, match="loss"):
        daso.epoch_loss_logic("low")
    with pytest.raises(ValueError, match=r"loss.mean\(\)"):
        daso.epoch_loss_logic(torch.ones(2))
    with pytest.raises(TypeError, match="scaler"):
        daso.add_scaler("cpu")
    with pytest.raises(AttributeError, match="no attribute 'speed'"):
        _ = daso.speed


def test_what_can_be_read_has_heats_names():
    daso = DASO(INNER, 9, None, 1, 2, None, 0.1, 4, 100, torch.float16, False, 3, 2)
    wrapped = DataParallelMultiGPU(MODEL, daso)
    assert isinstance(daso, torch.optim.Optimizer)
    assert (daso.total_epochs, daso.warmup_epochs, daso.cooldown_epochs) == (9, 1, 2)
    assert (daso.max_gs, daso.skip_reduction_factor, daso.local_skip_factor) == (4, 3, 2)
    assert (daso.cast_dtype, daso.verbose, daso.amp) == (torch.float16, False, False)
    assert daso.scheduler is None
    assert daso.scaler is None
    assert daso.stability.threshold == 0.1
    assert daso.local_optimizer is INNER
    assert daso.module is MODEL
    assert daso.param_groups is INNER.param_groups
    assert daso.state is INNER.state
    assert [id(p) for p in daso.params_ref] == [id(p) for p in MODEL.parameters()]
    assert daso.comm.size == daso.loc_gpus == 1
    assert list(wrapped.state_dict()) == ["module.weight", "module.bias"]
    assert "warmup" in repr(daso)


def test_step_hooks_are_those_of_the_local_optimizer():
    daso, model = make()
    daso.last_batch = 2
    calls = []
    daso.register_step_pre_hook(lambda *_: calls.append("before"))
    handle = daso.register_step_post_hook(lambda *_: calls.append("after"))
    epoch(daso, model, 1)
    handle.remove()
    epoch(daso, model, 1)
    assert calls == ["before", "after", "before"]


def test_a_verbose_run_tells_each_epoch(capsys):
    daso, model = make(verbose=True)
    daso.last_batch = 2
    epoch(daso, model, 2)
    daso.epoch_loss_logic(0.25)
    daso.print0("end")
    out = capsys.readouterr().out
    assert "epoch 1 of 6, loss 0.25" in out
    assert "end" in out
    assert "every epoch" not in out


@pytest.mark.parametrize("options", [{"max_global_skips": 0}, {"warmup_epochs": 4}])
def test_a_training_that_never_cycles_is_told_and_goes_on_past_its_end(options, capsys):
    daso, model = make(verbose=True, total_epochs=2, **options)
    assert "after every batch of every epoch" in capsys.readouterr().out
    daso.last_batch = 2
    for _ in range(3):
        epoch(daso, model, 2)
        daso.epoch_loss_logic(0.25)
        assert daso.global_skip == 0
    assert "epoch 3 of 2" in capsys.readouterr().out
    assert daso.phase == "cooldown"

"""Mistakes that stop no rank: each is planted once, and named with its numbers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono
from unisono.comm import check, world
from unisono.comm.health import check as checking
from unisono.data_parallel import DataParallel
from unisono.errors import CheckWarning, LayoutError


def net(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, 1))


@contextlib.contextmanager
def findings() -> Iterator[list[str]]:
    """Collect what is reported on rank 0, and check that other ranks are silent."""
    checking._reported.clear()
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, CheckWarning)]
    assert world().rank == 0 or not texts


def trained(model, *, steps=4, rows=6, lr=0.1, seed=None, divide=1.0):
    generator = torch.Generator().manual_seed(world().rank if seed is None else seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        x, y = (torch.randn(rows, n, generator=generator) for n in (4, 1))
        optimizer.zero_grad()
        (nn.functional.mse_loss(model(x), y) / divide).backward()
        optimizer.step()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
def test_another_learning_rate_on_one_rank_is_found_always():
    rank = world().rank
    with pytest.raises(LayoutError, match="lr of the optimizer is"):
        trained(DataParallel(net()), lr=0.1 + 0.01 * rank)


@pytest.mark.ranks(3)
def test_a_change_on_one_rank_names_parameter_rank_and_steps():
    model = DataParallel(net())
    trained(model, steps=2)
    if world().rank == 1:
        with torch.no_grad():
            model.module[1].weight[0, 3] += 1.0
    with pytest.raises(LayoutError) as caught:
        trained(model, steps=2)
    assert "1.weight differs between rank 0 and rank 1, between steps 2 and 4" in str(caught.value)
    assert "values differ by 1" in str(caught.value)
    assert "test_silent_mistakes.py:" in str(caught.value)


@pytest.mark.ranks(2)
def test_check_mode_names_the_very_step_of_a_change():
    with check():
        model = DataParallel(net())
        trained(model, steps=4)
        with torch.no_grad():
            model.module[0].bias += 0.5 * world().rank
        with pytest.raises(LayoutError, match="at step 5"):
            trained(model, steps=1)


@pytest.mark.ranks(2)
def test_replicas_apart_by_rounding_are_no_error():
    model = DataParallel(net())
    with torch.no_grad():
        model.module[0].weight[0, 0] *= 1 + 2e-7 * world().rank
    with findings() as texts:
        trained(model)
    assert len(texts) == (world().rank == 0)
    assert all("by rounding only" in text for text in texts)


@pytest.mark.ranks(2)
def test_a_loader_without_a_sampler_gives_all_ranks_the_same_rows():
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)))

    def epoch(sampler, **options):
        torch.manual_seed(0)
        loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
        model = DataParallel(net(), **options)
        with findings() as texts:
            for (x,) in loader:
                model(x).mean().backward()
        return texts

    texts = epoch(None)
    assert len(texts) == (world().rank == 0)
    assert all("all ranks train on the same rows" in text for text in texts)
    assert epoch(None, equal_batches=True) == []
    assert epoch(DistributedSampler(data)) == []


@pytest.mark.ranks(2)
def test_one_batch_for_all_steps_is_a_test_outside_of_check_mode():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for mode, count in ((False, 0), (True, 1)):
        model = DataParallel(net())
        with check(mode), findings() as texts:
            for _ in range(4):
                model(x).mean().backward()
        assert len(texts) == count * (world().rank == 0)


@pytest.mark.ranks(2)
def test_uneven_batches_are_a_mean_of_means():
    rows = 6 - 2 * world().rank
    with check(), findings() as texts:
        trained(DataParallel(net()), rows=rows)
    assert len(texts) == (world().rank == 0)
    assert all("1/4/2, in one process 1/10" in text for text in texts)
    model = DataParallel(net())
    with check(), findings() as texts, model.samples(rows):
        model(torch.randn(rows, 4)).mean().backward()
    assert texts == []


@pytest.mark.ranks(2)
def test_batch_norm_of_each_rank_is_named_unless_it_is_synchronised():
    for synced in (False, True):
        model = DataParallel(net(nn.BatchNorm1d(8)), sync_batch_norm=synced)
        with check(), findings() as texts:
            trained(model)
        assert len(texts) == (world().rank == 0 and not synced)
        assert all("sync_batch_norm=True" in text for text in texts)


@pytest.mark.ranks(2)
def test_dropout_with_one_random_state_on_all_ranks():
    for apart in (0, 1):
        model = DataParallel(net(nn.Dropout(0.2)))
        torch.manual_seed(apart * world().rank)
        with check(), findings() as texts:
            trained(model)
        assert len(texts) == (world().rank == 0 and not apart)
        assert all("same mask" in text for text in texts)


@pytest.mark.ranks(2)
def test_a_sampler_that_pads_by_repeating():
    data = TensorDataset(torch.randn(7, 4))
    sampler = DistributedSampler(data)
    with check(), findings() as texts:
        trained(DataParallel(net()))
    assert len(texts) == (world().rank == 0)
    assert all("2 * 4 = 8 != 7" in text for text in texts)
    assert len(sampler) == 4


@pytest.mark.ranks(2)
def test_a_loss_divided_by_the_number_of_ranks():
    with check(), findings() as texts:
        trained(DataParallel(net()), divide=2)
    assert len(texts) == (world().rank == 0)
    assert all("averaged over 2 ranks already" in text for text in texts)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("loss", "is_twice"),
    [
        (lambda y: y.square().sum() / 6 / 2, True),
        (lambda y: y.square().sum() / 12, True),  # the rows of all ranks
        (lambda y: nn.functional.mse_loss(y, y.detach() + 1, reduction="sum") / 12, True),
        (lambda y: y.square().sum() / 6, False),
        (lambda y: 0.5 * y.square().mean(), False),
        (lambda y: (y.square().mean() + y.abs().mean()) / 2, False),
    ],
)
def test_a_sum_of_rows_divided_by_ranks_besides_and_factors_that_are_meant(loss, is_twice):
    model = DataParallel(net())
    generator = torch.Generator().manual_seed(world().rank)
    with check(), findings() as texts:
        for _ in range(3):
            loss(model(torch.randn(6, 4, generator=generator))).backward()
    assert len(texts) == (world().rank == 0 and is_twice)
    assert all("averaged over 2 ranks already" in text for text in texts)


@pytest.mark.ranks(2)
def test_check_mode_names_a_learning_rate_that_a_scheduler_has_made_equal_again():
    model = DataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(world().rank)

    def steps():
        for _ in range(3):
            model(torch.randn(6, 4, generator=generator)).mean().backward()
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + world().rank)
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.1

    with (
        check(),
        pytest.raises(LayoutError, match=r"lr .* is 0\.1 on rank 0 and 0\.2"),
    ):
        steps()


@pytest.mark.ranks(2)
def test_ours_and_ddp_around_each_other():
    with pytest.raises(ValueError, match="averages its gradients already"):
        DataParallel(DistributedDataParallel(net()))
    outer = DistributedDataParallel(DataParallel(net()))
    with pytest.raises(LayoutError, match="wrap the module once"):
        outer(torch.randn(3, 4))


@pytest.mark.ranks(2)
def test_an_accumulation_that_is_divided_twice():
    def step(model, optimizer, again):
        x = torch.randn(6, 4)
        with model.no_sync():
            (model(x).square().mean() / 2).backward()
        (model(x).square().mean() / 2).backward()
        for p in model.parameters():
            p.grad /= again
        optimizer.step()
        optimizer.zero_grad()

    for again in (1, 2):
        model = DataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(world().rank)
        with check(), findings() as texts:
            for _ in range(3):
                step(model, optimizer, again)
        assert len(texts) == (world().rank == 0 and again == 2)
        assert all("divided by 4, not by 2" in text for text in texts)


@pytest.mark.ranks(2)
def test_an_evaluation_that_changes_buffers_on_one_rank():
    model = DataParallel(net(nn.BatchNorm1d(8)), sync_batch_norm=True)
    with check(), findings() as texts:
        trained(model, steps=1)
        if world().rank == 0:
            model.module[1].running_mean += 1
        trained(model, steps=2)
    assert len(texts) == (world().rank == 0)
    assert all("changed on rank 0 only" in text for text in texts)


@pytest.mark.ranks([1, 2, 3])
@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_synchronised_batch_norm_is_that_of_one_process(dims, momentum):
    comm, kinds = world(), {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}

    def layers():
        torch.manual_seed(0)
        norm = kinds[dims](4, momentum=momentum)
        nn.init.uniform_(norm.weight)
        return nn.Sequential(norm).double()

    shape = (7, 4, 3, 2)[:dims]
    whole = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    plain, model = layers(), DataParallel(layers(), sync_batch_norm=True)
    for x in whole:
        x.requires_grad_()
        own = x.detach().tensor_split(comm.size)[comm.rank].clone().requires_grad_()
        expected = plain(x)
        (expected**2).sum().backward()
        y = model(own)
        (y**2).sum().backward()
        torch.testing.assert_close(y, expected.tensor_split(comm.size)[comm.rank])
        torch.testing.assert_close(own.grad, x.grad.tensor_split(comm.size)[comm.rank])
    for ours, theirs in zip(model.module.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    ours, theirs = (m.weight.grad for m in (model.module[0], plain[0]))
    torch.testing.assert_close(ours * comm.size, theirs)
    assert list(model.module.state_dict()) == list(plain.state_dict())


def save_alone(directory: str, construct_alone: bool) -> None:
    checkpoint = None if construct_alone else unisono.Checkpoint(directory)
    if world().rank == 0:
        (checkpoint or unisono.Checkpoint(directory)).save(1, epoch=1)
    if not construct_alone:
        world().all_reduce(torch.ones(3))


@pytest.mark.parametrize("construct_alone", [False, True])
def test_a_save_by_rank_0_alone_says_what_to_remove(tmp_path, construct_alone):
    with pytest.raises(unisono.errors.RankFailed) as caught:
        unisono.run(save_alone, str(tmp_path), construct_alone, ranks=2)
    assert "save is collective: remove the `if rank == 0:`" in str(caught.value)


def is_checking() -> bool:
    return checking.active


def test_check_mode_is_an_argument_of_run():
    assert list(unisono.run(is_checking, ranks=2, check=True)) == [True, True]
    assert unisono.run(is_checking, on="inline", check=True)[0]
    assert not checking.active


# -- torch's own wrappers, in check mode -----------------------------------------------------------


@pytest.mark.ranks(2, backend=["shm", "gloo"])
def test_ddp_with_another_learning_rate_on_one_rank():
    with check(), pytest.raises(LayoutError, match=r"at step 2(.|\n)*lr of the optimizer is"):
        trained(DistributedDataParallel(net()), lr=0.1 + 0.01 * world().rank)


@pytest.mark.ranks(3)
def test_ddp_changed_on_one_rank_names_parameter_rank_and_step():
    with check():
        model = DistributedDataParallel(net())
        trained(model, steps=3)
        with torch.no_grad():
            model.module[0].bias += 0.5 * (world().rank == 1)
        with pytest.raises(LayoutError, match=r"0.bias differs between rank 0 and rank 1, at"):
            trained(model, steps=1)


@pytest.mark.ranks(2)
def test_ddp_on_the_same_rows():
    with check(), findings() as texts:
        trained(DistributedDataParallel(net()), seed=0)
    assert len(texts) == (world().rank == 0)
    assert all("all ranks train on the same rows" in text for text in texts)
    assert all("DataParallel(..., equal" not in text for text in texts)


@pytest.mark.ranks(2)
def test_ddp_rightly_used_is_not_reported_nor_followed_outside_of_check_mode():
    with check(), findings() as texts:
        model = DistributedDataParallel(net())
        trained(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for turn in range(4):
            with model.no_sync() if turn % 2 == 0 else contextlib.nullcontext():
                model(torch.full((2, 4), 1.0 + world().rank)).sum().backward()
            if turn % 2:
                optimizer.step()
        with model.join():  # rank 1 has one batch more
            for _ in range(2 + world().rank):
                model(torch.randn(3, 4)).sum().backward()
    assert not texts
    trained(DistributedDataParallel(net()), lr=0.1 + 0.01 * world().rank)


@pytest.mark.ranks(2)
def test_sharded_parameters_with_another_learning_rate_on_one_rank():
    with check():
        model = net()
        fully_shard(model)
        trained(model)
        with pytest.raises(LayoutError, match=r"lr of the optimizer is 0.1 on rank 0 and 0.2"):
            trained(model, lr=0.1 + 0.1 * world().rank)

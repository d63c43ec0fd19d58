"""What wrapping a module does, and what it refuses."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from parallel_models import assert_replicas_equal, batch, built, loss_of, mlp
from torch import distributed as dist
from torch import nn

from unisono.comm import world
from unisono.data_parallel import (
    DASO,
    DataParallel,
    DataParallelMultiGPU,
    DataParallelOptimizer,
    DistributedDataset,
    DistributedSampler,
)
from unisono.data_parallel.ranks import reset_layer
from unisono.errors import CollectiveMismatch, LayoutError, UnisonoError
from unisono.graph_parallel import GraphParallel, graph_groups

alone_and_many = pytest.mark.ranks([1, 3], backend="gloo")


class Custom(nn.Module):
    """Parameters that belong to no layer, and a buffer."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.randn(3, generator=generator))
        self.register_buffer("shift", torch.randn(2, generator=generator))
        self.register_buffer("count", torch.tensor(seed))
        self.frozen = nn.Parameter(torch.randn(2, 2, generator=generator), requires_grad=False)


@alone_and_many
def test_all_ranks_take_the_values_of_rank_0_and_no_random_state_changes():
    module, wanted = Custom(world().rank), Custom(0)
    torch.manual_seed(world().rank)
    state = torch.random.get_rng_state()
    model = DataParallel(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, value in wanted.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)
    assert list(model.state_dict()) == [f"module.{key}" for key in wanted.state_dict()]


@pytest.mark.ranks([1, 3])
def test_reset_parameters_gives_the_seeded_values_everywhere():
    module, twin = built(mlp)
    state = torch.random.get_rng_state()
    DataParallel(module, reset_parameters=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_replicas_equal(module)
    torch.manual_seed(2147483646)
    twin.apply(reset_layer)
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.ranks(3)
def test_models_that_differ_are_refused_by_name_on_all_ranks():
    module = mlp()
    if world().rank == 2:
        module[2] = nn.Linear(40, 31)
    with pytest.raises(CollectiveMismatch, match=r"2\.weight differs between rank 0 and rank 2"):
        DataParallel(module)
    with pytest.raises(CollectiveMismatch, match="options"):
        DataParallel(mlp(), bucket_mb=1 + world().rank)
    tied = mlp()
    if world().rank == 1:
        tied[0].bias.requires_grad_(False)
    with pytest.raises(CollectiveMismatch, match=r"0\.bias.*frozen"):
        DataParallel(tied)


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_parameters_frozen_unfrozen_added_or_moved_later_are_noticed():
    module, _ = built(mlp)
    model = DataParallel(module, bucket_mb=100)
    module[0].weight.requires_grad_(False)
    loss_of(model(batch((6,))[1])).backward()
    assert "0.weight" not in model.buckets[0].names
    assert module[0].weight.grad is None
    module[0].weight.requires_grad_(True)
    module.add_module("5", nn.Linear(3, 2, dtype=torch.float64))
    model.zero_grad()
    loss_of(model(batch((6,))[1])).backward()
    assert "0.weight" in model.buckets[0].names
    assert "5.weight" in model.buckets[0].names
    assert world().all_equal(module[0].weight.grad)
    assert world().all_equal(module[5].weight.grad)
    module.to(torch.float32)
    model.zero_grad()
    loss_of(model(batch((6,), dtype=torch.float32)[1])).backward()
    assert {bucket.dtype for bucket in model.buckets} == {torch.float32}
    assert world().all_equal(module[0].weight.grad)


LAYER, OTHER = nn.Linear(2, 1), nn.Linear(2, 1)
SGD = torch.optim.SGD(LAYER.parameters(), lr=0.1)
OURS = DataParallelOptimizer(SGD)


def sampler():
    return DistributedSampler(DistributedDataset(torch.arange(4)))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: DataParallel(None), TypeError, "expected Module"),
        (lambda: DataParallel(SGD), TypeError, r"^module=SGD\(\.\.\.\)\n"),
        (lambda: DataParallel(LAYER, "world"), TypeError, "names no group of ranks"),
        (lambda: DataParallel(LAYER, None, SGD), TypeError, r"HINT: DataParallelOptimizer\(opt"),
        (lambda: DataParallel(LAYER, None, [OURS, "adam"]), TypeError, "not a DataParallelOptim"),
        (lambda: DataParallel(LAYER, None, DASO(SGD, 3)), TypeError, "HINT: DataParallelMultiGPU"),
        (lambda: DataParallel(OTHER, None, OURS), ValueError, r"2 param[\s\S]*module's 2 param"),
        (lambda: DataParallel(LAYER, bucket_mb=0), ValueError, "bucket_mb=25"),
        (lambda: DataParallel(LAYER, compression="zip"), ValueError, '"bf16", "fp16"'),
        (lambda: DataParallel(LAYER, compression="powersgd"), ValueError, "powerSGD_hook"),
        (lambda: DataParallel(LAYER, find_unused=True), TypeError, "HINT: leave it out"),
        (lambda: DataParallel(LAYER, broadcast_buffers=2), TypeError, "HINT: broadcast_buffers=T"),
        (lambda: DataParallelMultiGPU(LAYER, SGD), TypeError, r"^optimizer=SGD\(\.\.\.\)\n"),
        (lambda: DataParallelOptimizer(SGD, "x"), TypeError, "HINT: blocking=True"),
        (lambda: sampler().link("x"), TypeError, "HINT: link"),
        *(
            (lambda n=n: DataParallel(LAYER).samples(n).__enter__(), ValueError, "at least 0")
            for n in (-1, math.nan, "x", True)
        ),
        *(
            (lambda n=n: DataParallel(LAYER).clip_grad_norm(n), ValueError, r"clip_grad_norm\(1\.0")
            for n in (-1, math.nan)
        ),
        (lambda: DataParallel(LAYER).join(divide_by="all").__enter__(), ValueError, "divide_by"),
    ],
)
def test_bad_input_is_answered_with_a_hint(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.ranks(2)
def test_buffers_that_repeat_themselves_follow_rank_0():
    module = nn.BatchNorm1d(3)
    rows = torch.full((1, 3), float(world().rank)).expand(4, 3)
    module.register_buffer("rows", rows)
    model = DataParallel(module)
    assert not rows.any()
    rows[0] += 1 + world().rank
    model(torch.ones(2, 3))
    assert torch.equal(rows, torch.ones(4, 3))


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_a_module_without_values_is_refused_before_anything_travels():
    for module, hint in (
        (nn.Sequential(nn.Linear(2, 2, device="meta")), r"0\.weight is on meta[\s\S]*to_empty"),
        (nn.BatchNorm1d(2, affine=False, device="meta"), "running_mean is on meta"),
        (nn.Sequential(nn.LazyLinear(2)), r"0\.weight has no shape yet[\s\S]*one forward first"),
    ):
        with pytest.raises(ValueError, match=hint):
            DataParallel(module)
    layer = nn.Linear(2, 2, device="meta")
    daso = DASO(torch.optim.SGD(layer.parameters(), lr=0.1), total_epochs=3, ranks_per_node=1)
    with pytest.raises(ValueError, match=r"DataParallelMultiGPU\(Linear\)[\s\S]*weight is on meta"):
        DataParallelMultiGPU(layer, daso)
    with pytest.raises(UnisonoError, match="no data to move"):
        daso.set_model(layer)


def test_a_module_is_wrapped_once():
    layer = nn.Linear(2, 2)
    daso = DASO(torch.optim.SGD(layer.parameters(), lr=0.1), total_epochs=3)
    with pytest.raises(ValueError, match=r"the module itself[\s\S]*DataParallel\(model\.module\)"):
        DataParallel(DataParallel(layer))
    with pytest.raises(ValueError, match=r"with a DataParallel in it\n  found: 1,"):
        DataParallelMultiGPU(nn.Sequential(nn.ReLU(), DataParallel(layer)), daso)
    with pytest.raises(ValueError, match="with a DataParallelMultiGPU in it"):
        DataParallel(DataParallelMultiGPU(layer, daso))


@pytest.mark.ranks(2)
def test_a_second_wrapper_over_the_same_parameters_is_refused_while_the_first_lives():
    net, x = nn.Linear(2, 1).double(), torch.ones(3, 2).double() * (1 + dist.get_rank())
    expected = torch.full((1, 2), 4.5).double()  # the mean over ranks of 3 and 6
    matrix = graph_groups(1)  # two rows of one rank each
    over_rows = functools.partial(GraphParallel, groups=matrix)
    first = DataParallel(net)
    for wrapper in (DataParallel, over_rows):
        for module in (net, nn.Sequential(net), nn.ModuleDict({"a": nn.Linear(1, 1), "b": net})):
            with pytest.raises(LayoutError, match="a DataParallel over 2 ranks"):
                wrapper(module)
    del first
    second = DataParallel(net)
    second(x).sum().backward()
    assert torch.equal(net.weight.grad, expected)
    del second
    net.zero_grad()
    graph = over_rows(net)
    with pytest.raises(LayoutError, match="summed twice"):
        over_rows(graph)
    with pytest.raises(LayoutError, match="a GraphParallel over 2 ranks"):
        DataParallel(graph)
    graph(x).sum().backward()
    assert torch.equal(net.weight.grad, expected)
    del graph
    net.zero_grad()
    over_rows(copy.deepcopy(net))
    again = over_rows(net)
    again(x).sum().backward()
    assert torch.equal(net.weight.grad, expected)


def test_optimizers_are_shown_as_one_or_several_and_cannot_be_replaced():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    several = [DataParallelOptimizer(torch.optim.SGD(part.parameters(), 0.1)) for part in net]
    with pytest.warns(UserWarning, match="updates are blocking"):
        model = DataParallel(net, optimizer=several)
    assert model.optimizer == tuple(several)
    assert DataParallel(nn.Linear(2, 1)).optimizer is None
    with pytest.raises(AttributeError):
        model.optimizer = several[0]


@pytest.mark.parametrize(
    ("argument", "instead"),
    [
        ({"device_ids": [0]}, "leave it out"),
        ({"find_unused_parameters": True}, "leave it out"),
        ({"bucket_cap_mb": 5}, "bucket_mb"),
        ({"process_group": None}, "DataParallel(module, process_group)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_argument_of_torchs_ddp_is_answered_with_what_to_write(argument, instead):
    with pytest.raises(TypeError, match="torch's DDP") as caught:
        DataParallel(nn.Linear(2, 1), **argument)
    assert instead in str(caught.value)


def test_an_argument_of_nobody_is_a_plain_type_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'find_unusd'"):
        DataParallel(nn.Linear(2, 1), find_unusd=True)


def test_a_name_of_the_module_inside_is_answered_with_module():
    model = DataParallel(nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(AttributeError, match=r"model\.module\.append"):
        _ = model.append
    with pytest.raises(AttributeError) as caught:
        _ = model.nothing
    assert "HINT" not in str(caught.value)

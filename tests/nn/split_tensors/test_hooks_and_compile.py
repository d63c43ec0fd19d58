"""Habits of users of torch around split networks: compiling, hooks, gradients, warnings."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from unisono import Partition
from unisono.errors import UnisonoError
from unisono.nn import Split, split, split_rule

ROWS = [1, 1, 2, 1]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 1)).double()


def block_of(x, partition):
    return x[partition.local_slices(x.shape)].clone()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["inside", "a block inside", "outside"])
def test_compiled_networks_give_what_plain_ones_give(form):
    partition, x = Partition(ROWS), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    wanted = made()(x)
    net = made()
    if form == "inside":
        net = split(torch.compile(net, backend="eager"), partition)  # type: ignore[arg-type]
    elif form == "outside":
        net = torch.compile(split(net, partition), backend="eager")
    else:
        net = split(nn.Sequential(torch.compile(net[0], backend="eager"), *net[1:]), partition)
    torch.testing.assert_close(net(block_of(x, partition)).whole(), wanted)


@pytest.mark.ranks(2)
def test_a_gradient_has_the_shape_that_the_tensor_shows():
    partition, x = Partition(ROWS), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    seed = torch.randn_like(x)
    whole.square().backward(seed)
    parts = Split.of(block_of(x, partition).requires_grad_(), partition)
    parts.square().backward(seed)
    assert parts.grad.shape == x.shape
    torch.testing.assert_close(parts.grad.whole(), whole.grad)
    with pytest.raises(RuntimeError, match="one number"):
        parts.square().backward()


@pytest.mark.ranks(2)
def test_an_autograd_function_may_be_declared_as_pointwise():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            return 3 * ctx.saved_tensors[0] ** 2 * grad

    split_rule(Cube, "pointwise")
    partition, x = Partition(ROWS), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    block = block_of(x, partition).requires_grad_()
    y = Cube.apply(Split.of(block, partition))
    torch.testing.assert_close(y.whole(), x**3)
    y.sum().backward()
    torch.testing.assert_close(block.grad, 3 * block.detach() ** 2)


@pytest.mark.ranks(2)
def test_a_large_gather_is_warned_of_once_a_forward():
    class Gathers(nn.Module):
        def forward(self, x):
            return x.put(torch.tensor([0]), x.new_ones(1)) + x

    partition, x = Partition(ROWS), torch.randn(1, 4, 512, 256)
    net = split(Gathers(), partition)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        net(block_of(x, partition))
    texts = [str(one.message) for one in seen]
    assert len(texts) == (partition.comm.rank == 0)
    assert all("put" in text and "[1, 4, 512, 256]" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(block_of(x[:, :, :8], partition))


@pytest.mark.ranks(2)
def test_copies_of_a_split_network_and_of_split_tensors():
    partition, x = Partition(ROWS), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    parts = split(made(), partition)
    y = parts(block_of(x, partition))
    for again in (pickle.loads(pickle.dumps(parts)), copy.deepcopy(parts)):
        torch.testing.assert_close(again(block_of(x, partition)).whole(), y.whole())
    twin = copy.deepcopy(y.detach())
    twin += 1
    torch.testing.assert_close(twin.whole(), y.whole() + 1)
    with pytest.raises(UnisonoError, match="pickled"):
        pickle.dumps(y)


def with_hooks(net: nn.Sequential, seen: list[object]) -> nn.Sequential:
    """Return a network whose hooks note shapes, and double an output and a gradient."""
    net[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    net[1].register_forward_hook(lambda module, args, y: y * 2)

    def doubled(module, inner, outer):
        seen.append([inner[0].shape, outer[0].shape])
        return (inner[0] * 2,)

    net[1].register_full_backward_hook(doubled)
    net[2].register_full_backward_pre_hook(lambda module, outer: seen.append(outer[0].shape))
    return net


@pytest.mark.ranks(2)
def test_hooks_of_modules_see_what_they_see_in_one_process():
    partition, x = Partition(ROWS), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    expected: list[object] = []
    noted: list[object] = []
    plain, net = with_hooks(made(), expected), with_hooks(made(), noted)
    whole, block = x.clone().requires_grad_(), block_of(x, partition).requires_grad_()
    plain(whole).square().sum().backward()
    parts = split(net, partition)
    parts.register_full_backward_hook(lambda module, inner, outer: noted.append(outer[0].shape))
    parts(block).square().sum().backward()
    assert noted.pop() == x.shape
    assert noted == expected
    torch.testing.assert_close(block.grad, whole.grad[partition.local_slices(x.shape)])
    torch.testing.assert_close(net[0].weight.grad, plain[0].weight.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("whole_too", [False, True])
def test_inner_layers_may_be_sharded_by_fsdp(whole_too):
    from torch.distributed.fsdp import fully_shard

    partition, x = Partition(ROWS), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    plain, net = made(), made()
    fully_shard(net[0])
    if whole_too:
        fully_shard(net)
    parts, block = split(net, partition), block_of(x, partition).requires_grad_()
    y = parts(block)
    y.square().mean().backward()
    plain(x).square().mean().backward()
    torch.testing.assert_close(y.whole(), plain(x))
    torch.testing.assert_close(net[0].weight.grad.full_tensor(), plain[0].weight.grad)


@pytest.mark.ranks(2)
def test_functional_call_of_a_split_network():
    partition, x = Partition(ROWS), torch.randn(1, 2, 6, 5, dtype=torch.float64)
    net = split(made(), partition)
    doubled = {key: p.detach() * 2 for key, p in net.named_parameters()}
    y = torch.func.functional_call(net, doubled, (block_of(x, partition),))
    plain = {key.removeprefix("module."): p for key, p in doubled.items()}
    torch.testing.assert_close(y.whole(), torch.func.functional_call(made(), plain, (x,)))

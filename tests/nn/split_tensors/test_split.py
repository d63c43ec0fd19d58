"""Whole networks on blocks: results of one process, and nothing that passes by in silence."""

from __future__ import annotations

import copy
import itertools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono import Partition
from unisono.comm.health import check as checking
from unisono.errors import CheckWarning, CollectiveMismatch, PartitionError, UnisonoError
from unisono.nn import Split, agreement, split, split_rule
from unisono.nn.split_tensors import products

SHAPE = (2, 3, 11, 8)
ROWS = [1, 1, 2, 1]


class Net(nn.Module):
    """A forward of its own, with what networks do: skips, norms, pooling, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm(self.stem(x)), inplace=True)
        gate = torch.sigmoid(self.gate(first.mean((2, 3))))
        first = first * gate[:, :, None, None]
        deep = F.interpolate(self.up(F.gelu(self.down(first))), first.shape[2:], mode="bilinear")
        return self.last(torch.cat([first, deep], 1))


def made(kind=Net):
    torch.manual_seed(0)
    return kind().double()


def whole_input(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def own_block(x: Tensor, partition: Partition) -> Tensor:
    return x[partition.local_slices(tuple(x.shape))].clone().requires_grad_()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def step(net, x: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(net(x), target)
    loss.backward()
    return loss.detach()


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_a_step_of_a_split_network_is_that_of_one_process(dim):
    comm = unisono.world()
    shape = (3, 3, 11, 8)
    partition = Partition([comm.size if d == dim else 1 for d in range(4)])
    net = made()
    whole, x = copy.deepcopy(net), whole_input(shape).requires_grad_()
    labels = torch.randint(2, (3, 11, 8), generator=torch.Generator().manual_seed(1))
    wanted = step(whole, x, labels)
    block = own_block(x.detach(), partition)
    parts = split(net, partition)
    close(step(parts, block, labels), wanted)
    close(block.grad, x.grad[partition.local_slices(shape)])
    for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-11, msg=name)
    for p, q in zip(net.buffers(), whole.buffers(), strict=True):
        close(p.double(), q.double())
    assert parts.report() == []


@pytest.mark.ranks(2)
def test_one_split_tensor_serves_many_steps_outside_of_a_network():
    partition, x = Partition([1, 1, 2, 1]), whole_input((2, 3, 5, 4))
    found = []
    for given in (x, Split.of(own_block(x, partition).detach(), partition)):
        weight = torch.ones(3, 1, 1, dtype=x.dtype, requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (given * weight).square().mean().backward()
            optimizer.step()
        found.append(weight.detach())
    close(*found)


@pytest.mark.ranks(2)
def test_labels_may_be_split_too_and_classes_weighted():
    partition = Partition(ROWS)
    y = whole_input((2, 4, 6, 5))
    labels = torch.randint(4, (2, 6, 5), generator=torch.Generator().manual_seed(1))
    weight = torch.tensor([0.1, 2.0, 3.0, 0.5], dtype=torch.float64)
    wanted = F.cross_entropy(y, labels, weight, ignore_index=3)
    parts = Split.of(own_block(y, partition), partition)
    own = Split.of(labels[:, partition.local_slices((2, 4, 6, 5))[2]], Partition([1, 2, 1]))
    close(F.cross_entropy(parts, labels, weight, ignore_index=3), wanted)
    close(F.cross_entropy(parts, own, weight, ignore_index=3), wanted)
    smooth = {"label_smoothing": 0.2, "ignore_index": 3}
    close(
        F.cross_entropy(parts, own, weight, **smooth), F.cross_entropy(y, labels, weight, **smooth)
    )
    turned = y.transpose(1, 3).contiguous().transpose(1, 3)
    turned = Split.of(own_block(turned, partition), partition)
    close(F.nll_loss(turned, labels), F.nll_loss(y, labels))
    F.nll_loss(turned, labels).backward()
    close(F.mse_loss(parts, y.flip(0)), F.mse_loss(y, y.flip(0)))
    close(F.l1_loss(parts, y * 2, reduction="sum"), F.l1_loss(y, y * 2, reduction="sum"))


@pytest.mark.ranks(2)
def test_gradients_of_all_parameters_are_summed_in_one_call():
    partition = Partition(ROWS)
    net = split(made(), partition)
    loss = net(own_block(whole_input(), partition)).square().mean()
    with unisono.comm.trace() as trace:
        loss.backward()
    convolutions = [p for name, p in net.named_parameters() if "gate" not in name]
    sums = [event.sent for event in trace.events if event.op == "all_reduce"]
    assert sums.count(8 * sum(p.numel() for p in convolutions)) == 1
    assert len(sums) == 3, "beside it, the statistics of a norm and of a mean"


@pytest.mark.ranks(2)
def test_second_derivatives_are_those_of_one_process():
    partition = Partition(ROWS)
    net = made().train()
    x = whole_input().requires_grad_()

    def penalty(module, value, loss_of):
        (grad,) = torch.autograd.grad(loss_of(module(value)), value, create_graph=True)
        return grad

    g = penalty(net, x, lambda y: (y**3).sum())
    (wanted,) = torch.autograd.grad(g.square().sum(), x)
    block = own_block(x.detach(), partition)
    g = penalty(split(made(), partition), block, lambda y: (y**3).sum())
    total = Split.of(g, partition).square().sum()
    (found,) = torch.autograd.grad(total, block)
    close(found, wanted[partition.local_slices(SHAPE)])


@pytest.mark.ranks(2)
def test_what_has_no_rule_is_gathered_and_reported_or_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Identity(), Put())

        def forward(self, x):
            return self.inner(x) + 1

    class Put(nn.Module):
        def forward(self, x):
            return put(x)

    def put(x):
        return torch.put(x, torch.tensor([0]), torch.ones(1, dtype=x.dtype))

    partition = Partition(ROWS)
    x = whole_input()
    net = split(Odd(), partition)
    close(net(own_block(x, partition)), put(x) + 1)
    ((found, times),) = net.report()
    assert (found.function, found.module, found.shape) == ("put", "inner.1", SHAPE)
    assert times == 1
    with pytest.raises(UnisonoError, match=r"strict=True(.|\n)*split_rule"):
        split(Odd(), partition, strict=True)(own_block(x, partition))


@pytest.mark.ranks(2)
def test_a_smaller_argument_that_is_made_whole_is_reported():
    rows = Split.cut(torch.ones(4, 6), Partition([2, 1]))
    shift = torch.arange(6.0)
    y = rows + Split.cut(shift, Partition([2]))
    assert torch.equal(y.whole(), torch.ones(4, 6) + shift)
    assert sorted(y.cuts) == [0]
    ((gathered, times),) = rows.run.gathered.items()
    assert (gathered.shape, times) == ((6,), 1)


@pytest.mark.ranks(2)
def test_a_rule_of_the_users_own():
    partition = Partition(ROWS)
    x = whole_input()
    before = Split.of(own_block(x, partition), partition, strict=True)
    rounded = torch.fake_quantize_per_tensor_affine
    with pytest.raises(UnisonoError):
        rounded(before, 0.1, 0, -128, 127)
    split_rule(rounded, "pointwise")
    close(rounded(before, 0.1, 0, -128, 127).whole(), rounded(x, 0.1, 0, -128, 127))
    with pytest.raises(ValueError, match="pointwise"):
        split_rule(rounded, "anything")


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.ranks(2)
def test_what_passes_by_the_rules_is_refused():
    partition = Partition(ROWS)
    block = own_block(whole_input(), partition)
    x = Split.of(block, partition)
    with pytest.raises(UnisonoError, match=r"autograd|below"):
        Twice.apply(x) + 1

    class Reentrant(nn.Module):
        def forward(self, x):
            return checkpoint(torch.sin, x, use_reentrant=True)

    with pytest.raises(UnisonoError, match=r"use_reentrant=False"):
        split(Reentrant(), partition)(block)
    with pytest.raises(UnisonoError):
        torch.func.vmap(torch.sin)(x)
    with pytest.raises(UnisonoError, match="out="):
        torch.add(block, 1, out=x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_change_beside_a_view_that_moved_is_noticed(mode):
    """Also through other views, a positional `inplace`, and views of views."""

    class Program(nn.Module):
        def __init__(self, program):
            super().__init__()
            self.program = program

        def forward(self, x):
            return self.program(x * 1)

    def through_another_view(y):
        moved, beside = y.view(1, 1, 2, 3), y[:, :, :, :1]
        beside.mul_(2)
        return moved.sum()

    def by_a_positional_argument(y):
        moved = y.view(1, 1, 2, 3)
        F.relu(y, True)
        return moved.sum()

    def of_parts(y):
        part = torch.split_with_sizes(y, [2, 4], 2)[0]
        y.mul_(2)
        return part.sum()

    def of_a_view_of_a_view(y):
        last = y.view(1, 1, 2, 3)[:, :, :, :2].transpose(2, 3)
        y.mul_(2)
        return last.sum()

    def unseen(y):
        y.view(1, 1, 2, 3)
        return y.mul_(2).sum()

    partition = Partition(ROWS)
    block = torch.full((1, 1, [4, 2][partition.comm.rank], 1), 2.0, requires_grad=True)
    programs = [through_another_view, of_parts, of_a_view_of_a_view]
    if mode is not torch.inference_mode:  # which does not count changes
        programs.append(by_a_positional_argument)
    for program in programs:
        with mode(), pytest.raises(UnisonoError, match="in-place"):
            split(Program(program), partition)(block)
    with mode():
        assert split(Program(unseen), partition)(block).item() == 24


@pytest.mark.ranks(2)
def test_random_numbers_are_those_of_one_network():
    comm = unisono.world()

    class Drops(nn.Module):
        def forward(self, x):
            kept = (torch.rand(x.shape[0], 1, 1, 1, dtype=x.dtype) > 0.5).double()
            return F.dropout(x, 0.5), F.dropout2d(x, 0.5), x * kept

    partition = Partition(ROWS)
    torch.manual_seed(comm.rank)  # as ranks often are
    before = torch.get_rng_state()
    ones = torch.ones(partition.local_shape((8, 16, 12, 6)), dtype=torch.float64)
    single, channels, path = (y.whole() for y in split(Drops(), partition)(ones))
    assert set(single.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(single[:, :, :6], single[:, :, 6:])
    assert channels.flatten(2).unique(dim=2).shape[2] == 1
    assert path.flatten(1).unique(dim=1).shape[1] == 1
    assert 0.4 < single.mean() / 2 < 0.6
    assert len({str(t) for t in comm.all_gather_object(single)}) == 1
    after = torch.get_rng_state()
    assert not torch.equal(before, after)  # one number was drawn to agree on a seed
    torch.manual_seed(comm.rank)
    torch.randint(2**31, ())
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout2d, torch.feature_dropout])
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_dropout_draws_what_one_process_draws(drop, p):
    class Twice(nn.Module):
        def forward(self, x):
            return drop(drop(x, p, True) + 1, p, True)

    net = Twice()
    whole = torch.randn(3, 4, 7, 5, generator=torch.Generator().manual_seed(0))
    for shape in ([1, 1, unisono.world().size, 1], [unisono.world().size, 1, 1, 1]):
        partition = Partition(shape)
        results = []
        for run in (net, split(net, partition)):
            x = whole if run is net else whole[partition.local_slices(whole.shape)]
            x = x.clone().requires_grad_()
            torch.manual_seed(5)
            y = run(x)
            y.sum().backward()
            results.append((y, x.grad, torch.get_rng_state()))
        (y, slope, state), (z, own, stood) = results
        assert torch.equal(z.whole(), y)
        assert torch.equal(own, slope[partition.local_slices(whole.shape)])
        assert torch.equal(stood, state)


@pytest.mark.ranks(2)
def test_states_are_those_of_the_plain_module():
    net = made()
    parts = split(net, Partition(ROWS))
    assert list(parts.state_dict()) == list(net.state_dict())
    other = made()
    with torch.no_grad():
        other.stem.weight.add_(1)
    parts.load_state_dict(other.state_dict())
    close(net.stem.weight.detach(), other.stem.weight.detach())
    outer = nn.Sequential(split(made(), Partition(ROWS)))
    assert next(iter(outer.state_dict())) == "0.stem.weight"
    outer.load_state_dict(outer.state_dict())


@pytest.mark.ranks(2)
def test_blocks_that_do_not_fit_are_refused_on_all_ranks():
    comm = unisono.world()
    partition = Partition(ROWS)
    net = split(nn.Conv2d(3, 1, 3), partition)
    with pytest.raises(PartitionError, match="dims"):
        net(torch.zeros(3, 4, 4))
    with pytest.raises(CollectiveMismatch, match="dims"):
        net(torch.zeros((1, 3, 4, 4)[comm.rank :]))
    with pytest.raises(PartitionError, match="dim 3"):
        net(torch.zeros(1, 3, 4, 4 + comm.rank))
    with pytest.raises(PartitionError, match="points"):
        net(torch.zeros(1, 3, comm.rank, 4))
    with pytest.raises(CollectiveMismatch, match="dtype"):
        net(torch.zeros(1, 3, 4, 4, dtype=[torch.float32, torch.float64][comm.rank]))
    with pytest.raises(UnisonoError, match="without a tensor"):
        net()
    with pytest.raises(TypeError, match="partition"):
        split(net, [1, 1, 2, 1])
    assert comm.all_reduce(torch.ones(1)).item() == 2


class Two(nn.Module):
    """A network of two images and a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor, more: dict | None = None, factor: float = 1.0):
        z = self.conv(x) * self.conv(y) * factor
        return z if more is None else z + more["bias"][0]


@pytest.mark.ranks([2, 4])
def test_a_second_input_may_be_split_too():
    comm = unisono.world()
    partition = Partition(ROWS if comm.size == 2 else [1, 1, 2, 2])
    net = made(Two)
    whole = copy.deepcopy(net)
    x, y = whole_input().requires_grad_(), (whole_input() * 2).requires_grad_()
    more = {"bias": [torch.linspace(0, 1, 8).double()]}
    wanted = whole(x, y, more)
    wanted.square().sum().backward()
    parts, (a, b) = split(net, partition), [own_block(t.detach(), partition) for t in (x, y)]
    for call in (
        lambda: parts(a, Split.of(b, partition), more),
        lambda: parts(a, y=Split.of(b, partition), more=more),
        lambda: parts(Split.of(a, partition), Split.of(b, partition), more),
    ):
        net.zero_grad()
        a.grad = b.grad = None
        found = call()
        close(found.whole(), wanted)
        found.square().sum().backward()
        own = partition.local_slices(SHAPE)
        close(a.grad, x.grad[own])
        close(b.grad, y.grad[own])
        close(net.conv.weight.grad, whole.conv.weight.grad)
    close(parts(a, a).whole(), whole(x, x))
    replicated = parts(a, y.detach(), more)  # the same on all ranks: each takes its part
    close(replicated.whole(), wanted)
    assert "[6, 5]" in repr(found), "the sizes of the blocks"
    again = split(nn.ReLU(), partition)(found)  # what one network makes goes into the next
    close(again.whole(), wanted.relu())


@pytest.mark.ranks(2)
def test_what_should_be_equal_on_all_ranks_is_compared():
    comm = unisono.world()
    partition = Partition(ROWS)
    x = whole_input((2, 3, 10, 8))
    a = own_block(x, partition)
    net = split(made(Two), partition)
    mine = torch.arange(8).double() + comm.rank
    for unlike, words in (
        (lambda: net(a, a.clone()), "1: .*bits"),  # a second own block of equal shape
        (lambda: net(a, own_block(x[:, :, :9], partition)), "1: .*5, 8.*\n.*4, 8"),
        (lambda: net(a, x, {"bias": [mine]}), r"more|bias\[0\]"),
        (lambda: net(a, x, factor=1.0 + comm.rank), "factor: 2.0"),
        (lambda: net(a, x) if comm.rank else net(a, x, None), "None"),
        (lambda: net(a, x.float() if comm.rank else x), "float32"),
        (lambda: net.train(comm.rank == 0)(a, x), "train mode: 0"),
    ):
        with pytest.raises(CollectiveMismatch, match=r"Split.of") as raised:
            unlike()
        assert re.search(words, str(raised.value)), str(raised.value)
    large = torch.zeros(2, 3, 10, 8000, dtype=torch.bool)
    large[..., 4000 * comm.rank] = True  # as many on both ranks, at other places
    with pytest.raises(CollectiveMismatch):
        split(made(Two), partition)(torch.zeros(2, 3, 5, 8000).double(), large)
    with unisono.nn.structure_check("off"):
        net.train()(a, Split.of(a, partition), factor=1.0 + comm.rank)
    torch.manual_seed(comm.rank)
    other = split(Two().double(), partition)
    with pytest.raises(CollectiveMismatch, match=r"conv.weight(.|\n)*manual_seed"):
        other(a, x)
    assert comm.all_reduce(torch.ones(1)).item() == 2


@pytest.mark.ranks(4)
def test_a_split_tensor_of_other_ranks_is_refused():
    comm = unisono.world()
    a = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    other = Split.of(a, Partition([4, 1, 1, 1]))
    with pytest.raises(UnisonoError, match=r"other ranks(.|\n)*Split.of"):
        split(made(Two), Partition([1, 1, 2, 2]))(a, other)
    assert comm.all_reduce(torch.ones(1)).item() == 4


def test_one_rank_needs_no_split_at_all():
    net = made()
    x = whole_input()
    close(split(net, Partition([1, 1, 1, 1]))(x), net(x))


class Attend(nn.Module):
    """Self-attention of 6 heads, of which keys have 3, under a causal mask or a bias."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.kv = nn.Linear(12, 12), nn.Linear(12, 12)
        self.bias = nn.Parameter(torch.randn(1, 6, 7, 7))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(2, (6, 2)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, 3, 2)).permute(2, 0, 3, 1, 4)
        mask = None if self.causal else self.bias
        y = F.scaled_dot_product_attention(q, k, v, mask, 0.0, self.causal, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(2)


@pytest.mark.ranks([2, 3])
def test_attention_over_split_tokens_is_that_of_one_process_in_every_way():
    comm = unisono.world()
    partition = Partition([1, comm.size, 1])
    for causal, way in itertools.product([True, False], ["auto", "gathered", "ulysses", "ring"]):
        net = made(lambda causal=causal: Attend(causal))
        whole, x = copy.deepcopy(net), whole_input((2, 7, 12)).requires_grad_()
        (wanted,) = torch.autograd.grad(whole(x).square().mean(), x, create_graph=False)
        whole(x).square().mean().backward()
        block = own_block(x.detach(), partition)
        parts = split(net, partition, strict=True, attention=way)
        if way == "ulysses" and comm.size == 2:
            with pytest.raises(UnisonoError, match=r"6 heads \(keys: 3\) for 2 ranks"):
                parts(block)
            continue
        loss = parts(block).square().mean()
        (grad,) = torch.autograd.grad(loss, block, create_graph=True)
        close(grad, wanted[partition.local_slices((2, 7, 12))])
        parts(block).square().mean().backward()
        close(block.grad, grad)
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            if q.grad is not None:
                close(p.grad, q.grad)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("more", [0, 1])
def test_rows_of_a_mask_are_those_of_one_process_where_ranks_hold_one_token(more):
    comm = unisono.world()
    partition, tokens = Partition([1, comm.size, 1]), comm.size + more
    net = made(lambda: nn.TransformerEncoderLayer(12, 6, 16, dropout=0.0, batch_first=True))
    mask = nn.Transformer.generate_square_subsequent_mask(tokens, dtype=torch.float64)
    x = whole_input((2, tokens, 12))
    close(split(net, partition)(own_block(x, partition), mask).whole(), net(x, mask))


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("way", ["gathered", "ring", "ulysses"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_drops_the_weights_that_one_process_drops(way, is_causal):
    size = unisono.world().size

    class Attend(nn.Module):
        def forward(self, x):
            for _ in range(2):
                keys, values = 2 * x, x + 1
                x = F.scaled_dot_product_attention(x, keys, values, None, 0.4, is_causal)
            return x

    whole = whole_input((3, 2 * size, 7, 4))
    for shape in ([1, 1, size, 1], [size, 1, 1, 1]):
        partition, results = Partition(shape), []
        for run in (Attend(), split(Attend(), partition, attention=way)):
            x = own_block(whole, partition) if results else whole
            x = x.detach().clone().requires_grad_()
            torch.manual_seed(5)
            y = run(x)
            y.square().sum().backward()
            results.append((y.whole() if results else y, x.grad, torch.get_rng_state()))
        (y, slope, state), (z, own, stood) = results
        close(z, y)
        close(own, own_block(slope, partition))
        assert torch.equal(state, stood)


@pytest.mark.ranks(2)
def test_very_many_dropped_weights_are_drawn_by_each_rank_with_a_warning(monkeypatch):
    monkeypatch.setattr(products, "DRAWN_BYTES", 100)
    x = whole_input((1, 2, 8, 8))
    eye = torch.eye(8, dtype=torch.float64).expand(1, 2, 8, 8).clone()
    torch.manual_seed(3)
    q, k, v = (Split.cut(t, Partition([1, 1, 2, 1])) for t in (x, x, eye))
    with pytest.warns(UserWarning, match="dropout of 128 attention weights"):
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).whole() == 0
    assert 0.2 < dropped.double().mean() < 0.8
    assert not torch.equal(dropped[:, 0], dropped[:, 1])


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("way", ["split", "of", "layer"])
def test_equal_blocks_on_all_ranks_are_taken_for_the_whole_tensor(way):
    size = unisono.world().size
    partition = Partition([1, 1, size, 1])
    uses = {
        "split": lambda x: split(nn.Conv2d(3, 2, 1).double(), partition)(x),
        "of": lambda x: Split.of(x, partition),
        "layer": lambda x: unisono.nn.DistributedFeatureConv2d(partition, 3, 2, 1).double()(x),
    }
    for x, count in ((whole_input(), 1), (torch.ones(SHAPE, dtype=torch.float64), 0)):
        agreement._calls.clear()
        checking._reported.clear()
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            uses[way](x)
        texts = [str(w.message) for w in caught if issubclass(w.category, CheckWarning)]
        assert len(texts) == count * (unisono.world().rank == 0)
        assert all(f"joined to [2, 3, {11 * size}, 8]" in text for text in texts)

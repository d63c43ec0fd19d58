"""What a split network will send, on paper: the same as the trace of a real step."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.comm import trace
from unisono.errors import PartitionError, UnisonoError
from unisono.nn import Split, plan_report, split
from unisono.topology import Partition


class Skips(nn.Module):
    """A forward of its own: a skip, a gate, an interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.gate = nn.Linear(4, 4)
        self.last = nn.Sequential(nn.Dropout(0.2), nn.Conv2d(8, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.norm(self.stem(x)))
        first = first * torch.sigmoid(self.gate(first.mean((2, 3))))[:, :, None, None]
        deep = F.interpolate(self.up(F.gelu(self.down(first))), first.shape[2:], mode="bilinear")
        return self.last(torch.cat([first, deep], 1))


class Tokens(nn.Module):
    """Attention over all points, with positions and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, stride=2)
        self.place = nn.Parameter(torch.zeros(1, 24, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(x.mean(1))


def chain() -> nn.Module:
    """Layers of many kinds, one after the other; a median has no rule."""
    return nn.Sequential(
        nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2),
        nn.InstanceNorm2d(4, affine=True), nn.Upsample(scale_factor=2), nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


def real_step(net: nn.Module, shape: tuple[int, ...], grid: list[int], input_grad: bool):
    """Return what this rank sends, as the trace measures it, and what is gathered."""
    partition = Partition(grid)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    own = x[partition.local_slices(shape)].clone().requires_grad_(input_grad)
    made = split(net, partition)
    made(own)  # whatever happens only once
    with trace(call_sites=False) as forward:
        y = made(own)
    end = y.local if isinstance(y, Split) else y
    with trace(call_sites=False) as backward:
        end.backward(torch.ones_like(end))
    found = [[(e.op, e.sent) for e in part.events] for part in (forward, backward)]
    return *found, tuple(made.report())


def grids(ranks: int) -> list[list[int]]:
    along = [[ranks if d == dim else 1 for d in range(4)] for dim in (0, 2, 3)]
    return [*along, [1, 1, 2, 2], [2, 1, 1, 2]] if ranks == 4 else along


@pytest.mark.ranks([2, 3, 4])
@pytest.mark.parametrize("kind", [Skips, Tokens, chain])
def test_a_plan_is_what_the_trace_of_a_real_step_measures(kind):
    comm = unisono.world()
    shape = (5, 3, 12, 8)
    torch.manual_seed(0)
    net = kind()
    state = copy.deepcopy(net.state_dict())
    for number, grid in enumerate(grids(comm.size)):
        input_grad = number % 2 == 0
        plan = plan_report(net, shape, grid, input_grad=input_grad, ranks=[comm.rank])
        own = plan.ranks[comm.rank]
        forward, backward, gathered = real_step(copy.deepcopy(net), shape, grid, input_grad)
        assert [(s.verb, s.bytes) for s in own.sent if s.phase == "forward"] == forward, grid
        assert [(s.verb, s.bytes) for s in own.sent if s.phase == "backward"] == backward, grid
        assert own.bytes("forward") == sum(sent for _, sent in forward)
        assert own.gathered == gathered
    for name, value in net.state_dict().items():
        assert torch.equal(value, state[name]), "the network was changed"


def test_bytes_grow_with_the_surface_not_the_volume():
    net = nn.Conv2d(1, 1, 3, padding=1)
    found = [plan_report(net, (1, 1, n, n), [1, 1, 2, 1]) for n in (128, 256, 512)]
    assert [plan.ranks[0].bytes("forward") for plan in found] == [512, 1024, 2048]
    half = plan_report(net.to(torch.bfloat16), (1, 1, 512, 512), [1, 1, 2, 1])
    assert half.ranks[0].bytes("forward") == 1024


def test_a_plan_says_where_and_why_something_is_sent_or_gathered():
    class Renorm(nn.Module):
        def forward(self, x):
            return torch.renorm(x, 2, 1, 1.0)

    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), Renorm())
    plan = plan_report(net, (2, 3, 16, 8), Partition([1, 1, 2, 1], comm=None))
    text = str(plan)
    assert "forward   0         exchange" in text
    assert "renorm of [2, 4, 16, 8] in 2: no rule" in text
    middle = plan_report(net[0], (1, 3, 16, 8), [1, 1, 4, 1])
    assert middle.busiest in (1, 2)
    assert [sum(s.phase == "forward" for s in p.sent) for p in middle.ranks.values()] == [1] * 4


def test_a_plan_of_a_large_network_needs_neither_its_memory_nor_its_data():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv3d(1, 64, 3, padding=1), nn.Conv3d(64, 64, 3, padding=1))
    plan = plan_report(net, (1, 1, 4096, 4096, 4096), [1, 1, 8, 8, 1], ranks=[9])
    sent = [one.bytes for one in plan.ranks[9].sent if one.phase == "forward"]
    assert len(sent) == 2  # one exchange for both dims that are cut
    assert sum(sent) > 65 * 4 * 512 * 4096 * 4  # four faces of both layers
    assert not math.isinf(sum(sent))


def test_pooling_with_padding_has_a_plan():
    report = plan_report(nn.MaxPool2d(3, 2, 1), (1, 1, 16, 16), [1, 1, 2, 1])
    assert report.ranks[0].bytes("forward") + report.ranks[1].bytes("forward") > 0
    assert report.gathered == ()


def test_what_cannot_be_planned_is_refused():
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    with pytest.raises(PartitionError, match=r"3 dims != 4"):
        plan_report(nn.Conv1d(1, 1, 3), (1, 1, 8), [1, 1, 2, 1])
    with pytest.raises(PartitionError, match=r"2 points for 3 ranks"):
        plan_report(nn.ReLU(), (1, 1, 2), [1, 1, 3])
    with pytest.raises(UnisonoError, match=r"asks for values[\s\S]*HINT: .*trace"):
        plan_report(Looks(), (1, 1, 8), [1, 1, 2])

    class Shown(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + float(x.detach().numpy().max())

    with pytest.raises(UnisonoError, match=r"forward of 1 \(Shown\) asks for values"):
        plan_report(nn.Sequential(nn.ReLU(), Shown()), (1, 1, 8), [1, 1, 2])
    with pytest.raises(RuntimeError, match=r"3 channels, but got 2 channels"):
        plan_report(nn.Sequential(nn.ReLU(), nn.Conv1d(3, 1, 3)), (1, 2, 8), [1, 1, 2])
    with pytest.raises(RuntimeError) as wrong:
        plan_report(nn.Sequential(nn.ReLU(), nn.Linear(3, 1)), (1, 8, 2), [1, 2, 1])
    assert "1 (Linear)" in wrong.value.__notes__[0]
    with pytest.raises(ValueError, match=r"parts=1 or more"):
        plan_report(nn.ReLU(), (1, 1, 8), [1, 1, 0])
    with pytest.raises(PartitionError, match=r"neither the shape"):
        plan_report(nn.ReLU(), "abc", [1, 1, 2])

"""What a network carries besides its layers: ties, hooks, forwards of its own. Kept, or refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from unisono.errors import PartitionError
from unisono.nn import DistributedPad, DistributedSequential
from unisono.nn.distribute import distribute
from unisono.nn.state import check_replicas, no_sync
from unisono.topology import Partition


def conv(a=1, b=1):
    """Return a layer that looks at neighbours."""
    return nn.Conv2d(a, b, 3, padding=1)


def tied(a, b):
    """Return two layers with one weight."""
    b.weight = a.weight
    return a, b


class Filled(nn.Conv2d):
    """A layer that only fills in arguments."""

    def __init__(self):
        super().__init__(1, 1, 3, padding=1)


class Swish(nn.Module):
    """An elementwise function without children."""

    def forward(self, x):
        """Return it."""
        return x * torch.sigmoid(x)


class Skip(nn.Sequential):
    """A chain with a forward of its own."""

    def forward(self, x):
        """Return the input too."""
        return x + super().forward(x)


class Centred(nn.ReLU):
    """A subclass that looks at all points."""

    def forward(self, x):
        """Return it."""
        return x - x.mean()


class Standardised(nn.Conv2d):
    """A convolution that computes its weight."""

    def forward(self, x):
        """Return it."""
        return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)


class Lent(nn.Module):
    """A block that uses a weight of its child as its own."""

    def __init__(self):
        super().__init__()
        self.body = conv()
        self.lent = self.body.bias

    def forward(self, x):
        """Return it."""
        return self.body(x) * self.lent


class Crop(nn.Module):
    """A short cut around a stage that loses the odd row."""

    def __init__(self, crop):
        super().__init__()
        self.body, self.pool, self.up = conv(), nn.MaxPool2d(2), nn.ConvTranspose2d(1, 1, 2, 2)
        self.crop = crop

    def forward(self, x):
        """Return the sum where both have rows."""
        a = self.body(x)
        return self.crop(a) + self.up(self.pool(a))


def around_the_head():
    """Return a network whose first layers stand behind its head again."""
    k, norm = conv(), nn.BatchNorm2d(1)
    return nn.Sequential(
        k, norm, nn.Flatten(), nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)), k, norm
    )


NETS = {
    "tied": lambda: nn.Sequential(*tied(conv(), conv()), Filled()),
    "tied around a mean": lambda: nn.Sequential(
        k := nn.Conv2d(1, 1, 1), conv(), nn.AdaptiveAvgPool2d(1), tied(k, nn.Conv2d(1, 1, 1))[1]
    ),
    "tied in the head": lambda: nn.Sequential(
        conv(), nn.Flatten(), *tied(nn.Linear(64, 64), nn.Linear(64, 64))
    ),
    "around the head": around_the_head,
    "lent": lambda: nn.Sequential(Lent(), nn.PReLU(), Swish(), Skip(conv(), nn.Tanh())),
    "weight norm in the head": lambda: nn.Sequential(
        conv(), nn.Flatten(), parametrizations.weight_norm(nn.Linear(64, 3)), nn.Softmax(1)
    ),
}


@pytest.mark.ranks(2, timeout=90)
@pytest.mark.parametrize("head", ["replicate", "batch"])
def test_what_layers_share_they_share_when_split(head):
    P = Partition([1, 1, 2, 1])

    def backward(net, plain, batch, name):
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, 1, 8, 8, dtype=torch.float64, generator=generator)
        y, z = net(x[P.local_slices(x.shape)]), plain(x)
        own = P.local_slices(z.shape) if z.dim() == 4 else ()
        if y.shape[1:] == z.shape[1:]:  # whole samples: all of them, or some
            own = () if len(y) == batch else Partition([2]).local_slices([batch])
        torch.testing.assert_close(y, z[own], msg=lambda m: f"{name}: {m}")
        probe = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape)
        (probe[own] * y.square()).sum().backward()
        (probe * z.square()).sum().backward()

    def compare(ours, theirs, name):
        for (key, p), q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, msg=lambda m, key=key: f"{name}, {key}: {m}")

    for name, make in NETS.items():
        torch.manual_seed(1)
        plain = make().double()
        net = distribute(plain, P, head=head, custom="recurse")
        assert list(dict(net.named_parameters())) == list(dict(plain.named_parameters())), name
        assert list(net.state_dict()) == list(plain.state_dict()), name
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.05) for m in (net, plain))
        for batch in (4, 1, 3):  # one sample: some rank of a head by samples has none
            backward(net, plain, batch, name)
            gradients = ((key, p.grad) for key, p in net.named_parameters())
            compare(gradients, (p.grad for p in plain.parameters()), name)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        with no_sync(net):
            backward(net, plain, 2, name)
            backward(net, plain, 3, name)
        gradients = ((key, p.grad) for key, p in net.named_parameters())
        compare(gradients, (p.grad for p in plain.parameters()), f"{name}, summed at the end")
        compare(net.state_dict().items(), plain.state_dict().values(), name)
        check_replicas(net)


@pytest.mark.ranks(2, timeout=90)
def test_a_split_network_is_sliced_compiled_cropped_and_its_cut_weights_are_not_shared():
    P = Partition([1, 1, 2, 1])
    torch.manual_seed(2)
    x = torch.randn(2, 1, 8, 8)
    own = x[P.local_slices(x.shape)]
    plain = nn.Sequential(conv(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2), nn.Tanh())
    net = distribute(plain, P)
    for part in (slice(1), slice(1, 4), slice(-2, None), slice(None)):
        assert isinstance(net[part], DistributedSequential)
        assert list(net[part].state_dict()) == list(plain[part].state_dict())
    torch.testing.assert_close(net[1:](net[:1](own)), plain(x))
    torch.testing.assert_close(net[3:](net[:3](own)), plain(x))
    custom = Skip(Lent(), nn.Sequential(conv(), nn.ReLU()))
    for ours, theirs in ((net, plain), (distribute(custom, P, custom="recurse"), custom)):
        compiled = torch.compile(ours, backend="eager")
        with warnings.catch_warnings():  # the compiler looks at .grad of what layers return
            warnings.filterwarnings("ignore", "The .grad attribute")
            y, z = compiled(own), theirs(x)
        torch.testing.assert_close(y, z if ours is net else z[P.local_slices(z.shape)])
        y.sum().backward()
        z.sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    x = torch.randn(1, 1, 11, 8)
    kept = DistributedPad(P, (0, 0, 0, -1), balance=True)
    plain = Crop(nn.ZeroPad2d((0, 0, 0, -1)))
    cropped = copy.deepcopy(plain)
    cropped.crop = kept
    z = plain(x)
    for net in (plain, cropped):  # with torch's layer and with ours
        y = distribute(net, P, custom="recurse")(x[P.local_slices(x.shape)])
        torch.testing.assert_close(y, z[P.local_slices(z.shape)])
    norms = tied(nn.LayerNorm((8, 8)), nn.LayerNorm((8, 8)))
    assert len(list(distribute(nn.Sequential(*norms), P).parameters())) == 3
    behind = nn.Sequential(norms[0], nn.Flatten(), nn.Unflatten(1, (1, 8, 8)), norms[1])
    with pytest.raises(PartitionError, match=r"0 is a LayerNorm[\s\S]*weight, cut here"):
        distribute(behind, P)


def hooked(attach, layer=None):
    """Return a network with something attached to its second layer."""
    layer = conv() if layer is None else layer
    attach(layer)
    return nn.Sequential(nn.ReLU(), layer)


def seen(*_):
    """Look at a state."""


def replaced(layer):
    """Give an object another forward."""
    layer.forward = torch.neg


def test_what_would_be_lost_is_refused_with_its_path():
    P = Partition([1, 1, 1, 1])
    for net, found in (
        (hooked(lambda m: m.register_forward_hook(print)), "a forward hook"),
        (hooked(lambda m: m.register_forward_pre_hook(print)), "a forward pre-hook"),
        (hooked(lambda m: m.register_full_backward_hook(print)), "a backward hook"),
        (hooked(lambda m: m.register_state_dict_post_hook(seen)), "a state_dict hook"),
        (hooked(lambda m: m.register_forward_hook(print), nn.ReLU()), "a forward hook"),
        (hooked(lambda m: m.weight.register_hook(print)), "its weight has a hook"),
        (hooked(replaced), "forward has been replaced"),
        (hooked(parametrizations.weight_norm), "parametrizations"),
        (hooked(parametrizations.spectral_norm), "parametrizations"),
        (hooked(torch.nn.utils.spectral_norm), "hook"),
        (hooked(lambda _: None, nn.LazyConv2d(1, 3)), "has no shape yet"),
        (hooked(lambda _: None, Standardised(1, 1, 3)), "written on that of Conv2d"),
    ):
        for custom in ("refuse", "recurse"):
            with pytest.raises(PartitionError, match=rf"distribute: 1 is a [\s\S]*{found}"):
                distribute(net, P, custom=custom)
    for layer in (Centred(), Swish(), Skip(conv())):
        with pytest.raises(PartitionError, match=r"1 is a .*\n.*forward of its own"):
            distribute(hooked(lambda _: None, layer), P)
    root = nn.Sequential(conv())
    root.register_forward_hook(print)
    with pytest.raises(PartitionError, match="the module is a Sequential"):
        distribute(root, P)
    behind = nn.Sequential(conv(), nn.Flatten(), nn.Linear(64, 64))
    behind[2].register_forward_hook(lambda m, x, y: 2 * y)
    x = torch.randn(1, 1, 8, 8)
    torch.testing.assert_close(distribute(behind, P)(x), behind(x))  # there it sees the whole


def test_layers_that_mix_samples_are_refused_in_a_head_by_samples():
    P = Partition([1, 1, 1, 1])
    behind = nn.Sequential(nn.Tanh())
    behind.register_forward_hook(seen)
    for layer in (
        nn.Softmax(0),
        nn.LogSoftmax(-2),
        nn.Softmin(None),
        nn.Flatten(0),
        nn.Unflatten(0, (1, -1)),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.TransformerEncoderLayer(4, 2),
        nn.Sequential(nn.Tanh(), nn.LSTM(3, 3)),
        Centred(),
        hooked(replaced, nn.Tanh()),
        behind,
    ):
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), layer)
        distribute(net, P)
        with pytest.raises(PartitionError, match=r"distribute: 2[\s\S]*HINT: .*re(plicate|turns)"):
            distribute(net, P, head="batch")
    for layer in (nn.Softmax(-1), nn.Unflatten(1, (2, 2)), nn.LSTM(3, 3, batch_first=True)):
        distribute(nn.Sequential(nn.Flatten(-3), nn.Linear(64, 4), layer), P, head="batch")


def test_wrong_arguments_and_edits_say_what_to_type():
    net = nn.Sequential(conv(), nn.Flatten())
    with pytest.raises(PartitionError, match=r"HINT: .*Partition\(\[1, 1, 2, 1\]\)"):
        distribute(net, [1, 1, 2, 1])
    with pytest.raises(PartitionError, match="a list"):
        distribute([net], Partition([1, 1, 1, 1]))
    split = distribute(net, Partition([1, 1, 1, 1]))
    for edit in (
        lambda: split.pop(0),
        lambda: split.insert(0, conv()),
        lambda: split + split,
        lambda: split * 2,
    ):
        with pytest.raises(PartitionError, match=r"2 layers[\s\S]*HINT: change the torch network"):
            edit()

"""Networks of tokens and spectra stay cut: nothing is gathered, and values are those of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.nn.split_tensors.test_memory import kept_bytes
from torch import Tensor, nn

from unisono import Partition
from unisono.comm import world
from unisono.nn import Split, split

VOCABULARY = 40


class Layer(nn.Module):
    """A layer of a language model: rotary positions, causal attention, two norms."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class LanguageModel(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.half = width // heads // 2

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        speed = 100.0 ** (-torch.arange(self.half) / self.half)
        turns = torch.outer(torch.arange(tokens.shape[1]), speed).repeat(1, 2).to(x.dtype)
        for layer in self.layers:
            x = layer(x, turns.cos(), turns.sin())
        return self.head(x)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


@pytest.mark.ranks(3)
def test_a_language_model_keeps_its_sequence_cut():
    torch.manual_seed(0)
    net, tokens = LanguageModel().double(), torch.randint(VOCABULARY, (2, 17))
    wanted = next_token_loss(net(tokens), tokens)
    wanted.backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    partition = Partition([1, world().size])
    parts = split(net, partition, strict=True)
    own = tokens[partition.local_slices(tokens.shape)].clone()
    found = next_token_loss(parts(own), Split.of(own, partition, strict=True))
    torch.testing.assert_close(found, wanted)
    found.backward()
    for p, grad in zip(net.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


@pytest.mark.ranks(4)
def test_a_quarter_of_the_tokens_costs_at_most_thirty_percent_of_the_activations():
    torch.manual_seed(0)
    net, tokens = LanguageModel(), torch.randint(VOCABULARY, (1, 256))
    partition = Partition([1, 4])
    whole = kept_bytes(net, tokens)
    own = kept_bytes(split(net, partition), tokens[partition.local_slices(tokens.shape)].clone())
    assert own <= 0.30 * whole, f"{own} of {whole} bytes: {own / whole:.2f}"


def moved_statistics(x: Tensor) -> Tensor:
    mean, variance = torch.zeros(6).to(x.dtype), torch.ones(6).to(x.dtype)
    y = F.instance_norm(x, mean, variance)
    return y * mean[:, None] + variance[:, None]


PROGRAMS = {
    "fft along a dim": lambda x: torch.fft.rfft(x, dim=1).abs(),
    "fft of all dims": lambda x: torch.fft.irfftn(torch.fft.rfftn(x) * 2, s=x.shape),
    "cumsum": lambda x: x.cumsum(1).cumprod(0),
    "sort and topk": lambda x: x.sort(1)[0] + x.topk(1, 2)[0],
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "index": lambda x: x[:, torch.tensor([2, 0, 1, 1])] * x.index_select(1, torch.tensor([3])),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(2, x.argsort(2), x),
    "einsum with dots": lambda x: torch.einsum("...ij,...kj->...ik", x, x),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "flip and roll": lambda x: x.flip(1).roll(2, 1),
    "extremes": lambda x: x.amax() - x.min() + x.max(1)[0].sum() + x.logsumexp(2).sum(),
    "triangle": lambda x: (x @ x.mT).tril(),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2) * x[..., None],
    "unfold": lambda x: x.unfold(1, 3, 2).sum(-1),
    "linear over cut features": lambda x: F.linear(x, torch.ones(3, 7, dtype=x.dtype)),
    "scatter of fewer points": lambda x: x.scatter_add(1, x[:, :3, :5].argsort(1), x[:, :3, :5]),
    "copies": lambda x: x.repeat(2, 1, 3) * 2,
    "few points": lambda x: x[:, 1:2] * x[1:2, :, 3:4] + x.diagonal(5, 1, 2).sum(),
    "running statistics": lambda x: moved_statistics(x),
    "moved against unmoved": lambda x: x + x.transpose(0, 1),
}


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_tokens_and_spectra_gather_nothing(name):
    program = PROGRAMS[name]
    torch.manual_seed(0)
    x = torch.randn(4, 6, 7, dtype=torch.float64)
    if name == "moved against unmoved":
        x = torch.randn(6, 6, 7, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    wanted = program(whole)
    (slope,) = torch.autograd.grad(wanted.square().sum(), whole)
    for dim in range(3):
        partition = Partition([world().size if d == dim else 1 for d in range(3)])
        block = x[partition.local_slices(x.shape)].clone().requires_grad_()
        y = program(Split.of(block, partition, strict=True))
        (own,) = torch.autograd.grad((y * y).sum(), block)
        torch.testing.assert_close(y.whole() if isinstance(y, Split) else y, wanted)
        torch.testing.assert_close(own, slope[partition.local_slices(x.shape)])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_run_own_sequences(kind):
    torch.manual_seed(0)
    net = kind(5, 4, 2, batch_first=True, bidirectional=True).double()
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    wanted, _ = net(x)
    for shape in ([2, 1, 1], [1, 2, 1]):
        partition = Partition(shape)
        y, _ = split(net, partition, strict=True)(x[partition.local_slices(x.shape)].clone())
        torch.testing.assert_close(y.whole(), wanted)


@pytest.mark.ranks(2)
def test_an_index_out_of_range_is_an_error_on_all_ranks():
    tokens = torch.tensor([[0, 1, 2, 9]])
    with pytest.raises(IndexError, match="rank 1"):
        F.embedding(Split.cut(tokens, Partition([1, 2])), torch.zeros(5, 3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_conjugate_that_is_only_marked_counts_on_a_block_of_one_row(dim):
    """torch skips below a wrapper what makes the marked conjugate a real one."""
    x = torch.randn(5, 6, 7, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    y = torch.fft.hfftn(
        Split.cut(x, Partition([1 + 2 * (d == dim) for d in range(3)])), (3, 10), (1, 2)
    )
    torch.testing.assert_close(y.whole(), torch.fft.hfftn(x, (3, 10), (1, 2)))

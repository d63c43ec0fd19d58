"""Split networks on two ranks against one rank, each rank with one thread, and what a call costs.

    python benchmarks/split.py [--quick] [--only memory]

"One rank" is one process with one core's thread, as each of the two ranks has: the other rank is
idle meanwhile. A step is forward, loss and backward.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from harness import Row, markdown, parser_for, peak_bytes, publish, take_turns
from torch import Tensor, nn

import unisono
from unisono.nn import Split, split
from unisono.nn.functional import ring_attention
from unisono.topology import Partition

ROWS = (1, 1, 2, 1)
TOKENS = 8192


class UNet(nn.Module):
    """As MONAI's: residual units of convolution, instance norm and PReLU, strides of two."""

    def __init__(self, channels: tuple[int, ...] = (16, 32, 64), inputs: int = 16) -> None:
        super().__init__()
        sizes = [inputs, *channels]
        self.down = nn.ModuleList(
            self.unit(a, b, 2 if i else 1)
            for i, (a, b) in enumerate(zip(sizes, channels))  # noqa: B905
        )
        pairs = list(zip(channels[:0:-1], channels[-2::-1]))  # noqa: B905
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 3, 2, 1, 1) for a, b in pairs)
        self.joined = nn.ModuleList(self.unit(2 * b, b, 1) for _, b in pairs)
        self.last = nn.Conv2d(channels[0], 2, 1)

    def unit(self, inner: int, outer: int, stride: int) -> nn.Module:
        """Return two convolutions."""
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1), nn.InstanceNorm2d(outer), nn.PReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1), nn.InstanceNorm2d(outer), nn.PReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        kept: list[Tensor] = []
        for unit in self.down:
            x = unit(x)
            kept.append(x)
        for up, joined, other in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = joined(torch.cat([up(x), other], 1))
        return self.last(x)


class Basic(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.short = nn.Identity()
        if stride != 1:
            conv = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        y = self.norms[1](self.second(y))
        y += self.short(x)
        return F.relu(y, inplace=True)


def resnet18() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    for inner, outer in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [Basic(inner, outer, 1 if inner == outer else 2), Basic(outer, outer, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class ViT(nn.Module):
    """A vision transformer of 4,096 tokens, two layers deep."""

    def __init__(self, width: int = 192, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.places = nn.Parameter(torch.zeros(1, 4096, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "first": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width), "second": nn.LayerNorm(width),
                "wide": nn.Linear(width, 4 * width), "narrow": nn.Linear(4 * width, width),
            })
            for _ in range(depth)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for part in self.layers:
            layer = cast("nn.ModuleDict", part)
            qkv = layer["qkv"](layer["first"](x)).unflatten(2, (3, self.heads, -1))
            y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["narrow"](F.gelu(layer["wide"](layer["second"](x))))
        return x.mean(1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys with their rotary positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class LanguageModel(nn.Module):
    """Embedding, rotary positions, causal attention, the loss of the next token; two layers."""

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 2, words: int = 512) -> None:
        super().__init__()
        self.heads, self.angles = heads, width // heads // 2
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "first": nn.RMSNorm(width), "qkv": nn.Linear(width, 3 * width),
                "out": nn.Linear(width, width), "second": nn.RMSNorm(width),
                "wide": nn.Linear(width, 4 * width), "narrow": nn.Linear(4 * width, width),
            })
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss."""
        x = self.table(ids)
        angles = torch.outer(torch.arange(ids.shape[1]), 1e-2 ** torch.linspace(0, 2, self.angles))
        cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
        for part in self.layers:
            layer = cast("nn.ModuleDict", part)
            qkv = layer["qkv"](layer["first"](x)).unflatten(2, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["narrow"](F.gelu(layer["wide"](layer["second"](x))))
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Decoder(nn.Module):
    """The decoder of diffusers' AutoencoderKL, a quarter as wide as Stable Diffusion's."""

    def __init__(self) -> None:
        super().__init__()
        blocks = 4
        self.vae = importlib.import_module("diffusers").AutoencoderKL(
            block_out_channels=(32, 64, 128, 128), latent_channels=4, layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
        )  # fmt: skip

    def forward(self, latents: Tensor) -> Tensor:
        """Return the image."""
        return self.vae.decode(latents).sample


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "U-Net, 1x16x512x512": (UNet, (1, 16, 512, 512), 0.60),
    "ResNet-18, 2x3x512x512": (resnet18, (2, 3, 512, 512), 0.60),
    "ViT, 4,096 tokens": (ViT, (1, 3, 512, 512), 0.60),
}
DECODER = "AutoencoderKL, decode to 512x512"
LATENTS = (1, 4, 64, 64)
MODEL = "language model, 8,192 tokens"
RING = f"ring attention of {TOKENS:,} tokens, step"
PEAKS = {"U-Net, 1x16x512x512": (2, 0.55), DECODER: (4, 0.30), MODEL: (4, 0.30)}
"""Ranks, and the most that each may hold of what one rank holds."""


def against_one(
    case: str, ours: Callable[[], object], alone: Callable[[], object], rounds: int, target: float
) -> Row:
    """Compare what all ranks do with what rank 0 does while the others wait."""
    comm = unisono.world()
    candidates = {"ours": ours, "alone": alone if comm.rank == 0 else lambda: None}
    found = take_turns(comm, candidates, rounds=rounds)
    return found["ours"].row(case, found["alone"], "one rank, one thread", target)


def network(name: str, rounds: int) -> Row:
    """A step on two ranks against one rank, in turns."""
    torch.set_num_threads(1)
    make, shape, target = NETS[name]
    torch.manual_seed(0)
    net, x = make(), torch.randn(shape)
    partition = Partition(ROWS)
    own = x[partition.local_slices(shape)].clone()
    parts = split(net, partition, strict=True)

    def step(model: nn.Module, value: Tensor) -> Callable[[], None]:
        def run() -> None:
            net.zero_grad()
            model(value).square().mean().backward()

        return run

    return against_one(f"{name}, step", step(parts, own), step(net, x), rounds, target)


@torch.no_grad()
def decode(rounds: int) -> Row:
    """An image on two ranks against one rank, in turns."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, latents, partition = Decoder(), torch.randn(LATENTS), Partition(ROWS)
    own = latents[partition.local_slices(LATENTS)].clone()
    parts = split(net, partition, strict=True)
    return against_one(DECODER, lambda: parts(own), lambda: net(latents), rounds, 0.60)


def peak_of_network(name: str, parts: int) -> int:
    """Return the most bytes that a step of a network, or an image, needs at once on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    partition = Partition([1, parts] if name == MODEL else [1, 1, parts, 1])
    if name == MODEL:
        net, x = LanguageModel(), torch.randint(512, (1, TOKENS))
    elif name == DECODER:
        net, x = Decoder(), torch.randn(LATENTS)
    else:
        make, shape, _ = NETS[name]
        net, x = make(), torch.randn(shape)
    own = x[partition.local_slices(x.shape)].clone()
    model = split(net, partition, strict=True) if parts > 1 else net
    if name == DECODER:
        with torch.no_grad():
            return peak_bytes(lambda: model(own))
    return peak_bytes(lambda: model(own).square().mean().backward())


def calls(rounds: int) -> list[Row]:
    """What a call on a split tensor costs over the plain one; small tensors."""
    torch.set_num_threads(1)
    comm = unisono.world()
    x, weight = torch.randn(1, 4, 16, 16), torch.randn(4, 4, 3, 3)
    parts = Split.of(x, Partition(ROWS))
    cases = {
        "relu": (lambda t: torch.relu(t), 6.0),
        "add": (lambda t: t + t, 6.0),
        "conv 3x3 with halo": (lambda t: F.conv2d(t, weight, None, 1, 1), 60.0),
    }
    rows: list[Row] = []
    with torch.no_grad():
        for name, (function, most_us) in cases.items():
            best = [float("inf"), float("inf")]
            for _ in range(rounds * 20):
                for j, value in enumerate((x, parts)):
                    comm.barrier()
                    start = time.perf_counter()
                    for _ in range(20):
                        function(value)
                    best[j] = min(best[j], (time.perf_counter() - start) / 20)
            plain, ours = comm.all_reduce(torch.tensor(best, dtype=torch.float64), "max").tolist()
            # A row's ratio is over a microsecond, so its target is the overhead in microseconds.
            rows.append(Row(f"{name} over the plain call", ours - plain, 1e-6, "1 us", most_us))
    return rows


def ring(rounds: int) -> Row:
    """Time of ring attention, forward and backward, against one rank's."""
    torch.set_num_threads(1)
    comm = unisono.world()
    torch.manual_seed(0)
    whole = [torch.randn(1, 8, TOKENS, 64, requires_grad=True) for _ in range(3)]
    share = TOKENS // comm.size
    own = [x.detach()[:, :, comm.rank * share :][:, :, :share].clone().requires_grad_()
           for x in whole]  # fmt: skip

    def around() -> None:
        ring_attention(*own, sizes=[share] * comm.size).sum().backward()

    def alone() -> None:
        F.scaled_dot_product_attention(*whole).sum().backward()

    case = f"ring attention of {TOKENS:,} tokens, 8 heads of 64, step"
    return against_one(case, around, alone, rounds, 0.65)


def peak(is_split: bool) -> int:
    """Return the most bytes that inputs and a step of attention hold at once on this rank."""
    torch.set_num_threads(1)
    comm = unisono.world()
    tokens = TOKENS // comm.size if is_split else TOKENS

    def step() -> None:
        q, k, v = (torch.randn(1, 8, tokens, 64, requires_grad=True) for _ in range(3))
        y = ring_attention(q, k, v) if is_split else F.scaled_dot_product_attention(q, k, v)
        y.backward(torch.ones_like(y))

    return peak_bytes(step)


def main() -> None:
    """Run all cases and write the table."""
    parser = parser_for(__doc__)
    parser.add_argument("--only", default="", help="cases whose name has this; nothing written")
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    os.environ["OMP_NUM_THREADS"] = "1"
    timed: dict[str, Callable[[], list[Row]]] = {
        **{name: lambda name=name: [on_two(network, name, rounds)] for name in NETS},
        DECODER: lambda: [on_two(decode, min(rounds, 3))],
        "calls": lambda: unisono.run(calls, rounds, ranks=2)[0],
        RING: lambda: [on_two(ring, rounds)],
    }
    memory: dict[str, Callable[[], str]] = {
        f"{RING}, peak memory": ring_memory,
        **{f"{name}, peak memory": lambda name=name: network_memory(name) for name in PEAKS},
    }
    rows = [row for name, case in timed.items() if options.only in name for row in case()]
    more = [case() for name, case in memory.items() if options.only in name]
    table = "\n".join([markdown(rows), *more])
    publish("Split networks", table, write=not (options.quick or options.only))


def on_two(case: Callable[..., Row], *args: object) -> Row:
    """Return the row of a case, which two ranks make."""
    return unisono.run(case, *args, ranks=2, timeout_s=600)[0]


def ring_memory() -> str:
    """Return the row of ring attention's memory."""
    return memory_row(RING, 2, 0.60, unisono.run(peak, True, ranks=2), unisono.run(peak, False))


def network_memory(name: str) -> str:
    """Return the row of a network's memory."""
    ranks, target = PEAKS[name]
    ours, alone = (
        unisono.run(peak_of_network, name, parts, ranks=parts, timeout_s=600)
        for parts in (ranks, 1)
    )
    return memory_row(name, ranks, target, ours, alone)


def memory_row(
    case: str, ranks: int, target: float, ours: Sequence[int], alone: Sequence[int]
) -> str:
    """Return a row of the table: the most that a rank holds, over what one rank holds alone."""
    ratio = max(ours) / alone[0]
    return (
        f"| {case}, peak memory on {ranks} ranks | {max(ours) / 2**20:.1f} MB "
        f"| {alone[0] / 2**20:.1f} MB one rank | {ratio:.2f} | <= {target} "
        f"| {'ok' if ratio <= target else 'MISSED'} |"
    )


if __name__ == "__main__":
    main()

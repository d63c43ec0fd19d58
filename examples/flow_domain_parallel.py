"""Learn the flow of a fluid with a U-Net whose fields are cut over 2 x 2 ranks.

A small spectral solver makes the fields. The network is written for one process; `split` cuts
it in space. Trained on four ranks it equals one trained in a single process, seams included.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import unisono
from unisono.nn import DistributedMSELoss, Repartition, split
from unisono.topology import Partition

SIZE, PAIRS, STEPS, VISCOSITY = 48, 4, 25, 5e-3
CONV = {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}


class UNet(nn.Module):
    """Down to a quarter of the resolution and up again, with a shortcut at each level."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, width, **CONV), nn.GELU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, stride=2, **CONV), nn.GELU())
        self.deep = nn.Sequential(nn.Conv2d(2 * width, 2 * width, stride=2, **CONV), nn.GELU())
        self.rise = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.up = nn.ConvTranspose2d(4 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, **CONV)

    def forward(self, x: Tensor) -> Tensor:
        high = self.enter(x)
        middle = self.down(high)
        risen = torch.cat([self.rise(self.deep(middle)), middle], 1)
        return x + self.leave(torch.cat([self.up(risen), high], 1))


def flow(fields: Tensor, steps: int) -> Tensor:
    """Return vorticity on a periodic square some steps later (2-d Navier-Stokes, spectral)."""
    k = torch.fft.fftfreq(SIZE, 1 / SIZE, dtype=fields.dtype)
    ky, kx, square = k[:, None], k[None, :], k[:, None] ** 2 + k[None, :] ** 2
    kept = square.sqrt() < SIZE / 3  # the product below would alias the others
    waves = torch.fft.fft2(fields) * kept

    def slope(w: Tensor) -> Tensor:
        stream = w / square.clamp(min=1)
        u, v, wx, wy = (
            torch.fft.ifft2(1j * part).real for part in (ky * stream, -kx * stream, kx * w, ky * w)
        )
        return -torch.fft.fft2(u * wx + v * wy) * kept - VISCOSITY * square * w

    for _ in range(steps):
        waves = waves + 0.02 * slope(waves + 0.01 * slope(waves))
    return torch.fft.ifft2(waves).real


def data() -> tuple[Tensor, Tensor]:
    """Return vorticity now and a moment later, the same on every rank."""
    noise = torch.Generator().manual_seed(0)
    eddies = 4 * torch.randn(PAIRS, 1, 10, 10, dtype=torch.float64, generator=noise)
    now = flow(nn.functional.interpolate(eddies, SIZE, mode="bicubic"), 40)
    return now, flow(now, 8)


def train(grid: Partition | None) -> tuple[list[float], Tensor]:
    """Train on the own part of every field; return the losses and the last prediction."""
    x, y = (f if grid is None else f[grid.local_slices(f.shape)] for f in data())
    torch.manual_seed(0)
    net, loss = UNet().double(), nn.MSELoss()
    if grid is not None:
        net, loss = split(net, grid, blocks=True), DistributedMSELoss(grid)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(STEPS):
        value = loss(net(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    found = net(x).detach()
    return losses, found if grid is None else Repartition(grid, Partition([1] * 4))(found)


def show(grid: Partition, fields: dict[str, Tensor], file: str = "flow.png") -> None:
    """Draw fields beside each other, with the seams between the ranks."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (title, field) in zip(figure.subplots(1, len(fields)), fields.items(), strict=True):
        axes.imshow(field[0, 0], cmap="RdBu_r", vmin=-8, vmax=8)
        axes.set(title=title, xticks=[], yticks=[])
        for dim, line in ((2, axes.axhline), (3, axes.axvline)):
            for cut in grid.cuts((1, 1, SIZE, SIZE))[dim][1:-1]:
                line(cut - 0.5, color="black", linewidth=0.9, linestyle=":")
    figure.colorbar(figure.axes[0].images[0], ax=figure.axes, shrink=0.9, label="vorticity")
    figure.savefig(file, dpi=110)


def main() -> None:
    torch.set_num_threads(1)  # as the ranks
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    n = parser.parse_args().ranks
    grid = Partition([1, 1, 2, n // 2] if n % 2 == 0 else [1, 1, n, 1])
    (losses, found), (plain, expected) = unisono.run(train, grid, ranks=n)[0], train(None)
    drift = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
    error = (found - expected).abs().max().item()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, in one process the same to {drift:.0e}")
    print(f"predictions differ by {error:.0e}, seams included: see flow.png")
    apart = {f"split minus one process: {error:.0e}": found - expected}
    show(grid, {"the solver": data()[1], "the network, split": found} | apart)
    if not max(drift, error) < 1e-9:
        raise SystemExit("the seams show")


if __name__ == "__main__":
    main()

"""A Fourier layer on a field cut over ranks: each FFT needs whole lines, so the cut changes.

Rows first, then `Repartition` to columns, the second FFT, a product in frequency space, and back
the same way. Values and gradients equal those of `torch.fft.fft2` in one process.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import unisono
from unisono.nn import Repartition
from unisono.topology import Partition

SIZE = 24


class FourierLayer(nn.Module):
    """Multiply a split field by a filter in frequency space."""

    def __init__(self, rows: Partition, columns: Partition) -> None:
        super().__init__()
        self.columns = columns
        self.to_columns = Repartition(rows, columns)
        self.to_rows = Repartition(columns, rows)

    def forward(self, x: Tensor, response: Tensor) -> Tensor:
        waves = self.to_columns(torch.fft.fft(x.to(torch.complex128), dim=1))
        waves = torch.fft.fft(waves, dim=0) * response[self.columns.local_slices(response.shape)]
        waves = self.to_rows(torch.fft.ifft(waves, dim=0))
        return torch.fft.ifft(waves, dim=1).real


def compare() -> tuple[float, float]:
    """Return the largest differences of values and gradients."""
    size = unisono.world().size
    rows, columns = Partition([size, 1]), Partition([1, size])
    generator = torch.Generator().manual_seed(0)
    field = torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator)
    k = torch.fft.fftfreq(SIZE, dtype=torch.float64)
    response = torch.exp(-40 * (k[:, None] ** 2 + k[None, :] ** 2))
    where = rows.local_slices(field.shape)

    own = field[where].clone().requires_grad_()
    y = FourierLayer(rows, columns)(own, response)
    (y**3).sum().backward()
    whole = field.clone().requires_grad_()
    z = torch.fft.ifft2(torch.fft.fft2(whole) * response).real
    (z**3).sum().backward()
    assert own.grad is not None
    assert whole.grad is not None
    return (y - z[where]).abs().max().item(), (own.grad - whole.grad[where]).abs().max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    value, slope = map(max, zip(*unisono.run(compare, ranks=ranks), strict=True))
    print(f"{ranks} ranks against one process: values differ by {value:.1e}, slopes by {slope:.1e}")
    if max(value, slope) > 1e-12:
        raise SystemExit("the split layer does not equal the plain one")


if __name__ == "__main__":
    main()

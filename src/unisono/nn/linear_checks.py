"""What is refused in the features of linear layers, with the numbers."""

from __future__ import annotations

from unisono.errors import PartitionError
from unisono.nn.structure import Cuts


def check_features(name: str, in_features: int, out_features: int) -> None:
    """Raise unless both numbers are positive."""
    if min(in_features, out_features) < 1:
        raise PartitionError.because(
            f"{name}(in_features={in_features}, out_features={out_features})",
            "numbers of the whole layer",
            f"{min(in_features, out_features)} < 1",
            "positive numbers",
        )


def check_width(name: str, cuts: Cuts, in_features: int) -> None:
    """Raise unless the input's last dim has `in_features` points in all."""
    if cuts[-1][-1] != in_features:
        raise PartitionError.because(
            f"{name}(in_features={in_features})",
            f"an input of global shape {[own[-1] for own in cuts]}",
            f"{cuts[-1][-1]} features != {in_features}",
            f"in_features={cuts[-1][-1]}",
        )

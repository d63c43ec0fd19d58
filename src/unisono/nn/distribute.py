"""`distribute`: a split copy of a network that takes and gives own blocks, as our layers do."""

from __future__ import annotations

import copy
import hashlib
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, PartitionError, an, name_ranks
from unisono.nn.split_tensors.module import SplitModule
from unisono.nn.split_tensors.tensor import mapped
from unisono.topology import Partition


class DistributedNetwork(SplitModule):
    """A split network whose results are own blocks; see `distribute`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network with this rank's block; returns own blocks of what is still cut.

        Collective over the partition.
        """
        return mapped(lambda x: x.local, super().forward(*args, **kwargs))


def distribute(
    module: nn.Module, partition: Partition, *, strict: bool = False
) -> DistributedNetwork:
    """Return a split copy of a network, with the weights of rank 0. Collective.

    It is `split` for programs that hold blocks: results are plain tensors, this rank's block of
    whatever is still cut and the whole of what is not, which the layers and losses of `unisono.nn`
    take as they are. The forward is left as it is; what cannot be done with blocks is gathered.

    Args:
        module: any network made of torch functions; it is not changed.
        partition: how its input is cut, e.g. `Partition([1, 1, 2, 2])` for height and width.
        strict: refuse instead of gathering.

    Returns:
        A module with parameters of its own. Its state is that of the plain module; `report()`
        lists what was gathered.

    Raises:
        PartitionError: arguments of another kind.
        CollectiveMismatch: the networks of the ranks are not made alike.

    >>> from unisono import Partition
    >>> net = distribute(nn.Conv2d(1, 2, 3, padding=1), Partition([1, 1, 1, 1]))
    >>> net(torch.zeros(1, 1, 4, 4)).shape
    torch.Size([1, 2, 4, 4])
    """
    if not isinstance(module, nn.Module):
        raise PartitionError.because(
            "distribute(module, partition)", an(type(module).__name__), None, "a torch.nn.Module"
        )
    if not isinstance(partition, Partition):
        sizes = list(partition) if isinstance(partition, tuple | list) else [1, 1, 2, 1]
        raise PartitionError.because(
            f"distribute(module, {partition!r})",
            f"{an(type(partition).__name__)} for the partition",
            None,
            f"distribute(module, unisono.Partition({sizes}))",
        )
    made = copy.deepcopy(module)
    if partition.root.size > 1:
        _share_weights(made, partition.root)
    return DistributedNetwork(made, partition, strict)


def _share_weights(module: nn.Module, comm: Communicator) -> None:
    """Give every rank the values of rank 0, if all have the same network. Collective.

    Values may differ before, but not what the networks are made of.
    """
    mine = _lines_of(module)
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=7).digest()
    found = comm.all_gather_ints([int.from_bytes(digest)])
    odd = [rank for rank, said in enumerate(found) if said != found[0]]
    if odd:
        every = comm.all_gather_object(mine)
        pairs = zip_longest(every[0], every[odd[0]], fillvalue="nothing more")
        ours, theirs = next((a, b) for a, b in pairs if a != b)
        raise CollectiveMismatch.because(
            "distribute(module, partition)",
            f"rank {comm.ranks[0]}: {ours}\nrank {comm.ranks[odd[0]]}: {theirs}",
            f"networks that differ from rank {comm.ranks[0]}'s: "
            f"{name_ranks([comm.ranks[rank] for rank in odd])}",
            "build the same network on every rank; its values may differ",
        )
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.numel():
                tensor.copy_(comm.broadcast(tensor.detach(), 0))


def _lines_of(module: nn.Module) -> list[str]:
    """Return one line for each layer and each tensor of a network."""
    lines: list[str] = []
    for path, layer in module.named_modules(remove_duplicate=False):
        kind = type(layer)  # arguments of the user's own layers may be anything, an address too
        arguments = layer.extra_repr() if kind.__module__.startswith("torch.nn.") else "..."
        lines.append(f"{path or 'the module'} is {kind.__name__}({arguments})")
        held = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        for name, tensor in held:
            shape = f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            lines.append(f"{path}.{name}".lstrip(".") + f" of shape {shape}")
    return lines

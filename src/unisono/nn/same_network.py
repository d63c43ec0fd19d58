"""Whether ranks bring the same network, before anything is made of it."""

from __future__ import annotations

import hashlib
from itertools import zip_longest

from torch import nn

from unisono.comm import Communicator
from unisono.errors import CollectiveMismatch, name_ranks

_MISSING = "nothing more"


def check_same_network(module: nn.Module, comm: Communicator, asked: str) -> None:
    """Raise on all ranks if layers, their arguments or their tensors differ. Collective.

    Values do not count, only what the network is made of.

    Args:
        module: this rank's network.
        comm: the ranks.
        asked: the call that needs it, for the error.
    """
    mine = _lines(module)
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=7).digest()
    found = comm.all_gather_ints([int.from_bytes(digest)])
    odd = [rank for rank, said in enumerate(found) if said != found[0]]
    if not odd:
        return
    every = comm.all_gather_object(mine)
    first, other = every[0], every[odd[0]]
    pairs = zip_longest(first, other, fillvalue=_MISSING)
    ours, theirs = next((a, b) for a, b in pairs if a != b)
    raise CollectiveMismatch.because(
        asked,
        f"rank {comm.ranks[0]}: {ours}\nrank {comm.ranks[odd[0]]}: {theirs}",
        f"networks that differ from rank {comm.ranks[0]}'s: "
        f"{name_ranks([comm.ranks[rank] for rank in odd])}",
        "build the same network on every rank; its values may differ",
    )


def _lines(module: nn.Module) -> list[str]:
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

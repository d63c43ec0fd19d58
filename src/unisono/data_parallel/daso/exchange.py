"""What DASO sends between nodes: means of parameters, at once or in the background.

One rank of each node takes part in an exchange and passes the result on inside its node. Parameters
are never rounded on the wire: where it is narrower than they are, differences to the last common
value travel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.comm import Communicator, Pending
from unisono.data_parallel.daso.nodes import NodeLayout, group_of_node
from unisono.data_parallel.ranks import (
    average_tensors,
    broadcast_tensors,
    flatten,
    on_device,
    real_view,
    structure_of,
    write_back,
)
from unisono.errors import UnisonoError, explain


class NonFiniteParameters(UnisonoError, ValueError):
    """Parameters that nodes would average hold a nan or inf; raised on all ranks alike.

    Attributes:
        rank: first rank whose parameters are not finite; None if only their sum is not.
        parameter: name of the first such parameter.
    """

    def __init__(self, message: str, *, rank: int | None = None, parameter: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.parameter = parameter


@dataclass
class InFlight:
    """An exchange that has been started and not yet used."""

    group: int
    """Number of the global group."""
    sums: list[Tensor] | None
    """What arrives, on the rank of each node that takes part; None on the others."""
    narrow: bool
    """Whether differences travel."""
    pending: list[Pending[Tensor]]


class FlatParameters:
    """Packs trainable parameters, in the order of `named_parameters`, and writes them back.

    Args:
        module: frozen parameters are left out, shared ones count once.
    """

    def __init__(self, module: nn.Module) -> None:
        self.named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.module, self.structure = module, structure_of(module)
        kinds: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor]]] = defaultdict(list)
        for name, param in self.named:
            kinds[param.device, param.dtype].append((name, param))
        self._kinds = list(kinds.values())

    def pack(self) -> list[Tensor]:
        """Return the values as new flat tensors, one for each kind."""
        return [flatten(param for _, param in kind) for kind in self._kinds]

    def blank(self) -> list[Tensor]:
        """Return tensors like those of `pack`, with nothing in them yet."""
        return [
            torch.empty(
                sum(real_view(param).numel() for _, param in kind),
                dtype=real_view(kind[0][1]).dtype,
                device=kind[0][1].device,
            )
            for kind in self._kinds
        ]

    def unpack(self, flats: Sequence[Tensor]) -> None:
        """Overwrite the parameters with these values."""
        for kind, flat in zip(self._kinds, flats, strict=True):
            write_back(flat, [param for _, param in kind])

    def name_at(self, kind: int, offset: int) -> str:
        """Return the name of the parameter at an offset of a flat tensor."""
        sizes = [real_view(param).numel() for _, param in self._kinds[kind]]
        ends = accumulate(sizes)
        return next(
            name for (name, _), end in zip(self._kinds[kind], ends, strict=True) if offset < end
        )

    def first_non_finite(self) -> int:
        """Return the place in `named` of the first parameter with a nan or inf, or -1."""
        for place, (_, param) in enumerate(self.named):
            if not _is_finite(real_view(param)):
                return place
        return -1


class NodeExchange:
    """Averages of parameters between nodes, once it is connected to their ranks.

    Pickled without its ranks and the module's parameters.

    Args:
        chunk: elements of a message.
        wire: dtype in which float32 values travel, where `narrow` is asked for.
        by_mean: whether the ranks of a node are brought together by their mean, not by one of them.
    """

    comm: Communicator
    """All ranks."""
    node: Communicator
    """Ranks of this node."""
    flat: FlatParameters
    """The parameters of the module."""

    def __init__(
        self,
        comm: Communicator,
        layout: NodeLayout,
        *,
        chunk: int,
        wire: torch.dtype,
        by_mean: bool,
    ) -> None:
        self.in_flight: InFlight | None = None
        self.common: list[Tensor] | None = None
        """Last value that all ranks had in common; kept where something needs it."""
        self._chunk = chunk
        self._wire = wire
        self._by_mean = by_mean
        self.comm = comm
        self.layout = layout
        this_node = layout.node_of(comm.rank)
        node = group_of_node(comm, layout.nodes[this_node]) or comm.sub(layout.nodes[this_node])
        self.node = cast(Communicator, node)
        self._groups = [comm.sub(ranks) for ranks in layout.groups]
        self.n_nodes = len(layout.nodes)
        self._weight = layout.weights[this_node]

    def bind(self, module: nn.Module) -> None:
        """Take the parameters of a module; rank 0's become the common value. Collective."""
        self.flat = FlatParameters(module)
        self.in_flight = None
        values = self.flat.pack()
        needed = any(x.dtype != self._dtype(x, True) for x in values)
        self.common = values if needed else None
        broadcast_tensors(self.common or [], self.comm)

    def has_changed(self) -> bool:
        """Whether parameters are others than those taken, or not at the common value. Local.

        Asked between epochs. From weights loaded meanwhile the common value may be far away, and a
        narrow difference to it would round them.
        """
        if self.flat.structure != structure_of(self.flat.module):
            return True
        return self.common is not None and not all(map(torch.equal, self.flat.pack(), self.common))

    def align(self, group: int) -> None:
        """Bring the ranks of this node together: their mean, or the one that sends. Collective."""
        params = [param for _, param in self.flat.named]
        if self._by_mean:
            average_tensors(params, self.node)
        else:
            broadcast_tensors(params, self.node, group)

    def mean(self, group: int) -> None:
        """Give all ranks the mean of the nodes and wait for it. Collective over all ranks."""
        self.drop()
        self.send(group, narrow=True)
        result = self._received()
        self.flat.unpack(result)
        if self.common is not None:
            self.common = result

    def send(self, group: int, *, narrow: bool) -> None:
        """Start to average the parameters as they are now. Collective over the group's ranks.

        Args:
            group: number of the global group; other ranks only remember it.
            narrow: whether differences travel, in the dtype of the wire.
        """
        members = self._groups[group]
        if members is None:
            self.in_flight = InFlight(group, None, narrow, [])
            return
        sums = self._outgoing(narrow)
        pending = [
            on_device(members, part.device).start.all_reduce_(part)
            for x in sums
            for part in x.split(self._chunk)
        ]
        self.in_flight = InFlight(group, sums, narrow, pending)

    def merge(self, batches: int) -> None:
        """Mix the mean under way into the parameters, `batches` after it was sent. Collective.

        The newer own parameters count for `2 * batches` nodes.
        """
        mean = self._received()
        if self.n_nodes == 1:
            return  # an average with one's own past would only hold back
        share = self.n_nodes / (2 * batches + self.n_nodes)
        values = self.flat.pack()
        for x, m in zip(values, mean, strict=True):
            x.lerp_(m, share)
        self.flat.unpack(values)

    def complete(self) -> None:
        """Wait until what is in flight has arrived. Local."""
        if self.in_flight is not None:
            for pending in self.in_flight.pending:
                pending.wait()
            self.in_flight.pending.clear()

    def drop(self) -> None:
        """Wait for what is in flight and forget it. Local."""
        self.complete()
        self.in_flight = None

    def _outgoing(self, narrow: bool) -> list[Tensor]:
        """Return this node's weighted share of the sum, in the dtype of the wire."""
        shares: list[Tensor] = []
        for i, x in enumerate(self.flat.pack()):
            dtype = self._dtype(x, narrow)
            if dtype != x.dtype and self.common is not None:
                x.sub_(self.common[i])
            shares.append(x.mul_(self._weight).to(dtype))
        return shares

    def _received(self) -> list[Tensor]:
        """Return the mean of the nodes on every rank, and check that it is finite."""
        arrived, self.in_flight = cast(InFlight, self.in_flight), None
        blanks = self.flat.blank()
        sums = arrived.sums
        if sums is None:
            sums = [x.to(self._dtype(x, arrived.narrow)) for x in blanks]
        waiting = iter(arrived.pending)
        for x in sums:
            for part in x.split(self._chunk):
                pending = next(waiting, None)
                if pending is not None:
                    pending.wait()
                on_device(self.node, part.device).broadcast_(part, arrived.group)
        self._check_finite(sums)
        means: list[Tensor] = []
        for i, (x, total) in enumerate(zip(blanks, sums, strict=True)):
            mean = total.to(x.dtype) / self.n_nodes
            if total.dtype != x.dtype and self.common is not None:
                mean += self.common[i]
            means.append(mean)
        return means

    def _dtype(self, x: Tensor, narrow: bool) -> torch.dtype:
        """Return in which dtype values like `x` travel; one node alone sends nothing."""
        return self._wire if narrow and x.dtype == torch.float32 and self.n_nodes > 1 else x.dtype

    def _check_finite(self, sums: Sequence[Tensor]) -> None:
        """Raise on all ranks if a sum, which they all have, is not finite."""
        kind = next((i for i, x in enumerate(sums) if not _is_finite(x)), None)
        if kind is None:
            return
        places = [place for (place,) in self.comm.all_gather_ints([self.flat.first_non_finite()])]
        rank = next((r for r, place in enumerate(places) if place >= 0), None)
        if rank is not None:
            name = self.flat.named[places[rank]][0]
            problem = f"{name} is not finite on rank {rank}"
            hint = "lower the learning rate, clip gradients, or look for the batch that did it"
        else:
            offset = int(torch.isfinite(sums[kind]).logical_not().nonzero()[0])
            name = self.flat.name_at(kind, offset)
            problem = f"the sum of {name} over nodes overflows {sums[kind].dtype}"
            hint = "downcast_type=torch.bfloat16 has the range of float32"
        text = explain("mean of parameters over nodes", problem, hint=hint)
        raise NonFiniteParameters(text, rank=rank, parameter=name)


def average_buffers(module: nn.Module, comm: Communicator) -> None:
    """Give all ranks the mean of float buffers and rank 0's other ones. Collective."""
    buffers = list(module.buffers())
    average_tensors([x for x in buffers if _has_mean(x)], comm)
    broadcast_tensors([x for x in buffers if not _has_mean(x)], comm)


def average_state(optimizer: Optimizer, comm: Communicator) -> None:
    """Give all ranks the mean of the optimizer state that has a parameter's shape. Collective.

    A rank whose parameter never had a gradient has no state for it; what not all ranks have stays.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    local_sums: dict[tuple[int, str], Tensor] = {
        (i, name): value
        for i, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.shape == param.shape and _has_mean(value)
    }
    shared = set.intersection(*map(set, comm.all_gather_object(sorted(local_sums))))
    average_tensors([local_sums[key] for key in sorted(shared)], comm)


def _is_finite(x: Tensor) -> bool:
    """Whether all values are finite; one pass, no copy."""
    if x.numel() == 0:
        return True
    low, high = x.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _has_mean(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()

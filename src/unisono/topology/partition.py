"""`Partition`: ranks laid out in a Cartesian grid, each holding one block of a tensor.

A value like a shape: making one sends nothing and opens nothing, so it can be built, compared,
pickled and asked for sizes in any process. Only `comm` and `group` touch a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from operator import index as as_int
from typing import TYPE_CHECKING, Any, Self, cast

import torch.distributed as dist

from unisono.comm import Communicator, has_world, world
from unisono.errors import PartitionError, compress_ranks, name_ranks
from unisono.expect import is_integer
from unisono.topology.decompose import (
    block,
    check_within,
    fitting_shape,
    flat_index,
    grid_index,
    split_cuts,
)

if TYPE_CHECKING:
    from unisono.topology.mesh import Mesh


class Frozen:
    """Base of values: attributes are set once, by `_set`, and a copy is the value itself."""

    __slots__ = ()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a {type(self).__name__} is frozen; {name!r} cannot be deleted")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class Partition(Frozen):
    """Ranks in a row-major grid: `shape[k]` ranks along tensor dim `k`.

    Args:
        shape: number of ranks along each tensor dim, 1 where the dim is not split.
        ranks: ranks of `comm` in row-major order; default the first `prod(shape)`.
        comm: the root: a `Communicator`, `ProcessGroup` or mpi4py communicator; None is the world
            of the calling process.

    >>> p = Partition([2, 2])
    >>> p.index_of(2), p.local_shape([5, 4], rank=2)
    ((1, 0), (2, 2))
    """

    __slots__ = ("_root", "_source", "ranks", "shape")

    shape: tuple[int, ...]
    """Number of ranks along each dim."""
    ranks: tuple[int, ...]
    """Ranks of the root communicator, in row-major order."""
    _source: object
    _root: Communicator | None

    def __init__(
        self,
        shape: int | Iterable[int],
        *,
        ranks: Iterable[int] | None = None,
        comm: Communicator | dist.ProcessGroup | Any | None = None,
    ) -> None:
        sizes = tuple(as_int(n) for n in (shape if isinstance(shape, Iterable) else [shape]))
        if not sizes or min(sizes) < 1:
            raise PartitionError.because(
                f"Partition({list(sizes)})",
                arithmetic=f"{min(sizes)} < 1" if sizes else "0 dims",
                hint="at least one dim, and at least 1 rank in each",
            )
        members = tuple(map(as_int, range(math.prod(sizes)) if ranks is None else ranks))
        # Communicators and process groups are known at once; anything else waits for its first use.
        is_group = isinstance(comm, Communicator | dist.ProcessGroup)
        root = Communicator.of(comm)._staging() if is_group else None
        self._set(shape=sizes, ranks=members, _source=None if is_group else comm, _root=root)
        if root is None and comm is None and has_world():
            root = world()
        _check_members(sizes, members, None if root is None else root.size)

    @classmethod
    def from_mesh(
        cls, mesh: Mesh, dims: Mapping[str, int], *, ndim: int | None = None
    ) -> Partition:
        """Return the partition in which mesh axis `a` splits tensor dim `dims[a]`.

        It holds the ranks that share this rank's coordinates on the other axes, so a mesh of
        `data` and `h` gives one such partition for each place on `data`. Axes that split the same
        dim are taken together, in the order given.

        Args:
            mesh: a mesh of which this rank is part.
            dims: mesh axis -> tensor dim.
            ndim: number of tensor dims; default the largest one named, plus 1.
        """
        call = f"Partition.from_mesh(mesh, {dict(dims)})"
        size = ndim if ndim is not None else max(dims.values(), default=0) + 1
        for dim in dims.values():
            check_within(f"{call} of a tensor of {size} dims", dim, size)
        ordered = sorted(dims, key=lambda axis: dims[axis])
        ranks = mesh.ranks_along(*ordered)
        shape = [1] * size
        for axis in ordered:
            shape[dims[axis]] *= mesh.axes[axis]
        return cls(shape, ranks=ranks, comm=mesh.comm())

    @property
    def dim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def root(self) -> Communicator:
        """The communicator whose ranks `ranks` are. Local once it is known."""
        root = self._root
        if root is None:
            root = world() if self._source is None else Communicator.of(self._source)
            root = root._staging()  # tensors lie where the network is, not where the group would
            _check_members(self.shape, self.ranks, root.size)
            if self._source is not None:
                self._set(_root=root)
        return root

    @property
    def comm(self) -> Communicator:
        """Communicator of the partition's ranks, in their order; from the cache after first use.

        Collective over the partition's ranks at first use; a rank outside gets an error.
        """
        root = self.root
        if root.rank not in self.ranks:
            raise PartitionError.because(
                f"communicator of {self!r}",
                f"this is rank {root.rank} of {root.name}, not a member",
                hint="ask partition.active first",
            )
        if self.ranks == tuple(range(root.size)):
            return root
        return cast("Communicator", root.sub(self.ranks))  # None outside only

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of `comm`; None when the partition is one rank."""
        return self.comm.group

    @property
    def active(self) -> bool:
        """Whether this process is one of the ranks."""
        return self.root.rank in self.ranks

    @property
    def rank(self) -> int | None:
        """Own rank in the partition; None outside of it."""
        me = self.root.rank
        return self.ranks.index(me) if me in self.ranks else None

    @property
    def index(self) -> tuple[int, ...] | None:
        """Own coordinates; None outside of the partition."""
        rank = self.rank
        return None if rank is None else grid_index(self.shape, rank)

    def index_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank of the partition."""
        return grid_index(self.shape, self._checked(rank))

    def rank_at(self, index: Sequence[int]) -> int:
        """Return the rank of the partition that stands at `index`."""
        inside = len(index) == self.dim and all(
            0 <= i < n for i, n in zip(index, self.shape, strict=True)
        )
        if not inside:
            raise PartitionError.because(
                f"rank at index {list(index)}",
                f"a partition of shape {list(self.shape)}",
                f"{len(index)} coordinates, {self.dim} dims",
                "one coordinate per dim, each below the size there",
            )
        return flat_index(self.shape, index)

    def neighbors(self, rank: int | None = None) -> list[tuple[int | None, int | None]]:
        """Return the partition ranks left and right of `rank` in each dim; None at an edge."""
        index = self.index_of(self._or_own(rank))

        def beside(dim: int, step: int) -> int | None:
            at = index[dim] + step
            if not 0 <= at < self.shape[dim]:
                return None
            return self.rank_at((*index[:dim], at, *index[dim + 1 :]))

        return [(beside(dim, -1), beside(dim, 1)) for dim in range(self.dim)]

    def sub(self, axes: int | Sequence[int], rank: int | None = None) -> Partition:
        """Return the partition of the ranks that share `rank`'s coordinates outside `axes`.

        Args:
            axes: dims to keep; the others get size 1.
            rank: a rank of the partition; default the own one.
        """
        kept = {axes} if is_integer(axes) else set(axes)
        for axis in kept:
            check_within(f"axes {sorted(kept)} of a {self!r}", axis, self.dim)
        index = self.index_of(self._or_own(rank))
        shape = tuple(n if dim in kept else 1 for dim, n in enumerate(self.shape))
        along = [range(n) if dim in kept else (index[dim],) for dim, n in enumerate(self.shape)]
        ranks = [self.ranks[flat_index(self.shape, place)] for place in product(*along)]
        return self._on_root(shape, ranks)

    def subset(self, ranks: Sequence[int], shape: Sequence[int] | None = None) -> Partition:
        """Return the partition of some ranks *of this partition*, in that order.

        Args:
            ranks: ranks of this partition.
            shape: the new grid; default one dim.
        """
        chosen = [self.ranks[self._checked(rank)] for rank in ranks]
        return self._on_root(shape if shape is not None else (len(chosen),), chosen)

    def union(self, other: Partition) -> Partition:
        """Return the one-dim partition of own ranks, then those that only `other` has."""
        self.check_same_root(other)
        ranks = self.ranks + tuple(rank for rank in other.ranks if rank not in self.ranks)
        return self._on_root((len(ranks),), ranks)

    def reshape(self, shape: Sequence[int]) -> Partition:
        """Return the same ranks in another grid."""
        return self._on_root(shape, self.ranks)

    def cuts(self, global_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return, for each dim, the cuts of the balanced blocks of a global shape."""
        self._check_dims(global_shape)
        return tuple(split_cuts(n, p) for n, p in zip(global_shape, self.shape, strict=True))

    def local_shape(self, global_shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of the balanced block of `rank` (default: the own one)."""
        return tuple(s.stop - s.start for s in self.local_slices(global_shape, rank))

    def local_slices(
        self, global_shape: Sequence[int], rank: int | None = None
    ) -> tuple[slice, ...]:
        """Return the slices that cut the balanced block of `rank` out of the whole tensor."""
        self._check_dims(global_shape)
        index = self.index_of(self._or_own(rank))
        return tuple(
            slice(*block(n, parts, i))
            for n, parts, i in zip(global_shape, self.shape, index, strict=True)
        )

    def check_same_root(self, other: Partition) -> None:
        """Raise unless both partitions count their ranks in the same communicator."""
        if not self._has_root_of(other):
            raise PartitionError.because(
                f"{self!r} together with {other!r}",
                f"root communicators {_described(self.root)} and {_described(other.root)}",
                hint="make both partitions with the same comm=",
            )

    def __unisono_communicator__(self, axis: str | int | None) -> Communicator:
        """Let `Communicator.of(partition)` find `comm`, or with `axis` that of `sub(axis)`."""
        if axis is None:
            return self.comm
        if isinstance(axis, str):
            raise PartitionError.because(
                f"axis {axis!r} of {self!r}", "partitions have no axis names", hint="axis=0"
            )
        return self.sub(axis).comm

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return self.shape == other.shape and self.ranks == other.ranks and self._has_root_of(other)

    def __hash__(self) -> int:
        return hash((self.shape, self.ranks))

    def __repr__(self) -> str:
        if self.ranks == tuple(range(len(self.ranks))):
            return f"Partition({list(self.shape)})"
        return f"Partition({list(self.shape)}, ranks={self.ranks})"

    def __reduce__(self) -> tuple[object, ...]:
        root = self.root if self._source is not None else self._root
        return partial(type(self), ranks=self.ranks, comm=root), (self.shape,)

    def _on_root(self, shape: Sequence[int], ranks: Sequence[int]) -> Partition:
        return Partition(shape, ranks=ranks, comm=self._root or self._source)

    def _has_root_of(self, other: Partition) -> bool:
        if self._root is None and other._root is None and self._source is other._source:
            return True
        return self.root == other.root

    def _or_own(self, rank: int | None) -> int:
        place = self.rank if rank is None else rank
        if place is None:
            raise PartitionError.because(
                f"own place in {self!r}",
                f"this is rank {self.root.rank}, members are {compress_ranks(self.ranks)}",
                hint="ask partition.active first, or give rank=",
            )
        return place

    def _checked(self, rank: int) -> int:
        check_within(f"rank {rank} of {self!r}", rank, self.size)
        return rank

    def _check_dims(self, global_shape: Sequence[int]) -> None:
        if len(global_shape) != self.dim:
            raise PartitionError.because(
                f"blocks of a tensor of shape {list(global_shape)}",
                f"a partition of shape {list(self.shape)}",
                f"{len(global_shape)} dims != {self.dim} dims",
                "one partition size for each tensor dim; write 1 where a dim is not split",
            )


def _described(comm: Communicator) -> str:
    return f"{comm.name!r} (ranks {compress_ranks(comm.ranks)}, {comm.backend})"


def _check_members(shape: tuple[int, ...], ranks: tuple[int, ...], root_size: int | None) -> None:
    """Raise unless the ranks are as many as the shape has places, different, and there.

    Args:
        shape: number of ranks along each dim.
        ranks: ranks of the root communicator.
        root_size: number of ranks there; None when it is not known yet.
    """
    call = f"Partition({list(shape)}, ranks={list(ranks)})"
    count, named = math.prod(shape), len(ranks)
    times = " * ".join(map(str, shape))
    product = f"{times} = {count}" if len(shape) > 1 else times
    if count != named:
        raise PartitionError.because(
            call,
            arithmetic=f"{product} != {named} ranks",
            hint=f"Partition({list(fitting_shape(shape, named))})"
            if named
            else f"give {count} ranks",
        )
    if len(set(ranks)) != named:
        twice = [rank for rank in set(ranks) if ranks.count(rank) > 1]
        raise PartitionError.because(
            call,
            f"{name_ranks(twice)} more than once",
            f"{len(set(ranks))} different ranks for {count} blocks",
            "each rank once",
        )
    if min(ranks) >= 0 and (root_size is None or max(ranks) < root_size):
        return
    if min(ranks) < 0 or root_size is None:
        raise PartitionError.because(
            call, arithmetic=f"rank {min(ranks)} < 0", hint="ranks from 0 on"
        )
    if count <= root_size:
        raise PartitionError.because(
            call,
            f"a communicator of {root_size} ranks",
            f"rank {max(ranks)} >= {root_size}",
            f"ranks from 0 to {root_size - 1}",
        )
    raise PartitionError.because(
        f"Partition({list(shape)})",
        f"a communicator of {root_size} ranks",
        f"{product} > {root_size}",
        f"Partition({list(fitting_shape(shape, root_size))}), "
        f"or start {count} ranks: unisono.run(fn, ranks={count})",
    )

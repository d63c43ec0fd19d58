"""`Mesh`: the ranks of a communicator along named axes, the same picture as torch's `DeviceMesh`.

Axes are multiplied row-major, the last one fastest, so ranks next to each other share all but the
last axis. Making a mesh sends nothing; its communicators come from the group cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from itertools import product
from operator import index as as_int
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from unisono.comm import Communicator
from unisono.errors import MeshError
from unisono.expect import expect_int, is_integer
from unisono.topology.decompose import fitting_shape, flat_index, grid_index
from unisono.topology.partition import Frozen

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh(Frozen):
    """Ranks along named axes.

    Args:
        axes: axis name -> number of ranks, as a mapping; needed for names such as "comm".
        comm: communicator (or process group) whose ranks are laid out; None is the world.
        device: where tensors of the mesh's communicators live; default that of `comm`.
        **named: the same as `axes`, one keyword per axis: `Mesh(data=2, graph=-1)`. One axis may be
            -1: as many ranks as are left.

    >>> mesh = Mesh(data=1, graph=1)
    >>> mesh.shape, mesh.index, mesh.comm("graph").size
    ((1, 1), (0, 0), 1)
    """

    __slots__ = ("__weakref__", "_axes", "_comm", "_device_mesh")

    _axes: tuple[tuple[str, int], ...]
    _comm: Communicator
    _device_mesh: DeviceMesh | None

    def __init__(
        self,
        axes: Mapping[str, int] | None = None,
        /,
        *,
        comm: Communicator | dist.ProcessGroup | Any | None = None,
        device: torch.device | str | None = None,
        **named: int,
    ) -> None:
        for option, value in (("comm", comm), ("device", device)):
            if is_integer(value):
                raise MeshError.because(
                    f"Mesh({option}={value})",
                    f"{option!r} is an option of Mesh, not an axis",
                    hint=f'Mesh({{"{option}": {value}}}) names an axis so',
                )
        if axes is not None and named:
            raise MeshError.because(
                f"Mesh({dict(axes)}, {_spelled(named.items())})",
                "axes in a mapping and as keywords",
                hint=f"Mesh({ {**axes, **named} })",
            )
        whole = Communicator.of(comm) if device is None else Communicator.of(comm, device=device)
        sizes = _resolved(dict(axes if axes is not None else named), whole.size)
        self._set(_axes=tuple(sizes.items()), _comm=whole, _device_mesh=None)

    @property
    def axes(self) -> dict[str, int]:
        """Axis name -> number of ranks, in order (a copy)."""
        return dict(self._axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(name for name, _ in self._axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks along each axis."""
        return tuple(size for _, size in self._axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the communicator, row-major: 0, 1, 2, ..."""
        return tuple(range(self.size))

    @property
    def rank(self) -> int:
        """Own rank in the mesh, which is that in its communicator."""
        return self._comm.rank

    @property
    def index(self) -> tuple[int, ...]:
        """Own coordinate along each axis."""
        return grid_index(self.shape, self._comm.rank)

    def coordinate(self, axis: str) -> int:
        """Return the own coordinate along `axis`."""
        return self.index[self._place(axis)]

    def ranks_along(self, *axes: str, rank: int | None = None) -> tuple[int, ...]:
        """Return the ranks that share `rank`'s coordinates on all other axes.

        Row-major in the order in which the axes are named.

        Args:
            *axes: axes along which the coordinate runs; none gives `rank` alone.
            rank: a rank of the mesh; default the own one.
        """
        places = [self._place(axis) for axis in axes]
        if len(set(places)) != len(places):
            raise MeshError.because(
                f"ranks along {list(axes)}", "an axis named twice", hint="each axis once"
            )
        me = self.rank if rank is None else expect_int("rank", rank, 0, self.size, error=MeshError)
        index = list(grid_index(self.shape, me))
        ranks: list[int] = []
        for coordinates in product(*(range(self.shape[place]) for place in places)):
            for place, coordinate in zip(places, coordinates, strict=True):
                index[place] = coordinate
            ranks.append(flat_index(self.shape, index))
        return tuple(ranks)

    def comm(self, *axes: str) -> Communicator:
        """Return the communicator along one axis, or along several taken together.

        Collective over the ranks of that communicator at first use; from the group cache later.
        Several axes are taken in the order of the mesh. No axis: the whole mesh.
        """
        ordered = self._in_mesh_order(axes or self.names)
        ranks = self.ranks_along(*ordered)
        if len(ranks) == self._comm.size:
            return self._comm
        return cast("Communicator", self._comm.sub(ranks))  # None outside only

    def sub(self, *axes: str) -> Mesh:
        """Return the mesh of some axes, through this rank: the others are fixed where it stands.

        Collective as `comm(*axes)` is.
        """
        ordered = self._in_mesh_order(axes)
        return Mesh({name: self.axes[name] for name in ordered}, comm=self.comm(*ordered))

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh for torch (DTensor, FSDP2, ...), on the same process groups.

        Collective over the mesh at first use. Needs torch.distributed to be initialised.
        """
        made = self._device_mesh or self._as_device_mesh()
        self._set(_device_mesh=made)
        return made

    def __unisono_communicator__(self, axis: str | int | None) -> Communicator:
        """Let `Communicator.of(mesh, axis=...)` find the communicator of one axis."""
        if axis is None and len(self._axes) == 1:
            return self.comm()
        if is_integer(axis) and -len(self._axes) <= axis < len(self._axes):
            axis = self.names[axis]
        if not isinstance(axis, str):
            raise MeshError.because(
                f"Communicator.of({self!r}, axis={axis!r})",
                f"axes {', '.join(f'{name}({size})' for name, size in self._axes)}",
                hint=f"axis={self.names[0]!r}, or mesh.comm() for all ranks",
            )
        return self.comm(axis)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._axes == other._axes and self._comm == other._comm

    def __hash__(self) -> int:
        return hash((self._axes, self._comm))

    def __repr__(self) -> str:
        return f"Mesh({_spelled(self._axes)})"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(Mesh, comm=self._comm), (self.axes,)

    def _place(self, axis: str) -> int:
        if axis not in self.names:
            raise MeshError.because(
                f"axis {axis!r}", f"{self!r}", hint=f"one of {', '.join(map(repr, self.names))}"
            )
        return self.names.index(axis)

    def _in_mesh_order(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(axes, key=self._place))

    def _as_device_mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        if not dist.is_initialized():
            raise MeshError.because(
                f"device mesh of {self!r}",
                "torch.distributed is not initialised: torch's DeviceMesh needs a process group",
                hint="start the function with unisono.run(fn, ranks=...)",
            )
        groups = [self.comm(name).process_group() for name in self.names]
        ranks = torch.tensor(self._comm.ranks, dtype=torch.int).reshape(self.shape)
        kind = self._comm.device.type
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=self.names)
        return DeviceMesh.from_group(groups, kind, ranks, mesh_dim_names=self.names)


def _resolved(axes: dict[str, int], total: int) -> dict[str, int]:
    """Check names and sizes, and put a number where -1 stands."""
    if not axes:
        raise MeshError.because("Mesh()", "no axes", hint=f"Mesh(data={total})")
    call = f"Mesh({_spelled(axes.items())})"
    for name, size in axes.items():
        if not isinstance(name, str) or not name:
            raise MeshError.because(f"axis name {name!r}", hint="a name of at least one letter")
        axes[name] = size = as_int(size)
        if size < 1 and size != -1:
            raise MeshError.because(
                call,
                arithmetic=f"{name}({size}) < 1",
                hint="1 or more ranks per axis; -1 on one axis: what is left",
            )
    fixed = {name: size for name, size in axes.items() if size != -1}
    free = [name for name in axes if name not in fixed]
    if len(free) > 1:
        raise MeshError.because(
            call, f"-1 on {len(free)} axes: {', '.join(free)}", hint="-1 on one axis only"
        )
    product = math.prod(fixed.values())
    times = " * ".join(f"{name}({size})" for name, size in fixed.items())
    quotient, rest = divmod(total, product)
    if free and (rest or not quotient):
        fits = dict(zip(fixed, _nearest_divisor(tuple(fixed.values()), total), strict=True))
        raise MeshError.because(
            call,
            f"ranks({total})",
            f"{times} = {product} does not divide ranks({total}): {total} % {product} = {rest}",
            f"Mesh({_spelled((name, fits.get(name, -1)) for name in axes)})",
        )
    if not free and product != total:
        fitted = zip(fixed, fitting_shape(tuple(fixed.values()), total), strict=True)
        more = (
            f", or start {product} ranks: unisono.run(fn, ranks={product})"
            if product > total
            else ""
        )
        equation = f"{times} = {product}" if len(fixed) > 1 else times
        raise MeshError.because(
            call,
            arithmetic=f"{equation} != ranks({total})",
            hint=f"Mesh({_spelled(fitted)}){more}",
        )
    return {name: quotient if size == -1 else size for name, size in axes.items()}


def _nearest_divisor(shape: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return sizes near `shape` whose product divides `total`."""
    *fixed, _ = fitting_shape((*shape, max(1, total // math.prod(shape))), total)
    return tuple(fixed)


def _spelled(axes: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)

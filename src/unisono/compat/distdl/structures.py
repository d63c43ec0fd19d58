"""What DistDL knows of tensors: their structure, own and whole, dtypes, and memory to share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.compat.distdl.blocks import compute_nd_slice_shape
from unisono.compat.distdl.partitions import MPIPartition
from unisono.errors import PartitionError


def zero_volume_tensor(
    b: int | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a tensor without elements, of shape `(0,)`, or `(b, 0)` where a batch size is kept.

    >>> zero_volume_tensor().shape, zero_volume_tensor(3, dtype=torch.float64).shape
    (torch.Size([0]), torch.Size([3, 0]))
    """
    shape = (0,) if b is None else (b, 0)
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad, device=device)


class TensorStructure:
    """Shape, dtype and `requires_grad` of a tensor, or of none.

    >>> TensorStructure(torch.ones(2, 3)) == TensorStructure(torch.zeros(2, 3))
    True
    """

    def __init__(self, tensor: Tensor | None = None) -> None:
        self.shape: Any = None
        self.dtype: torch.dtype | None = None
        self.requires_grad: bool | None = None
        if tensor is not None:
            self.fill_from_tensor(tensor)

    def fill_from_tensor(self, tensor: Tensor) -> None:
        """Take over what a tensor has."""
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.requires_grad = tensor.requires_grad

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorStructure):
            return NotImplemented
        return self._facts() == other._facts()

    __hash__ = None  # type: ignore[assignment]

    def _facts(self) -> tuple[object, ...]:
        shape = None if self.shape is None else tuple(int(n) for n in self.shape)
        return shape, self.dtype, self.requires_grad

    def __repr__(self) -> str:
        shape, dtype, requires_grad = self._facts()
        return f"TensorStructure(shape={shape}, dtype={dtype}, requires_grad={requires_grad})"


def distdl_padding_to_torch_padding(pad: Sequence[Sequence[int]] | np.ndarray) -> tuple[int, ...]:
    """Return `(left, right)` of each dim in the order of `F.pad`: the last dim first.

    >>> distdl_padding_to_torch_padding([[0, 0], [1, 2], [3, 4]])
    (3, 4, 1, 2, 0, 0)
    """
    return tuple(int(n) for pair in reversed(pad) for n in pair)


def compute_subtensor_shapes_unbalanced(
    local: Tensor | TensorStructure, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> np.ndarray | None:
    """Return the sizes of every block, an array of shape `P_in.shape + [dim]`.

    Collective over both partitions; None on ranks of neither.

    Args:
        local: own block, or its structure.
        P_in: partition of the blocks.
        P_out: who else is to know; it holds the first rank of `P_in`.
    """
    shapes = None
    if P_in.active:
        every = P_in._members.all_gather_object(tuple(int(n) for n in local.shape))
        wrong = next((shape for shape in every if len(shape) != P_in.dim), None)
        if wrong is not None:
            raise PartitionError.because(
                f"a block of shape {list(wrong)} on {P_in!r}",
                f"blocks {every}",
                f"{len(wrong)} tensor dims, {P_in.dim} partition dims",
                "one partition size for each tensor dim; write 1 where a dim is not split",
            )
        shapes = np.array(every, dtype=np.int64).reshape(*P_in.shape, P_in.dim)
    if P_out is not None and P_out.active:
        shapes = P_out.broadcast_data(shapes, P_data=P_in)
    return shapes


def assemble_global_tensor_structure(
    local: Tensor | TensorStructure, P_in: MPIPartition, P_out: MPIPartition | None = None
) -> TensorStructure:
    """Return the structure of the whole tensor, on `P_in` and on `P_out`; an empty one elsewhere.

    Collective over both. Sizes are summed along each axis; dtype and `requires_grad` are own
    ones on `P_in`, those of its first rank on `P_out`.

    Args:
        local: own block, or its structure.
        P_in: partition of the blocks.
        P_out: who else is to know; it holds the first rank of `P_in`.
    """
    whole = TensorStructure()
    shapes = compute_subtensor_shapes_unbalanced(local, P_in)
    if shapes is not None and P_in.index is not None:
        lines = [
            tuple(slice(None) if other == dim else int(i) for other, i in enumerate(P_in.index))
            for dim in range(P_in.dim)
        ]
        whole.shape = torch.Size(int(shapes[(*line, dim)].sum()) for dim, line in enumerate(lines))
        whole.dtype = local.dtype
        whole.requires_grad = local.requires_grad
    if P_out is None or not P_out.active:
        return whole
    structure = P_out.broadcast_data(whole if P_in.active else None, P_data=P_in)
    return whole if structure is None else structure[0]


def broadcast_tensor_structure(
    in_structure: TensorStructure, P_send: MPIPartition, P_recv: MPIPartition
) -> TensorStructure:
    """Return the structure of what this rank gets in `P_recv`; an empty one if it gets nothing.

    Collective over both teams, as `create_broadcast_partition_to` and
    `create_reduction_partition_to` make them.

    Args:
        in_structure: of what this rank brings; looked at where `P_send` is active.
        P_send: where it brings it.
        P_recv: where it gets something.
    """
    structure_here = TensorStructure()
    teams = [P_send] if P_send == P_recv else [P for P in (P_send, P_recv) if P.active]
    for team in sorted(teams, key=lambda P: sorted(P._group or ())):
        sent = in_structure if team is P_send else None
        structure = next(one for one in team._members.all_gather_object(sent) if one is not None)
        if team == P_recv:
            structure_here = structure
    return structure_here


_SHARED = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
torch_to_numpy_dtype_dict: dict[torch.dtype, type[np.generic]] = {
    getattr(torch, name): np.dtype(name).type for name in _SHARED
}
"""dtype of torch -> scalar type of numpy, which has no bfloat16."""
numpy_to_torch_dtype_dict: dict[Any, torch.dtype] = {
    key: ours
    for ours, theirs in torch_to_numpy_dtype_dict.items()
    for key in (theirs, np.dtype(theirs))
}
"""Scalar type or dtype of numpy -> dtype of torch."""
numpy_to_intID_dtype_dict = {key: np.dtype(key).num for key in numpy_to_torch_dtype_dict}
torch_to_intID_dtype_dict = {
    ours: np.dtype(theirs).num for ours, theirs in torch_to_numpy_dtype_dict.items()
}
intID_to_torch_dtype_dict = {number: ours for ours, number in torch_to_intID_dtype_dict.items()}
intID_to_numpy_dtype_dict = {
    number: torch_to_numpy_dtype_dict[ours] for ours, number in torch_to_intID_dtype_dict.items()
}


class Bunch(dict[str, Any]):
    """A dict whose entries are attributes too.

    >>> ctx = Bunch(a=1)
    >>> ctx.b = 2
    >>> ctx["b"], ctx.a
    (2, 1)
    """

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


class DummyContext(Bunch):
    """What `forward` and `backward` of an autograd function need when they are called by hand.

    >>> ctx = DummyContext()
    >>> ctx.save_for_backward(Tensor([1.0]))
    >>> len(ctx.saved_tensors)
    1
    """

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors as `saved_tensors`."""
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Keep what is changed in place."""
        self.dirty_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Keep what has no gradient."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Keep whether missing gradients become zeros."""
        self.materialize_grads = value


class MPIExpandableBuffer:
    """A flat array that grows, seen as arrays of any shape. All views begin at its start.

    Args:
        dtype: of the array.
        initial_capacity: number of elements to begin with.

    >>> buffer = MPIExpandableBuffer(np.float32)
    >>> buffer.get_view((2, 3)).shape, buffer.capacity
    ((2, 3), 6)
    """

    def __init__(self, dtype: Any, initial_capacity: int = 0) -> None:
        self.dtype = dtype
        self.capacity = initial_capacity
        self.raw_buffer: np.ndarray = np.empty(initial_capacity, dtype=dtype)
        self.views: dict[tuple[int, ...], np.ndarray] = {}
        """By shape; on the present array."""

    def expand(self, new_capacity: int) -> None:
        """Grow to at least this many elements; values stay, and `views` move along."""
        if new_capacity <= self.capacity:
            return
        grown = np.empty(new_capacity, dtype=self.dtype)
        grown[: self.capacity] = self.raw_buffer
        self.raw_buffer, self.capacity = grown, int(new_capacity)
        self.views = {shape: self._seen_as(shape) for shape in self.views}

    def allocate_view(self, view_shape: Iterable[int]) -> None:
        """Make room for a view."""
        self.get_view(view_shape)

    def get_view(self, view_shape: Iterable[int]) -> np.ndarray:
        """Return the first elements as an array of this shape."""
        shape = tuple(int(n) for n in view_shape)
        if shape not in self.views:
            self.expand(math.prod(shape))
            self.views[shape] = self._seen_as(shape)
        return self.views[shape]

    def _seen_as(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.raw_buffer[: math.prod(shape)].reshape(shape)


class MPIBufferManager:
    """Buffers by dtype, handed out again.

    >>> manager = MPIBufferManager()
    >>> first = manager.request_buffers(2, np.float32)
    >>> manager.request_buffers(1, np.float32)[0] is first[0]
    True
    """

    def __init__(self) -> None:
        self.buffers_map: dict[Any, list[MPIExpandableBuffer]] = {}

    def request_buffers(
        self, n_buffers: int, dtype: Any, **kwargs: Any
    ) -> list[MPIExpandableBuffer]:
        """Return the first `n_buffers` of this dtype, making those that are missing.

        Args:
            n_buffers: how many.
            dtype: of numpy.
            kwargs: for `MPIExpandableBuffer`, where one is made.
        """
        buffers = self.buffers_map.setdefault(dtype, [])
        while len(buffers) < n_buffers:
            buffers.append(MPIExpandableBuffer(dtype, **kwargs))
        return buffers[:n_buffers]


def manager_or_new(buffer_manager: MPIBufferManager | None) -> MPIBufferManager:
    """Return the manager that a layer was given, or its own one."""
    if buffer_manager is None:
        return MPIBufferManager()
    if not isinstance(buffer_manager, MPIBufferManager):
        raise PartitionError.because(
            f"buffer_manager={buffer_manager!r}",
            f"a {type(buffer_manager).__name__}",
            hint="backend.BufferManager(), or None",
        )
    return buffer_manager


Overlap = tuple[Any, Any, Any]
"""Slices, shape and partner of a box; three times None without one."""


def allocate_repartition_buffers(
    buffer_manager: MPIBufferManager,
    P_x_to_y_overlaps: Sequence[Overlap],
    P_y_to_x_overlaps: Sequence[Overlap],
    dtype: torch.dtype,
) -> tuple[list[MPIExpandableBuffer | None], list[MPIExpandableBuffer | None]]:
    """Return one buffer for each box that goes out, and one for each that comes in.

    None where there is no box, or it stays on this rank.
    """
    both = (P_x_to_y_overlaps, P_y_to_x_overlaps)
    travels = [[box is not None and not isinstance(to, str) for box, _, to in o] for o in both]
    count = sum(map(sum, travels))
    free = iter(buffer_manager.request_buffers(count, torch_to_numpy_dtype_dict[dtype]))
    out, into = ([next(free) if used else None for used in row] for row in travels)
    for buffer, (_, shape, _) in zip((*out, *into), (*both[0], *both[1]), strict=True):
        if buffer is not None:
            buffer.allocate_view(shape)
    return out, into


def allocate_halo_exchange_buffers(
    buffer_manager: MPIBufferManager,
    slices: Sequence[Sequence[tuple[slice, ...]]],
    recv_buffer_shape: np.ndarray,
    send_buffer_shape: np.ndarray,
    dtype: torch.dtype,
) -> list[list[MPIExpandableBuffer | None]]:
    """Return for each dim the buffers of left bulk, left ghosts, right bulk and right ghosts.

    Four buffers serve all dims, one after the other. None where nothing travels.
    """
    four = buffer_manager.request_buffers(4, torch_to_numpy_dtype_dict[dtype])
    made: list[list[MPIExpandableBuffer | None]] = []
    for dim, boxes in enumerate(slices):
        (send_left, send_right), (recv_left, recv_right) = (
            send_buffer_shape[dim],
            recv_buffer_shape[dim],
        )
        widths = (send_left, recv_left, send_right, recv_right)
        row: list[MPIExpandableBuffer | None] = []
        for buffer, box, width in zip(four, boxes, widths, strict=True):
            shape = compute_nd_slice_shape(box)
            is_used = width > 0 and bool(np.all(shape))
            if is_used:
                buffer.allocate_view(shape)
            row.append(buffer if is_used else None)
        made.append(row)
    return made

"""The common shape of collectives that hand data through slots, a slot's worth a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from unisono.comm.transports.shm.board import Board
from unisono.comm.transports.shm.buffers import SharedBuffer

Direct = Callable[[SharedBuffer, list[int]], None]


def run_rounds(
    board: Board,
    code: int,
    nbytes: int,
    *,
    digest: int = 0,
    place: int = 0,
    same_size: bool = True,
    fill: Callable[[int, int], None],
    rounds: Callable[[int], int],
    drain: Callable[[int, int], None],
    direct: Direct | None = None,
) -> None:
    """Run a collective: fill the own slot, meet, drain the others', until all data has passed.

    If every rank offers a place in one shared buffer, `direct` takes the data from there instead,
    between two meetings. If only some do, all fall back to the slots.

    Args:
        board: the slots.
        code: what must agree between ranks; see `Board.meet`, also for the next four.
        nbytes: bytes this rank brings.
        digest: hash of sizes that must agree.
        place: where this rank's data lies in a shared buffer, 0 if it does not.
        same_size: whether all ranks bring as much.
        fill: `(address of the own slot, round)`: copy data in.
        rounds: `turn` of the first meeting -> number of rounds, the same on all ranks.
        drain: `(turn, round)`: copy data out.
        direct: `(buffer, offset of each rank's data)`: do the whole at once.
    """
    turn = board.turn()
    if not place:
        fill(board.address[turn][board.rank], 0)
    places = board.meet(turn, code, nbytes, digest=digest, place=place, same_size=same_size)
    count = rounds(turn)
    done = 0
    if places is None:
        drain(turn, 0)
        done = 1
    elif direct is not None:
        found = board.buffers.find(places)
        if found is not None:
            direct(*found)
            board.sync.sync()
            return
    for number in range(done, count):
        turn = board.turn()
        fill(board.address[turn][board.rank], number)
        board.sync.sync()
        drain(turn, number)


def sizes_of(blocks: Sequence[Tensor]) -> list[int]:
    """Return the sizes of blocks in bytes."""
    return [block.numel() * block.element_size() for block in blocks]


def row_place(board: Board, blocks: Sequence[Tensor], sizes: Sequence[int]) -> int:
    """Return the place of blocks that follow each other in one shared buffer, else 0."""
    if board.buffers.nbytes == 0:
        return 0
    pointer = end = next((b.data_ptr() for b, n in zip(blocks, sizes, strict=True) if n), 0)
    for block, size in zip(blocks, sizes, strict=True):
        if size:
            if block.data_ptr() != end:
                return 0
            end += size
    return board.buffers.place(pointer, end - pointer) if end > pointer else 0

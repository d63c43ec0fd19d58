"""`DDPConfig`: where and with whom a `DDPSequential` trains."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.comm import Environment
from unisono.errors import PlatformError

BACKENDS = ("nccl", "gloo", "shm", "mpi", "auto")


@dataclass
class DDPConfig:
    """Devices, backend and place in the world; checked by `DDPSequential`.

    Rank and world size are needed only where nothing else tells them: a running world and a
    launcher's variables go first, and must not contradict.
    """

    device_ids: list[int]
    """CUDA devices, one per rank or one per rank of a node; may be empty on other backends."""
    backend: str = "nccl"
    """`"nccl"`, `"gloo"`, `"shm"`, `"mpi"`, or `"auto"` for the best that is there."""
    rank: int = 0
    """Place of this process in the world."""
    world_size: int = 1
    """Number of processes."""

    @property
    def is_placed(self) -> bool:
        """Whether rank and world size say more than the defaults."""
        return (self.rank, self.world_size) != (0, 1)

    def check(self, cuda: bool) -> None:
        """Refuse what cannot be, alike on all ranks."""
        if self.backend not in BACKENDS:
            raise PlatformError.because(
                f"DDPConfig(backend={self.backend!r})",
                f"backends are {', '.join(BACKENDS)}",
                None,
                'backend="auto"',
            )
        if self.backend == "nccl" and not cuda:
            raise PlatformError.because(
                'DDPConfig(backend="nccl")',
                "no CUDA device on this machine",
                None,
                'backend="gloo" (or "auto")',
            )
        if not 0 <= self.rank < self.world_size:
            raise PlatformError.because(
                f"DDPConfig(rank={self.rank}, world_size={self.world_size})",
                "a rank outside of its world",
                f"ranks of a world of {self.world_size} are 0 to {self.world_size - 1}",
                f"world_size={self.rank + 1}, or a smaller rank",
            )

    def check_agrees(self, rank: int, size: int, who: str) -> None:
        """Refuse a place that contradicts the one that `who` gave this process."""
        if self.is_placed and (self.rank, self.world_size) != (rank, size):
            raise PlatformError.because(
                f"DDPConfig(rank={self.rank}, world_size={self.world_size})",
                f"{who} says rank {rank} of {size}",
                f"({self.rank}, {self.world_size}) != ({rank}, {size})",
                "leave rank and world_size out",
            )

    def environment(self, address: tuple[str, int] | None) -> Environment:
        """Return the world that this config alone describes, met at `address`."""
        if address is None:
            raise PlatformError.because(
                f"DDPConfig(rank={self.rank}, world_size={self.world_size}) in a plain process",
                "no launcher started this process, and no MASTER_ADDR and MASTER_PORT say where "
                "the ranks meet",
                None,
                f"unisono.run(train, ranks={self.world_size}), or unisono run --ranks "
                f"{self.world_size} script.py",
            )
        is_local = address[0] in ("localhost", "127.0.0.1", "::1")
        return Environment(
            kind="torchrun",
            rank=self.rank,
            size=self.world_size,
            local_rank=self.rank,
            local_size=self.world_size if is_local else 1,
            nodes=1 if is_local else self.world_size,
            master=address,
        )

"""`DDPSequential`: one net, replicated; the ranks' deltas are added in every step."""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from unisono import accelerator, launch
from unisono.accelerator import is_accelerator
from unisono.bayes import cuda
from unisono.bayes.layers.base import same_info
from unisono.bayes.layers.normalization import BatchNorm2d
from unisono.bayes.moments import ArrayLike, BaseDeltaStates, BaseHiddenStates, Output
from unisono.bayes.parameters import CAPS, TAIL, cap_class
from unisono.bayes.sequential import Input, Sequential, not_a_number
from unisono.comm import (
    Communicator,
    Environment,
    detect,
    groups,
    has_world,
    leave_at_exit,
    start_world,
    transports,
)
from unisono.errors import CollectiveMismatch, MissingExtra, PartitionError, PlatformError, an
from unisono.expect import expect_choice, expect_int

BACKENDS = (cuda.BACKEND, "gloo", "shm", "mpi", "auto")


@dataclass
class DDPConfig:
    """Devices, backend and place in the world; checked by `DDPSequential`.

    Rank and world size are needed only where nothing else tells them: a running world and a
    launcher's variables go first, and must not contradict.
    """

    device_ids: list[int]
    """Numbers of devices, one per rank or one per rank of a node. Empty: by the place on the node.
    Ranks whose world is running have theirs already, and these must not contradict."""
    backend: str = cuda.BACKEND
    """`"nccl"`, `"gloo"`, `"shm"`, `"mpi"`, or `"auto"` for the best that is there."""
    rank: int = 0
    """Place of this process in the world."""
    world_size: int = 1
    """Number of processes."""


class DDPSequential:
    """A `Sequential` whose replicas on all ranks stay bit-identical.

    The constructor is collective: it checks that all ranks have the same architecture and gives
    everybody the parameters of rank 0. Forward and backward are local; `step` is collective.

    Args:
        model: this rank's replica.
        config: devices, backend, place in the world.
        average: divide the summed deltas by the number of ranks. False adds them as they are: with
            `cap_batch="global"` that is one process on the concatenated batch.
        cap_batch: whether the bound of an update follows from the rows of one rank (`"local"`; the
            tightest bound present counts for all) or of all ranks (`"global"`).
        sync_norm_stats: False: each rank normalises by its own rows; `"running"`: running values
            are averaged in each step; `"batch"` or True: statistics are those of all ranks' rows,
            which makes forward in training collective.
        comm: a communicator, group or mesh axis; default: the running world, or the one a launcher
            or `config` describes.
        timeout_s: deadline of each wait.
    """

    def __init__(
        self,
        model: Sequential,
        config: DDPConfig,
        average: bool = True,
        *,
        cap_batch: Literal["local", "global"] = "local",
        sync_norm_stats: bool | Literal["running", "batch"] = False,
        comm: object = None,
        timeout_s: float | None = None,
    ) -> None:
        if not isinstance(model, Sequential):
            raise PartitionError.because(
                "DDPSequential of a unisono.bayes.Sequential",
                an(f"{type(model).__module__}.{type(model).__qualname__}"),
                hint="DDPSequential(Sequential(Linear(1, 8), ReLU(), Linear(8, 1)), config); "
                "from_torch(module) makes one of a torch module",
            )
        expect_choice("cap_batch", cap_batch, ("local", "global"), error=PartitionError)
        if not isinstance(sync_norm_stats, bool):
            expect_choice(
                "sync_norm_stats", sync_norm_stats, ("running", "batch"), error=PartitionError
            )
        self.model, self.config, self.average, self.cap_batch = model, config, average, cap_batch
        if config.backend == cuda.BACKEND and cuda.is_on_cpu():
            config = replace(config, backend="auto")
        self.comm = _join(config, comm, timeout_s)
        if is_accelerator(self.comm.device):
            model.to(self.comm.device)
        model.preinit_layer()
        self._check_architecture()
        self._norms = [leaf for _, leaf in model.leaves() if isinstance(leaf, BatchNorm2d)]
        self._averages_running = sync_norm_stats == "running"
        self._shares_batches = sync_norm_stats in (True, "batch")
        self._bucket: Tensor | None = None
        self._place_deltas()
        self._broadcast()

    def __getstate__(self) -> dict[str, Any]:
        """Travel without the bucket: a copy would be memory that no other rank sees."""
        return {**vars(self), "_bucket": None}

    def _check_architecture(self) -> None:
        layers_here = [
            (key, layer.get_layer_info(), [tuple(t.shape) for t in layer.tensors().values()])
            for key, layer in self.model.leaves()
        ]
        dtype = str(self.model._dtype)
        if self.comm.all_equal((layers_here, dtype)):
            return
        everybody: list[tuple[list[Any], str]] = self.comm.all_gather_object((layers_here, dtype))
        request = f"DDPSequential over {self.comm.size} ranks"
        for n in range(max(len(layers) for layers, _ in everybody)):
            versions = [layers[n] if n < len(layers) else None for layers, _ in everybody]
            if not all(_same_layer(layer, versions[0]) for layer in versions):
                lines = (f"rank {r}: {f[1] if f else 'nothing'}" for r, f in enumerate(versions))
                raise CollectiveMismatch.because(
                    request,
                    "\n".join([f"layer {n} differs", *lines]),
                    hint="build the same layers on all ranks",
                )
        # layers may differ in sizes that only ranks know which have seen images
        if len({kind for _, kind in everybody}) > 1:
            kinds = ", ".join(f"rank {r}: {kind}" for r, (_, kind) in enumerate(everybody))
            raise CollectiveMismatch.because(request, kinds, hint="the same dtype on all ranks")

    def _place_deltas(self) -> None:
        """Let the deltas live where the ranks add them up without a copy.

        Collective only where the bucket does not fit, as after a change of dtype, which all ranks
        make. A single rank may have a new arena: it has used a layer in another net, too.
        """
        arena = self.model.arena
        extra = sum(2 * norm.num_features for norm in self._norms) if self._averages_running else 0
        bucket, like = self._bucket, arena.mean
        if bucket is None or (bucket.dtype, bucket.device) != (like.dtype, like.device):
            size = 2 * arena.size + TAIL + extra
            bucket = self._bucket = self.comm.shared_buffer((size,), like.dtype)
        arena.point_deltas(bucket)

    @torch.no_grad()
    def _broadcast(self) -> None:
        """Give every rank the parameters and running values of rank 0, in one message."""
        arena = self.model.arena
        parts = [arena.mean, arena.var]
        parts += [t for norm in self._norms for t in (norm.running_mean, norm.running_var)]
        seen = [arena.mean.new_tensor([float(norm.has_statistics) for norm in self._norms])]
        flat = self.comm.broadcast(torch.cat([*parts, *seen]))
        sizes = [part.numel() for part in parts]
        for part, got in zip(parts, flat.split([*sizes, len(self._norms)]), strict=False):
            part.copy_(got)
        for norm, flag in zip(self._norms, flat[sum(sizes) :].tolist(), strict=True):
            norm.has_statistics = bool(flag)

    @property
    def rank(self) -> int:
        """Place of this replica."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of replicas."""
        return self.comm.size

    @property
    def output_z_buffer(self) -> BaseHiddenStates:
        """Output of this replica's last forward pass."""
        return self.model.output_z_buffer

    @output_z_buffer.setter
    def output_z_buffer(self, value: BaseHiddenStates) -> None:
        self.model.output_z_buffer = value

    @property
    def input_delta_z_buffer(self) -> BaseDeltaStates:
        """Where an updater writes the deltas of this replica's output."""
        return self.model.input_delta_z_buffer

    @input_delta_z_buffer.setter
    def input_delta_z_buffer(self, value: BaseDeltaStates) -> None:
        self.model.input_delta_z_buffer = value

    def forward(self, mu_x: Input, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """Return mean and variance of this rank's rows.

        Local; collective in training with `sync_norm_stats="batch"`.
        """
        if self._shares_batches:  # each time: the norms of a copied net have forgotten it
            for norm in self._norms:
                norm.sum_over_ranks = self.comm.all_reduce
        with self._told_at_step():
            return self.model.forward(mu_x, var_x)

    @contextmanager
    def _told_at_step(self) -> Iterator[None]:
        """Keep a NaN for `step`: one of this rank alone must not leave others waiting."""
        self.model.tells_at_step = True
        try:
            yield
        finally:
            self.model.tells_at_step = False

    def __call__(self, mu_x: Input, var_x: ArrayLike | None = None) -> tuple[Output, Output]:
        """As `forward`."""
        return self.forward(mu_x, var_x)

    def backward(self) -> None:
        """Carry this rank's deltas to all layers. Local."""
        with self._told_at_step():
            self.model.backward()

    @torch.no_grad()
    def step(self) -> None:
        """Add up the deltas of all ranks in one all-reduce and apply them. Collective.

        A rank that had no rows since the last step calls it all the same and adds zeros. On an
        accelerator the ranks tell each other their rows over a CPU group, and no host waits for its
        device.
        """
        arena = self.model.arena
        if arena.bucket is not self._bucket:
            self._place_deltas()
        with self._told_at_step():
            rows, problem = self.model.take_pending()
        deltas, rest = arena.bucket[: 2 * arena.size], arena.bucket[2 * arena.size :]
        if not rows:
            deltas.zero_()
        if self._averages_running:
            values = [t for norm in self._norms for t in (norm.running_mean, norm.running_var)]
            rest[TAIL:] = torch.cat(values) * rows
        if is_accelerator(rest.device):  # where reading what lies behind the deltas would wait
            heard = self.comm.all_gather_ints([rows, int(bool(problem))])
            sums = [sum(n) for n in zip(*(_tail(*record) for record in heard), strict=True)]
            self.comm.all_reduce_(arena.bucket)
        else:
            rest[:TAIL] = torch.tensor(_tail(rows, bool(problem)))
            self.comm.all_reduce_(arena.bucket)
            sums = rest[:TAIL].tolist()
        total, *classes, problems = sums
        if problems:
            self._refuse_nan(problem)
        if not total:
            return
        if self.average:
            deltas.div_(self.comm.size)
        if self._averages_running:
            self._take_running(rest[TAIL:] / total)
        if self.cap_batch == "global":
            cap = CAPS[cap_class(int(total))]
        else:
            cap = max(itertools.compress(CAPS, classes))  # the tightest bound present
        self.model.apply_deltas(cap)

    def _refuse_nan(self, problem: str) -> NoReturn:
        """Tell all ranks alike who has met a NaN, and where; nothing is applied."""
        everybody: list[str] = self.comm.all_gather_object(problem)
        told = [f"rank {rank}: {found}" for rank, found in enumerate(everybody) if found]
        raise not_a_number("step", "\n".join(told))

    def _take_running(self, averages: Tensor) -> None:
        sizes = [norm.num_features for norm in self._norms for _ in range(2)]
        values = averages.split(sizes)
        for norm, mean, var in zip(self._norms, values[0::2], values[1::2], strict=True):
            norm.running_mean, norm.running_var = mean.clone(), var.clone()
            if not norm.has_statistics:  # of other ranks' rows, or of nobody's
                norm.note_loaded_statistics()

    def predict(self, x: ArrayLike, batch_size: int | None = None) -> tuple[Output, Output]:
        """Return mean and standard deviation `[samples, outputs]` in eval mode. Local."""
        return self.model.predict(x, batch_size)

    def train(self) -> None:
        """Switch this replica to training mode. Local."""
        self.model.train()

    def eval(self) -> None:
        """Switch this replica to eval mode, in which forward never communicates. Local."""
        self.model.eval()

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.comm.barrier()

    def get_outputs(self) -> tuple[Output, Output]:
        """Return mean and variance of this rank's last output, flat."""
        return self.model.get_outputs()

    def output_to_host(self) -> list[float]:
        """Return the means of this rank's last output as a list."""
        return self.model.output_to_host()

    def get_device_with_index(self) -> str:
        """Return this replica's device, such as `"cuda:0"` or `"cpu"`."""
        return self.model.device

    def state_dict(self, *, tensors: bool = False, running: bool = False) -> dict[str, Any]:
        """Return the parameters; the same on all ranks. Local."""
        return self.model.state_dict(tensors=tensors, running=running)

    def save(self, path: str | Path) -> None:
        """Let rank 0 write the net; all ranks return when the file is there. Collective."""
        if self.comm.rank == 0:
            self.model.save(path)
        self.comm.barrier()

    def check_sync(self) -> None:
        """Raise `CollectiveMismatch` if replicas differ in a single bit. Collective."""
        digests = [
            (key, hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in tensors)).hexdigest())
            for key, tensors in self.model.live_tensors(running=False).items()
        ]
        everybody: list[list[tuple[str, str]]] = self.comm.all_gather_object(digests)
        for n, (key, _) in enumerate(digests):
            found = [rows[n][1][:12] for rows in everybody]
            if len(set(found)) > 1:
                raise CollectiveMismatch.because(
                    f"replicas on {self.comm.size} ranks",
                    f"{key} differs: "
                    + ", ".join(f"rank {r}: {digest}" for r, digest in enumerate(found)),
                    hint="change parameters on all ranks alike, or make a new DDPSequential",
                )


def _tail(rows: int, has_nan: int) -> list[float]:
    """Return what goes behind the deltas: rows, cap class, whether a NaN was met."""
    tail = [0.0] * TAIL
    if rows:
        tail[0] = rows
        tail[1 + cap_class(rows)] = 1.0
    tail[TAIL - 1] = float(has_nan)
    return tail


def _same_layer(one: Any, other: Any) -> bool:
    """Compare key, info and shapes of two ranks' layers; None is no layer."""
    if one is None or other is None:
        return one is other
    return one[0] == other[0] and one[2] == other[2] and same_info(one[1], other[1])


def _join(config: DDPConfig, source: object, timeout_s: float | None) -> Communicator:
    """Return the communicator of a replica's ranks. Collective when a world or group is made.

    Args:
        config: what the user asked for.
        source: a communicator, group or mesh axis that is used as it is; None to look for a world.
        timeout_s: deadline of each wait; None keeps the world's.
    """
    _check_config(config)
    if source is not None:
        comm = Communicator.of(source)
        _check_agrees(config, comm.rank, comm.size, "the communicator")
    elif has_world():
        comm = launch.world()
        _check_agrees(config, comm.rank, comm.size, "the running world")
        comm = _on_backend(comm, config)
        _check_devices(config, comm)
    else:
        comm = _started(config)
    return comm if timeout_s is None else comm.with_timeout(timeout_s)


def _check_config(config: DDPConfig) -> None:
    """Refuse what cannot be, alike on all ranks."""
    expect_choice("backend", config.backend, BACKENDS, error=PlatformError)
    if config.backend == cuda.BACKEND and not cuda.is_available():
        raise PlatformError.because(
            f"DDPConfig(backend={config.backend!r})",
            "no CUDA device on this machine",
            hint='backend="gloo" (or "auto"); if a program insists, unisono run --compat pytagi '
            "--as-cpu",
        )
    expect_int("rank", operator.index(config.rank), 0, config.world_size, error=PlatformError)
    if config.backend == "mpi" and (reason := transports.available()["mpi"]) != "ok":
        raise MissingExtra.of("mpi", 'DDPConfig(backend="mpi")', reason)


def _check_agrees(config: DDPConfig, rank: int, size: int, who: str) -> None:
    """Refuse a place that contradicts the one that `who` gave this process."""
    place = (config.rank, config.world_size)
    if place not in ((0, 1), (rank, size)):  # (0, 1) is the default, which says nothing
        raise PlatformError.because(
            f"DDPConfig(rank={config.rank}, world_size={config.world_size})",
            f"{who} says rank {rank} of {size}",
            f"{place} != ({rank}, {size})",
            "leave rank and world_size out",
        )


def _check_devices(config: DDPConfig, comm: Communicator) -> None:
    """Refuse devices that contradict those which the ranks of a running world have."""
    if not is_accelerator(comm.device) or len(config.device_ids) != comm.size:
        return
    indices = [index for (index,) in comm.all_gather_ints([comm.device.index or 0])]
    if indices != config.device_ids and accelerator.count() > 1:
        raise PlatformError.because(
            f"DDPConfig(device_ids={config.device_ids})",
            f"the ranks of the running world are on the devices {indices}",
            f"{config.device_ids} != {indices}",
            f"device_ids=[], or {indices}",
        )


def _started(config: DDPConfig) -> Communicator:
    environment = detect()
    if environment.is_world:
        who = f"the launcher ({environment.kind})"
        _check_agrees(config, environment.rank, environment.size, who)
    elif config.world_size > 1:
        environment = _described(config)
    backend = None if config.backend == "auto" else config.backend
    comm = start_world(environment, backend=backend, device=_device_of(config, environment))
    if environment.is_world:
        leave_at_exit()
    return comm


def _described(config: DDPConfig) -> Environment:
    """Return the world that `config` alone describes, met at MASTER_ADDR."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    size = config.world_size
    if not host or not port.isdigit():
        raise PlatformError.because(
            f"DDPConfig(rank={config.rank}, world_size={size}) in a plain process",
            "no launcher started this process, and no MASTER_ADDR and MASTER_PORT say where the "
            "ranks meet",
            hint=f"unisono.run(train, ranks={size}), or unisono run --ranks {size} script.py",
        )
    is_local = host in ("localhost", "127.0.0.1", "::1")
    return Environment(
        kind="torchrun",
        rank=config.rank,
        size=size,
        local_rank=config.rank,
        local_size=size if is_local else 1,
        nodes=1 if is_local else size,
        master=(host, int(port)),
    )


def _on_backend(comm: Communicator, config: DDPConfig) -> Communicator:
    """Return the same ranks on the backend that was named, in a group of its own if need be."""
    wanted = {"mpi": "mpi4py"}.get(config.backend, config.backend)
    if wanted in ("auto", comm.backend) or comm.size == 1:
        return comm
    entry = groups.entry_for(comm.ranks, backend=wanted)
    device = _device_of(config, detect()) if wanted == cuda.BACKEND else torch.device("cpu")
    return Communicator(entry, device=device)


def _device_of(config: DDPConfig, environment: Environment) -> torch.device:
    """Return the device of this rank: with nccl, or an accelerator for all, one; else the CPU."""
    kind = cuda.NAME if config.backend == cuda.BACKEND else None
    if config.backend == "auto" and accelerator.count() >= environment.local_size > 0:
        kind = accelerator.kind()
    if kind is None:
        return torch.device("cpu")
    size, visible = max(environment.local_size, 1), accelerator.count(kind)
    if visible == 1 < size:  # that a scheduler has bound this rank to
        return torch.device(kind, 0)
    ids, place = config.device_ids or list(range(size)), environment.local_rank
    if len(ids) == environment.size > size:  # of ranks on several nodes
        ids, place, size = [ids[environment.rank]], 0, 1
    ids = ids[:size]
    if len(set(ids)) < size or not all(0 <= n < visible for n in ids):
        raise PlatformError.because(
            f"DDPConfig(device_ids={config.device_ids})",
            f"{visible} devices of the kind {kind!r}, and {size} ranks on this node, each of which "
            "needs one of its own",
            f"{len(set(ids).intersection(range(visible)))} of {size}",
            f"device_ids={list(range(size))}" if size <= visible else 'backend="gloo"',
        )
    return torch.device(kind, ids[place])

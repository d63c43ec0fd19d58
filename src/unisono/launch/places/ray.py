"""Ranks as actors of a Ray cluster: a placement group, one actor for each rank.

    python -m unisono.launch.places.ray DIRECTORY ATTEMPT

This program, started by the launcher, is the driver that Ray knows: what it has made ends with it,
however it ends. An actor has a rank's CPUs and GPUs, and is its `Host` (`mirror.py`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError
from unisono.launch import job_files
from unisono.launch.places.mailbox import NOTICE, REFUSED, Mailbox, Plan
from unisono.launch.places.mirror import (
    SILENT_S,
    Change,
    Host,
    Link,
    Lost,
    follow_all,
    on_copies,
    places_of,
)
from unisono.launch.places.program import LaunchedRanks
from unisono.launch.pool.protocol import Job

_SHARE_OF_START = 0.9
"""How much of the time for the start may pass until there is room for all ranks."""
_ASK_S = 0.2
_KNOCK_S = 10.0
_CLOSE_S = 10.0


def ray_ranks(job: Job, plan: Plan, attempt: int, **shown: Any) -> LaunchedRanks:
    """Return the ranks of a job as actors of a Ray cluster; see `on_copies`."""
    platform = job.platform
    per_node = platform.ranks_per_node
    entry = {
        "init": {**_session_here(), **(platform.ray_init or {})},
        "need": {"CPU": platform.cpus_per_rank, "GPU": platform.n_gpus_per_node / per_node},
        "nodes": platform.n_nodes if platform.is_explicit("n_nodes") else None,
    }
    return on_copies(job, plan, attempt, entry, **shown)


def _session_here() -> dict[str, Any]:
    """Return how to join the cluster that this process has joined, if it has."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    return {"address": context.gcs_address, "runtime_env": dict(context.runtime_env)}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the ranks of a run need of a cluster."""

    size: int
    """How many there are."""
    need: Mapping[str, float]
    """Of what each needs how much, as Ray names it."""
    nodes: int | None = None
    """On how many nodes, as many on each; None packs them wherever there is room."""

    @property
    def per_bundle(self) -> int:
        """How many ranks stay together whatever happens."""
        return 1 if self.nodes is None else self.size // self.nodes

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of a placement group."""
        bundle = {name: n * self.per_bundle for name, n in self.need.items()}
        return [bundle] * (self.size // self.per_bundle)

    def __str__(self) -> str:
        each = " and ".join(f"{n:g} {name}" for name, n in self.need.items())
        spread = f" on {self.nodes} nodes" if self.nodes else ""
        return f"{self.size} ranks with {each} each{spread}"

    def has_room(self, nodes: Sequence[Mapping[str, float]]) -> bool:
        """Whether ranks fit on nodes that have so much."""
        rooms = self._rooms(nodes)
        if self.nodes is None:
            return sum(rooms) >= self.size
        return sum(room >= self.per_bundle for room in rooms) >= self.nodes

    def refusal(self, nodes: Sequence[Mapping[str, float]], has: str) -> Exception:
        """Return the error for a cluster whose nodes have so much, with the arithmetic."""
        totals = [
            f"{name}: {self.size} x {n:g} = {self.size * n:g} needed, it {has} "
            + " + ".join(f"{node.get(name, 0):g}" for node in nodes)
            for name, n in self.need.items()
        ]
        rooms = " + ".join(map(str, self._rooms(nodes)))
        return PlatformError.because(
            f'on="ray": {self}',
            f"a cluster that {has} room for {rooms} ranks",
            "; ".join(totals),
            "fewer ranks, n_cpus_per_node= for all ranks of a node, or more nodes (ray status)",
        )

    def _rooms(self, nodes: Sequence[Mapping[str, float]]) -> list[int]:
        """Return how many ranks fit on each node."""
        return [int(min(node.get(k, 0) / n + 1e-6 for k, n in self.need.items())) for node in nodes]


class Cluster:
    """The cluster as the driver of one attempt sees it."""

    def __init__(self, directory: Path, entry: Mapping[str, Any]) -> None:
        import ray

        self._ray = ray
        self._dir = directory
        self._plan = entry["plan"]
        need = {name: n for name, n in entry["ray"]["need"].items() if n}
        self._wanted = Wanted(size=self._plan["ranks"], need=need, nodes=entry["ray"]["nodes"])
        self._group: Any = None
        self._join(dict(entry["ray"]["init"]))

    def _join(self, init: dict[str, Any]) -> None:
        """Join a cluster as `ray.init` does: the one that is named, else that of this host.

        Where there is none, one is started here that ends with the run.
        """
        asked = init.get("address") or os.environ.get("RAY_ADDRESS")
        init = {"log_to_driver": False, "logging_level": logging.WARNING, **init}
        try:
            address = asked or _running_here(init.get("_temp_dir")) or "local"
            if address == "auto" and not (address := _running_here(init.get("_temp_dir"))):
                raise ConnectionError("no cluster runs on this host")
            if address != "local":
                _knock(address)
                self._ray.init(**{**init, "address": address})
                return
        except (OSError, RuntimeError, ValueError) as error:
            raise PlatformError.because(
                f'on="ray" with the cluster at {asked or "this host"}',
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
                None,
                'ray status; RAY_ADDRESS, or ray_init={"address": "host:6379"}, names a cluster',
            ) from error
        cpus = max(os.cpu_count() or 1, self._wanted.size * self._wanted.need["CPU"])
        own = {"num_cpus": cpus, "include_dashboard": False}
        self._ray.init(**{**own, **init, "address": "local"})
        self._tell("no Ray cluster is running here; a local one was started for this run")

    def _tell(self, line: str) -> None:
        with (self._dir / NOTICE).open("a", encoding="utf-8") as file:
            file.write(f"unisono: {line}\n")

    def reserve(self) -> list[tuple[int, str]]:
        """Make a placement group, and return bundle and node of every rank, in order of the nodes.

        Waits while others use what the cluster has.
        """
        from ray.util import placement_group_table
        from ray.util.placement_group import placement_group

        wanted = self._wanted
        totals = [node["Resources"] for node in self._alive()]
        if not wanted.has_room(totals):
            raise wanted.refusal(totals, "has")
        strategy = "PACK" if wanted.nodes is None else "STRICT_SPREAD"
        name = f"unisono-{self._plan['run_id']}"
        self._group = placement_group(wanted.bundles, strategy=strategy, name=name)
        began, is_told = time.monotonic(), False
        while not self._group.wait(_ASK_S):
            waited_s = time.monotonic() - began
            if waited_s > _SHARE_OF_START * self._plan["start_timeout_s"]:
                raise wanted.refusal([self._ray.available_resources()], "has free")
            if waited_s > 2.0 and not is_told:
                is_told = True
                self._tell(f"waiting for room in the cluster: {wanted}")
        table = placement_group_table(self._group)["bundles_to_node_id"]
        bundles = sorted(table, key=lambda number: (table[number], number))
        return [(number, table[number]) for number in bundles for _ in range(wanted.per_bundle)]

    def start(self, places: Sequence[tuple[int, str]], attempt: int, cwd: str) -> list[Actor]:
        """Start the actors of all ranks, each in its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._alive()}
        kind = self._ray.remote(Host)
        actors: list[Actor] = []
        told = places_of([node for _, node in places], defaultdict(str, names))
        for place, (bundle, _) in zip(told, places, strict=True):
            handle = kind.options(
                name=f"unisono-{self._plan['run_id']}-rank-{place['rank']}",
                num_cpus=self._wanted.need["CPU"],
                num_gpus=self._wanted.need.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=bundle
                ),
            ).remote(attempt, [place], cwd)
            actors.append(Actor(self._ray, handle, place, self._plan["start_timeout_s"]))
        return actors

    def leave(self) -> None:
        """Give back what was reserved, and leave; a local cluster ends with this."""
        from ray.util import remove_placement_group

        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)
        self._ray.shutdown()

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]


def _running_here(temporary: str | None) -> str | None:
    """Return the address of the cluster of this host, if one runs.

    A cluster that was killed leaves its address in a file, at which Ray would knock for minutes.
    """
    from ray._private.services import canonicalize_bootstrap_address  # as ray.init; none is public

    with suppress(OSError):
        if address := canonicalize_bootstrap_address("auto", temporary):
            _knock(address)
            return address
    return None


def _knock(address: str) -> None:
    """Raise `OSError` where nobody listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


class Actor(Link):
    """The link to the actor of one rank."""

    hint = "ray status, ray list actors; the host may be out of memory, or gone"

    def __init__(
        self, ray: Any, handle: Any, place: Mapping[str, Any], start_timeout_s: float
    ) -> None:
        super().__init__([place], start_timeout_s)
        self._ray = ray
        self._handle = handle

    def exchange(self, changes: Sequence[Change]) -> tuple[list[Change], bool]:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(self._handle.exchange.remote(changes), timeout=self.limit_s)
        except errors.GetTimeoutError:
            raise Lost(f"was lost: its Ray actor gave no word for {self.limit_s:g} s") from None
        except errors.RayError as error:
            raise Lost(f"was lost: {_words(error)}") from None
        self.has_answered, self.limit_s = True, SILENT_S
        return answer

    def abort(self) -> None:
        with suppress(Exception):
            self._ray.kill(self._handle)

    def close(self) -> None:
        with suppress(Exception):
            self._ray.get(self._handle.close.remote(), timeout=_CLOSE_S)
        with suppress(Exception):
            self._ray.kill(self._handle)


def _words(error: Exception) -> str:
    """Return what Ray says of an error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    known = [line for line in lines if "cause" in line.lower() or "reason" in line.lower()]
    words = (known or lines or ["no word"])[0]
    return f"{type(error).__name__}: {textwrap.shorten(words, 200)}"


def main(directory: Path, attempt: int) -> int:
    """Be the driver of one attempt."""
    entry = job_files.read_state(directory)
    cluster = None
    try:
        with _ends_when_told(Mailbox(directory, attempt)):
            cluster = Cluster(directory, entry)
            places = cluster.reserve()
        follow_all(directory, attempt, cluster.start(places, attempt, entry["cwd"]))
    except PlatformError as error:
        job_files.write_private(directory / REFUSED, str(error).encode())
        return 1
    finally:
        if cluster is not None:
            cluster.leave()
    return 0


@contextmanager
def _ends_when_told(mail: Mailbox) -> Iterator[None]:
    """End this process inside the block on an order to stop, or when who started it has gone.

    Ray hears nothing while it starts or joins a cluster. What it has begun ends with the process.
    """
    launcher, is_over = os.getppid(), threading.Event()

    def listen() -> None:
        while not is_over.wait(_ASK_S):
            is_told = any("stop" in order or "interrupt" in order for order in mail.new_orders())
            if is_told or os.getppid() != launcher:
                os._exit(0)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))

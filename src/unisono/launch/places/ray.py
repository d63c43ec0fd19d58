"""Ranks as actors of a Ray cluster: a placement group, and one actor for each rank.

This process is the driver, from the first run until it ends. The process of an actor is the agent
of its rank, and has the CPUs and GPUs of that rank.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unisono.environment import Environment
from unisono.errors import PlatformError
from unisono.launch.logs import Console
from unisono.launch.places.agent import Agent, Invitation
from unisono.launch.places.agents import AgentRanks
from unisono.launch.pool.protocol import RankJob, RunPlan
from unisono.launch.pool.surroundings import for_other_hosts

_LOOK_S = 0.2
"""Seconds between two looks at a placement group that is not there yet."""
_NOTICE_S = 2.0
"""Time until the user is told that the run waits for room."""
_REACH_S = 10.0
"""Longest wait for a cluster to accept a connection."""
_LAST_WORDS_S = 0.25
"""How long the messages of an agent may be on their way after Ray has told of its end."""
_DEBUGGER = "PYTHONBREAKPOINT"
"""Ray points it to a debugger of its own, which works in its own workers alone."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the ranks of a run need of a cluster."""

    size: int
    """How many there are."""
    need: Mapping[str, float]
    """Resources of one rank, as Ray names them."""
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

    def check(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Raise `PlatformError` with the arithmetic if nodes with these resources are too small."""
        need = self.need.items()
        rooms = [int(min(node.get(name, 0) / n + 1e-6 for name, n in need)) for node in nodes]
        most = self.size if self.nodes is None else 1  # bundles of a node
        if sum(min(most, room // self.per_bundle) for room in rooms) < len(self.bundles):
            totals = [
                f"{name}: {self.size} x {n:g} = {self.size * n:g} needed, it has "
                + " + ".join(f"{node.get(name, 0):g}" for node in nodes)
                for name, n in need
            ]
            raise PlatformError.because(
                f'on="ray": {self}',
                f"a cluster that has room for {' + '.join(map(str, rooms))} ranks",
                "; ".join(totals),
                "fewer ranks, n_cpus_per_node= for all ranks of a node, or more nodes (ray status)",
            )


_connecting = threading.Lock()
_init_of_driver: Mapping[str, Any] | None = None
"""What this process was made a driver with; None: it is none, or the user's own."""


def connect(init: Mapping[str, Any], cpus: float, timeout_s: float) -> bool:
    """Make this process a driver of Ray, until it ends; return whether a cluster was started.

    Args:
        init: arguments of `ray.init`.
        cpus: of a cluster that has to be started, at least.
        timeout_s: how long that may take.
    """
    global _init_of_driver
    import ray

    with _connecting:
        if ray.is_initialized():
            if init in ({}, {"address": "auto"}, _init_of_driver):
                return False
            raise PlatformError.because(
                f'on="ray" with ray_init={dict(init)}',
                "this process is a driver of Ray already",
                None,
                "no ray_init, which uses its cluster; or ray.shutdown() before",
            )
        started: Future[bool] = Future()
        words = {"num_cpus": cpus, **init}, started
        threading.Thread(target=_be_driver, name="unisono-ray", args=words, daemon=True).start()
        try:
            is_new = started.result(timeout_s)
        except (OSError, RuntimeError, ValueError, TimeoutError) as error:
            place = init.get("address") or os.environ.get("RAY_ADDRESS") or "this host"
            text = str(error) or f"no answer within start_timeout_s={timeout_s:g}"
            raise PlatformError.because(
                f'on="ray" with the cluster at {place}',
                f"{type(error).__name__}: {text.splitlines()[0]}",
                None,
                'ray status; RAY_ADDRESS, or ray_init={"address": "host:6379"}, names a cluster',
            ) from error
        _init_of_driver = dict(init)
        return is_new


def _be_driver(init: dict[str, Any], started: Future[bool]) -> None:
    """Connect to a cluster, and stay: one that Ray starts here ends with the thread that did it.

    Nor does Ray set signal handlers where it is initialised in a thread.
    """
    import ray

    hook, debugger = sys.excepthook, os.environ.get(_DEBUGGER)  # Ray changes both
    logging.getLogger("ray").setLevel(logging.ERROR)  # else it warns of this thread
    try:
        address = _address(init)
        is_new = address == "local"
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, **init}
        options["address"] = address
        if is_new:
            options.setdefault("include_dashboard", False)
        else:
            del options["num_cpus"]
        ray.init(**options)
        sys.excepthook = hook
        os.environ.pop(_DEBUGGER, None)
        if debugger is not None:
            os.environ[_DEBUGGER] = debugger
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(is_new)
    threading.Event().wait()


def _address(init: Mapping[str, Any]) -> str:
    """Return the address at which `ray.init` finds a cluster, or "local", which starts one.

    A cluster that was killed leaves its address in a file, and Ray would try it for a minute, then
    end this process.
    """
    from ray._private.services import canonicalize_bootstrap_address  # no public function does

    requested = init.get("address") or os.environ.get("RAY_ADDRESS")
    address = requested
    if requested in (None, "auto"):
        address = canonicalize_bootstrap_address("auto", init.get("_temp_dir")) or requested
    host, colon, port = (address or "local").rpartition(":")
    try:
        if colon and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError:
        if requested is not None:
            raise
        return "local"
    return address or "local"


class RankActor:
    """The actor of one rank: its process is the agent."""

    def watch(self, invitation: str, place: Environment) -> None:
        """Start the rank and stay until it has ended.

        Args:
            invitation: where the supervisor is, and the key of the run.
            place: of the rank.
        """
        environment = {name: v for name, v in os.environ.items() if name != _DEBUGGER}
        Agent(Invitation.read(invitation), place, "", environment).run()


class RayRanks(AgentRanks):
    """The ranks of one attempt in a Ray cluster."""

    hint = "ray status, ray list actors; the host may be out of memory, or gone"

    def __init__(
        self, job: RankJob, plan: RunPlan, attempt: int, *, console: Console, **kept: Any
    ) -> None:
        platform = job.platform
        gpus = platform.n_gpus_per_node / platform.ranks_per_node
        need: dict[str, float] = {"CPU": platform.cpus_per_rank, "GPU": gpus}
        self._demand = Demand(
            size=plan.ranks,
            need={name: n for name, n in need.items() if n},
            nodes=platform.n_nodes if platform.is_explicit("n_nodes") else None,
        )
        self._shows = console.shows_any
        self._actors: dict[int, Any] = {}
        """The actor of each rank, as long as it runs."""
        self._spots: dict[int, tuple[Environment, int]] = {}
        """The place of each rank, and its bundle."""
        self._count = 0
        self._ended: deque[tuple[int, Any, BaseException | None]] = deque()
        self._group: Any = None
        self._notice_at = 0.0
        cpus = max(os.cpu_count() or 1, plan.ranks * platform.cpus_per_rank)
        if connect(platform.ray_init or {}, cpus, plan.start_timeout_s):
            self._say("no Ray cluster is running here; a local one was started")
        import ray

        self._ray: Any = ray
        here = ray.util.get_node_ip_address()
        is_one_host = all(node["NodeManagerAddress"] == here for node in self._nodes())
        # Variables of this process stay here, but for those that are meant for ranks.
        variables = {**for_other_hosts(job.setting.environment), **plan.env}
        super().__init__(
            replace(job, setting=replace(job.setting, environment={})),
            replace(plan, env=variables),
            attempt,
            console=console,
            address=platform.master_addr or (None if is_one_host else here),
            **kept,
        )

    def start(self) -> None:
        """Ask for room; `wait` starts the actors when it is there."""
        from ray.util.placement_group import placement_group

        self._demand.check([node["Resources"] for node in self._nodes()])
        strategy = "PACK" if self._demand.nodes is None else "STRICT_SPREAD"
        name = f"unisono-{self._plan.run_id}"
        self._group = placement_group(self._demand.bundles, strategy=strategy, name=name)
        self._notice_at = time.monotonic() + _NOTICE_S

    def wait(self, timeout_s: float | None) -> bool:
        if self._group is not None and not self._spots and not self._start_actors():
            timeout_s = _LOOK_S if timeout_s is None else min(_LOOK_S, timeout_s)
        is_news = super().wait(timeout_s)
        while self._ended:
            rank, actor, error = self._ended.popleft()
            if self._actors.get(rank) is not actor:  # another one has taken its place
                continue
            del self._actors[rank]
            seat = self._seats[rank]
            if error is not None and not seat.is_over:
                seat.why_lost, seat.left_at = f"was lost: {_words(error)}", time.time()
                seat.lost_at = time.monotonic() + _LAST_WORDS_S
        return is_news

    def starter_has_ended(self) -> bool:
        return bool(self._spots) and not self._actors

    def end_agents(self) -> None:
        if self._group is not None and self._ray.is_initialized():  # else each call would do that
            from ray.util import remove_placement_group

            for actor in self._actors.values():
                with suppress(Exception):
                    self._ray.kill(actor)
            with suppress(Exception):
                remove_placement_group(self._group)
        self._group = None

    def start_agent(self, rank: int) -> bool:
        """Start the actor of a rank, or another one where it is lost: Ray finds room for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place, bundle = self._spots[rank]
        if (lost := self._actors.get(rank)) is not None:  # it may be alive, and only out of reach
            self._ray.kill(lost)
        kind = self._ray.remote(RankActor)
        actor = self._actors[rank] = kind.options(
            name=f"unisono-{self._plan.run_id}-{self._attempt}-rank-{rank}-{self._count}",
            num_cpus=self._demand.need["CPU"],
            num_gpus=self._demand.need.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        ).remote()
        self._count += 1
        watch = actor.watch.remote(str(self.invitation), place)
        watch.future().add_done_callback(partial(self._note_end, rank, actor))
        return True

    def _start_actors(self) -> bool:
        """Start the actors of all ranks, in order of the nodes; return whether there is room."""
        from ray.util import placement_group_table

        if not self._ray.is_initialized():
            raise PlatformError.because(
                f'on="ray": {self._demand}',
                "ray.shutdown() was called in this process while they were started",
            )
        nodes, table = self._nodes(), placement_group_table(self._group)
        if table["state"] != "CREATED":
            self._demand.check([node["Resources"] for node in nodes])  # one may have died meanwhile
            if time.monotonic() > self._notice_at:
                self._notice_at = float("inf")
                self._say(f"waiting for room in the cluster: {self._demand}")
            return False
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in nodes}
        by_node = sorted((node, bundle) for bundle, node in table["bundles_to_node_id"].items())
        spots = [spot for spot in by_node for _ in range(self._demand.per_bundle)]
        for place, (node, bundle) in zip(_places([node for node, _ in spots]), spots, strict=True):
            self._seats[place.rank].state.host = names.get(node, "")
            self._spots[place.rank] = place, bundle
            self.start_agent(place.rank)
        return True

    def _note_end(self, rank: int, actor: Any, watch: Future[None]) -> None:
        """Hear how an actor has ended, in a thread of Ray."""
        self._ended.append((rank, actor, watch.exception()))
        self.wake()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _say(self, line: str) -> None:
        if self._shows:
            print(f"unisono: {line}", file=sys.stderr, flush=True)


def _places(nodes: Sequence[str]) -> list[Environment]:
    """Return the places of ranks, whose nodes these are; ranks of a node are neighbours."""
    order = list(dict.fromkeys(nodes))
    return [
        Environment(
            kind="unisono",
            rank=rank,
            size=len(nodes),
            local_rank=rank - nodes.index(node),
            local_size=nodes.count(node),
            node=order.index(node),
            nodes=len(order),
        )
        for rank, node in enumerate(nodes)
    ]


def _words(error: BaseException) -> str:
    """Return what Ray says of the end of an actor, in one line."""
    cause = getattr(error, "cause", None) or error  # what the agent raised
    return f"{type(cause).__name__}: {textwrap.shorten(str(cause), 500)}"

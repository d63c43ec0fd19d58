"""Ranks as actors of a Ray cluster: a placement group, and one actor for each rank.

This process is the driver, and the process of an actor is the agent of its rank. An actor has the
CPUs and GPUs of its rank. What this process has begun in Ray ends with the run.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from unisono.environment import Environment
from unisono.errors import PlatformError
from unisono.launch.logs import Console
from unisono.launch.places.agent import CONNECT_S, Agent, Invitation, Line
from unisono.launch.places.agents import AgentRanks
from unisono.launch.pool.protocol import RankJob, RunPlan
from unisono.launch.pool.surroundings import for_other_hosts

_SHARE_OF_START = 0.9
"""How much of the time for the start may pass until there is room for all ranks."""
_ASK_S = 0.05
"""Seconds between two looks at a placement group that is not there yet."""
_TELL_S = 2.0
"""After so long the user learns that the run waits for room."""
_COUNT_S = 1.0
"""Seconds between two looks at the nodes while a run waits for room: some may have died."""
_KNOCK_S = 10.0
_CLOSE_S = 10.0
_LAST_WORDS_S = 0.25
"""How long the messages of an agent may be on their way after Ray has told of its end."""
_STATUS = 'ray status; RAY_ADDRESS, or ray_init={"address": "host:6379"}, names a cluster'
_DEBUGGER = "PYTHONBREAKPOINT"
"""Ray points it to a debugger of its own, which works in its own workers alone."""


@dataclass(frozen=True, kw_only=True)
class Demand:
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


class Session(threading.Thread):
    """This process as a driver of Ray, as long as runs need it.

    It is a thread because a cluster that Ray starts ends with the thread that has started it, and
    because Ray sets signal handlers where it is initialised in the main thread.

    Attributes:
        started_cluster: whether there was no cluster, and Ray has started one here.
    """

    _lock = threading.Lock()
    _latest: Session | None = None

    def __init__(self, init: Mapping[str, Any]) -> None:
        super().__init__(name="unisono-ray", daemon=True)
        self.started_cluster = False
        self._init = dict(init)
        self._runs = 0
        self._error: Exception | None = None
        self._is_joined, self._is_over = threading.Event(), threading.Event()

    @classmethod
    def enter(cls, init: Mapping[str, Any], cpus: float, timeout_s: float) -> Session | None:
        """Have this process be a driver, for one more run; None if the user has made it one.

        Args:
            init: arguments of `ray.init`.
            cpus: of a cluster that has to be started, at least.
            timeout_s: how long that may take.
        """
        with cls._lock:
            session = cls._latest
            if session is not None and session._runs == 0:
                session.join(timeout_s)
                session = None
            ray = sys.modules.get("ray")
            if session is None and ray is not None and ray.is_initialized():
                address = ray.get_runtime_context().gcs_address
                if init not in ({}, {"address": "auto"}, {"address": address}):
                    raise _another_driver(init, f"ray.init, with the cluster at {address}")
                return None
            if session is None:
                session = cls._latest = cls({"num_cpus": cpus, **init})
                session.start()
            elif session._init != {**session._init, **init}:
                raise _another_driver(init, "another run")
            session._runs += 1
        try:
            session._wait(timeout_s)
        except BaseException:
            session.leave()
            raise
        return session

    def leave(self) -> None:
        """Let go of Ray, for one run; the last one shuts it down."""
        with self._lock:
            self._runs -= 1
            is_last = self._runs == 0
        if is_last:
            self._is_over.set()
            if self._is_joined.is_set():  # else it ends as soon as Ray has started
                self.join(_CLOSE_S)

    def run(self) -> None:
        """Join a cluster, stay, and leave it."""
        with _as_it_was():
            import ray

            try:
                logging.getLogger("ray").setLevel(logging.ERROR)  # else it warns of this thread
                self._join_cluster(ray)
            except Exception as error:
                self._error = error
                self._is_over.set()
            self._is_joined.set()
            self._is_over.wait()
            with suppress(Exception):
                try:
                    ray.shutdown(wait_for_processes=True)
                except TypeError:  # before 2.50
                    ray.shutdown()

    def _wait(self, timeout_s: float) -> None:
        if not self._is_joined.wait(timeout_s):
            raise PlatformError.because(
                'on="ray": ray.init', f"no end within start_timeout_s={timeout_s:g}", None, _STATUS
            )
        if self._error is not None:
            raise self._error

    def _join_cluster(self, ray: Any) -> None:
        """Join a cluster as `ray.init` does: the one that is named, else that of this host.

        Where there is none, one is started here that ends with the session.
        """
        init = {"log_to_driver": False, "logging_level": logging.ERROR, **self._init}
        requested = init.get("address") or os.environ.get("RAY_ADDRESS")
        try:
            address = requested or _running_here(init.get("_temp_dir")) or "local"
            if address == "auto" and not (address := _running_here(init.get("_temp_dir"))):
                raise ConnectionError("no cluster runs on this host")
            if address == "local":
                init.setdefault("include_dashboard", False)
            else:
                _knock(address)
                init.pop("num_cpus")
            ray.init(**{**init, "address": address})
        except (OSError, RuntimeError, ValueError) as error:
            raise PlatformError.because(
                f'on="ray" with the cluster at {requested or "this host"}',
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
                None,
                _STATUS,
            ) from error
        self.started_cluster = address == "local"


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Undo after the block what Ray changes in this process: variables, hooks, the log level."""
    before, hook, had_faults = dict(os.environ), sys.excepthook, faulthandler.is_enabled()
    logger = logging.getLogger("ray")
    level = logger.level
    try:
        yield
    finally:
        sys.excepthook = hook
        logger.setLevel(level)
        if not had_faults:
            faulthandler.disable()
        for name in (*(name for name in os.environ if name.startswith("RAY_")), _DEBUGGER):
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def _another_driver(init: Mapping[str, Any], owner: str) -> Exception:
    return PlatformError.because(
        f'on="ray" with ray_init={dict(init)}',
        f"this process is a driver of Ray already, by {owner}",
        None,
        "no ray_init, which uses that one; or ray.shutdown() before",
    )


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
    """Raise `OSError` where no process listens: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


class RankActor:
    """The actor of one rank: its process is the agent."""

    def watch(self, invitation: str, place: Environment) -> None:
        """Start the rank and stay until it has ended.

        Args:
            invitation: where the supervisor is, and the key of the run.
            place: of the rank.
        """
        environment = {name: v for name, v in os.environ.items() if name != _DEBUGGER}
        line = Line(Invitation.read(invitation))
        line.connect(CONNECT_S)
        Agent(line, place, "", environment).run()


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
        self._actors: list[Any] = []
        self._spots: dict[int, tuple[Environment, int]] = {}
        """The place of each rank, and its bundle."""
        self._running: dict[int, int] = {}
        """Which actor each rank has, as long as it runs."""
        self._ended: deque[tuple[int, int, BaseException | None]] = deque()
        self._group: Any = None
        self._invitation = ""
        self._began = self._counted_at = time.monotonic()
        self._is_told = False
        cpus = max(os.cpu_count() or 1, plan.ranks * platform.cpus_per_rank)
        self._session = Session.enter(platform.ray_init or {}, cpus, plan.start_timeout_s)
        try:
            import ray

            self._ray: Any = ray
            if self._session is not None and self._session.started_cluster:
                self._tell("no Ray cluster is running here; a local one was started for this run")
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
        except BaseException:
            self._leave()
            raise

    def start_agents(self, invitation: Invitation) -> None:
        """Ask for room; the actors are started when it is there."""
        from ray.util.placement_group import placement_group

        self._check_cluster()
        strategy = "PACK" if self._demand.nodes is None else "STRICT_SPREAD"
        name = f"unisono-{self._plan.run_id}"
        self._group = placement_group(self._demand.bundles, strategy=strategy, name=name)
        self._invitation = str(invitation)
        self._began = time.monotonic()

    def wait(self, timeout_s: float | None) -> bool:
        if self._group is not None and not self._actors and not self._start_actors():
            timeout_s = _ASK_S if timeout_s is None else min(_ASK_S, timeout_s)
        is_news = super().wait(timeout_s)
        while self._ended:
            self._note_end_of_actor(*self._ended.popleft())
        return is_news

    def starter_has_ended(self) -> bool:
        return bool(self._actors) and not self._running

    def end_agents(self) -> None:
        if self._group is not None and self._ray.is_initialized():  # else each call would do that
            from ray.util import remove_placement_group

            for actor in self._actors:
                with suppress(Exception):
                    self._ray.kill(actor)
            with suppress(Exception):
                remove_placement_group(self._group)
        self._group = None
        self._leave()

    def _check_cluster(self) -> None:
        """Raise if the nodes that are alive are too few or too small, whatever is in use."""
        totals = [node["Resources"] for node in self._nodes()]
        if not self._demand.has_room(totals):
            raise self._demand.refusal(totals, "has")
        self._counted_at = time.monotonic()

    def _leave(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.leave()

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _tell(self, line: str) -> None:
        if self._shows:
            print(f"unisono: {line}", file=sys.stderr, flush=True)

    def _start_actors(self) -> bool:
        """Start the actors of all ranks, in order of the nodes; return whether there is room."""
        from ray.util import placement_group_table

        if not self._ray.is_initialized():
            raise PlatformError.because(
                f'on="ray": {self._demand}',
                "ray.shutdown() was called in this process while they were started",
            )
        table = placement_group_table(self._group)
        if table["state"] != "CREATED":
            now = time.monotonic()
            waited_s = now - self._began
            if now > self._counted_at + _COUNT_S:
                self._check_cluster()  # else a run would wait for a node that has died meanwhile
            if waited_s > _SHARE_OF_START * self._plan.start_timeout_s:
                raise self._demand.refusal([self._ray.available_resources()], "has free")
            if waited_s > _TELL_S and not self._is_told:
                self._is_told = True
                self._tell(f"waiting for room in the cluster: {self._demand}")
            return False
        names = {node["NodeID"]: node["NodeManagerHostname"] for node in self._nodes()}
        by_node = sorted((node, bundle) for bundle, node in table["bundles_to_node_id"].items())
        spots = [spot for spot in by_node for _ in range(self._demand.per_bundle)]
        for place, (node, bundle) in zip(_places([node for node, _ in spots]), spots, strict=True):
            self._seats[place.rank].state.host = names.get(node, "")
            self._spots[place.rank] = place, bundle
            self.start_agent(place.rank)
        return True

    def start_agent(self, rank: int) -> bool:
        """Start the actor of a rank, or another one where it is lost: Ray finds room for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place, bundle = self._spots[rank]
        number = len(self._actors)
        if (lost := self._running.get(rank)) is not None:  # it may be alive, and only out of reach
            self._ray.kill(self._actors[lost])
        kind = self._ray.remote(RankActor)
        actor = kind.options(
            name=f"unisono-{self._plan.run_id}-{self._attempt}-rank-{rank}-{number}",
            num_cpus=self._demand.need["CPU"],
            num_gpus=self._demand.need.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=bundle
            ),
        ).remote()
        self._actors.append(actor)
        self._running[rank] = number
        watch = actor.watch.remote(self._invitation, place)
        watch.future().add_done_callback(partial(self._hear_of_end, rank, number))
        return True

    def _hear_of_end(self, rank: int, number: int, watch: Future[None]) -> None:
        """Hear how an actor has ended, in a thread of Ray."""
        self._ended.append((rank, number, watch.exception()))
        self.wake()

    def _note_end_of_actor(self, rank: int, number: int, error: BaseException | None) -> None:
        if self._running.get(rank) != number:  # another one has taken its place
            return
        del self._running[rank]
        seat = self._seats[rank]
        if error is None or seat.is_over:
            return
        seat.why_lost, seat.left_at = f"was lost: {_words(error)}", seat.left_at or time.time()
        if seat.channel is None:
            self.lost(seat)
        else:
            seat.lost_at = time.monotonic() + _LAST_WORDS_S


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
    if (cause := getattr(error, "cause", None)) is not None:  # what the agent raised
        return f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if "is dead because" in line or "reason" in line.lower()]
    words = (reasons or lines or ["no word"])[0]
    return f"{type(error).__name__}: {textwrap.shorten(words, 200)}"

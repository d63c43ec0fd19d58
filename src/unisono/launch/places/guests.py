"""Elastic trainings over several launchers: one invites, others join with ranks of their own.

The launcher that joins is the parent of its ranks, as an agent is: it forwards their messages to
the coordinator, and orders the other way, over one channel to the launcher that invited it. It
handles their function, output and results itself.
"""

from __future__ import annotations

import math
import socket
import time
from pathlib import Path
from typing import Any

from unisono.errors import PlatformError, RankFailed
from unisono.launch.channel import Broken, ControlChannel, Listener, new_key
from unisono.launch.elastic.policy import ElasticPolicy, ReplacingPolicy
from unisono.launch.places.agent import CONNECT_S, Invitation, Line
from unisono.launch.places.agents import HUNG_UP_S
from unisono.launch.pool.monitor import RankMonitor
from unisono.launch.pool.protocol import own_versions
from unisono.launch.supervisor import Ranks


class Guests:
    """The channels of launchers that have joined. Its descriptor tells when to call `turn`.

    Args:
        invitation_path: where to leave the invitation.
        address: where other hosts find this process.
        lost_after_s: how long a connection may be broken.
    """

    def __init__(self, invitation_path: Path, address: str, lost_after_s: float) -> None:
        key = new_key()
        self._listener = Listener(key, address)
        self._path = invitation_path
        self._invitation = Invitation(addresses=[address], port=self._listener.port, key=key.hex())
        self._lost_after_s = lost_after_s
        self._policy: ElasticPolicy
        self._names: dict[ControlChannel, str] = {}
        """A name for the memory of each launcher; "" before its first message."""
        self._ranks: dict[str, set[int]] = {}
        self._lost_at: dict[ControlChannel, float] = {}

    def start(self, policy: ElasticPolicy) -> None:
        """Write the invitation, and forward messages to the policy from now on."""
        self._policy = policy
        self._invitation.write(self._path)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `turn` has something to do."""
        return self._listener.fileno()

    def turn(self) -> bool:
        """Handle new connections and messages."""
        for channel, news in self._listener.news():
            if news is None:
                self._lost_at.pop(channel, None)
                self._names.setdefault(channel, "")
            elif isinstance(news, Broken):
                limit_s = min(self._lost_after_s, HUNG_UP_S[1] if news.was_closed else math.inf)
                self._lost_at[channel] = time.monotonic() + limit_s
            else:
                for message in news:
                    self._take(channel, message)
        self._listener.prepare()
        return True

    def look(self) -> None:
        """Give up launchers whose connection was broken for too long."""
        for channel, lost_at in list(self._lost_at.items()):
            if time.monotonic() > lost_at:
                self._forget(channel)

    def send(self, memory: str, message: dict[str, Any]) -> None:
        """Send the launcher with this memory a message."""
        for channel, name in self._names.items():
            if name == memory:
                channel.send(message)
        self._listener.prepare()

    def close(self) -> None:
        """Tell all launchers that the training is over, and release all resources."""
        for channel in self._names:
            channel.send({"over": True})
            channel.detach()
        self._listener.close()

    def _take(self, channel: ControlChannel, message: dict[str, Any]) -> None:
        memory = self._names[channel]
        if "versions" in message:
            if message["versions"] != own_versions():
                channel.send({"refused": own_versions()})
                return
            # Two launchers may be on hosts of one name.
            memory = f"{message['host']} {len(self._names)}"
            self._names[channel], self._ranks[memory] = memory, set()
        elif "elastic" in message:
            self._ranks[memory].add(message["rank"])
            self._policy.take(memory, message["rank"], message["elastic"], is_guest=True)
        elif "ended" in message:
            self._ranks[memory].discard(message["ended"])
            self._policy.take_end(memory, message["ended"])
        elif "bye" in message:
            self._forget(channel)

    def _forget(self, channel: ControlChannel) -> None:
        """Handle the end of a launcher, and of its ranks with it."""
        self._lost_at.pop(channel, None)
        self._listener.forget(channel)
        channel.detach()
        memory = self._names.pop(channel)
        for rank in self._ranks.pop(memory, ()):
            self._policy.take_end(memory, rank)


class GuestPolicy(ReplacingPolicy):
    """Ranks of this launcher train with those of another one, which has the coordinator.

    Args:
        invitation: where that launcher is.
        most: number of ranks.
        lost_after_s: how long the connection may be broken.
        shows: whether to print what happens.
    """

    def __init__(
        self, invitation: Invitation, *, most: int, lost_after_s: float, shows: bool
    ) -> None:
        super().__init__(most=most, shows=shows)
        self._line = Line(invitation)
        self._channel = self._line.channel
        self._lost_after_s = lost_after_s
        self._invitation = invitation
        self._is_over = False
        self._step = 0
        self._fd = -1

    def start(self, ranks: Ranks) -> None:
        super().start(ranks)
        self._line.connect(CONNECT_S)
        self._channel.send({"versions": own_versions(), "host": socket.gethostname()})
        self._listen()
        if isinstance(ranks, RankMonitor):
            ranks.listen(self._line.fileno(), self._go_on_connected)

    def close(self) -> None:
        if self._channel.is_connected:
            self._channel.send({"bye": True})
        self._line.close()

    @property
    def is_over(self) -> bool:
        return self._is_over or bool(self._has_left)

    @property
    def target(self) -> int:
        return self._most

    @property
    def step(self) -> int:
        return self._step

    def is_alone(self) -> bool:
        return True

    def receive(self, rank: int, message: dict[str, Any]) -> None:
        """Forward a message of a rank."""
        if message["kind"] == "left":
            self._has_left.add(rank)
        self._channel.send({"rank": rank, "elastic": message})

    def lost(self, rank: int) -> None:
        self._channel.send({"ended": rank})

    def look(self) -> None:
        """Handle ranks that died, and messages of the other launcher."""
        if self._is_settled:
            return
        self._channel.flush()
        if self._line.is_lost and not self._has_left:
            at = f"{self._invitation.addresses[0]}:{self._invitation.port}"
            raise RankFailed(
                f"the launcher at {at}, which has the coordinator of this elastic training, "
                f"is gone, or was away for more than {self._lost_after_s:g} s"
            )
        super().look()
        if self._is_over and not self._ranks.states and not self._has_left:
            raise PlatformError.because(
                "unisono run --join FILE",
                "the training was over before a rank of this launcher could take part in it",
            )

    def _listen(self) -> None:
        if isinstance(self._ranks, RankMonitor):
            self._fd = self._channel.fileno()
            self._ranks.listen(self._fd, self._hear)

    def _hear(self) -> bool:
        self._channel.flush()
        try:
            messages = self._channel.receive()
        except Broken:
            if not self._is_settled:  # else the other launcher may be at its end, too
                self._line.reconnect(self._lost_after_s)
            return False
        for message in messages:
            self._obey(message)
        return True

    def _go_on_connected(self) -> bool:
        if self._line.reconnected():
            self._listen()
        return True

    def _obey(self, message: dict[str, Any]) -> None:
        if "order" in message:
            self._step = message["order"].get("step", self._step)
            self._ranks.order_rank(message["rank"], elastic=message["order"])
        elif "kill" in message:
            self._ranks.end_rank(message["rank"], at_once=True)
        elif "retire" in message:
            self._is_over = True
            self.retire(message["rank"])
        elif "over" in message:
            self._is_over = True
        elif "refused" in message:
            ours, other = own_versions(), message["refused"]
            raise PlatformError.because(
                f"unisono run --join FILE with Python {ours[0]} and unisono {ours[1]}",
                f"the launcher that invites has Python {other[0]} and unisono {other[1]}",
                None,
                "the same environment on all hosts",
            )

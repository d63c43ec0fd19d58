"""Two hosts without a second machine: network namespaces with own names, addresses and hosts files.

A process there sees one cable, its own loopback and its own host name, so whoever takes localhost
for a meeting point is alone. Needs root and iproute2; `UNISONO_REQUIRE=netns` makes that a failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

_ENTER = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" /etc/nsswitch.conf &&
shift 3 && exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """One of the two hosts."""

    name: str
    address: str
    namespace: str
    folder: Path

    def start(self, *words, env=None, hosts="rich") -> subprocess.Popen[str]:
        """Start a command there, the leader of its own process group.

        The `"poor"` hosts file knows localhost only, not even the own host name.
        """
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts"]
        tables = [str(self.folder / hosts), str(self.folder / "nsswitch")]
        return subprocess.Popen(
            [*enter, "sh", "-c", _ENTER, "sh", self.name, *tables, *map(str, words)],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )


@dataclass(frozen=True)
class Lab:
    """Two hosts joined by one cable."""

    a: Host
    b: Host

    def finish(self, processes, *, timeout_s=90.0) -> list[tuple[int, str]]:
        """Return exit code and output of each; whatever happens, no process is left."""
        try:
            texts = [process.communicate(timeout=timeout_s)[0] for process in processes]
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
                process.stdout.close()
        return [(p.returncode, text) for p, text in zip(processes, texts, strict=True)]


def _reason_against() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "two hosts need root on Linux"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    return f"two hosts need {', '.join(missing)} (iproute2, util-linux)" if missing else None


def _give_up(reason: str) -> None:
    if "netns" in os.environ.get("UNISONO_REQUIRE", "").split(","):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """Two hosts, `a` and `b`; removed when the tests are over."""
    os.environ["PATH"] = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if (reason := _reason_against()) is not None:
        _give_up(reason)
    folder = tmp_path_factory.mktemp("hosts")
    folder.chmod(0o755)
    mark = f"unisono-{os.getpid()}"
    names = [f"{mark}-a", f"{mark}-b"]
    (folder / "nsswitch").write_text("hosts: files\n")  # there is no name server to wait for
    (folder / "poor").write_text("127.0.0.1 localhost\n")
    (folder / "rich").write_text("127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            cable = ("eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0")
            ip("link", "add", *cable, "netns", names[1])
            for number, name in enumerate(names, 1):
                ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            _give_up(f"no network namespaces here: {error.stderr.strip()}")
        hosts = [
            Host(f"host-{letter}", f"10.77.0.{number}", name, folder)
            for number, (letter, name) in enumerate(zip("ab", names, strict=True), 1)
        ]
        yield Lab(*hosts)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

"""A real SLURM cluster of several nodes on this one host, for tests and to try things out.

    python tests/cluster/slurm_cluster.py 2    # up until Ctrl-C or TERM; prints what to export

Needs root, slurm-wlm and munge. All its state is in one directory, its daemons listen on ports
that were free, and exactly these processes are ended. With `namespaces` every node has its own
network, host name and address, so that "localhost as master" fails as on a real cluster.

Partitions: `debug` (default, pre-emptible with some seconds of grace), `urgent` (pre-empts it).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sinfo", "sbatch", "srun")
SBIN = "/usr/sbin:/sbin"
START_S = 60.0
_SUBNET = "10.78.0"


def why_not(*, namespaces: bool = False) -> str | None:
    """Say why no cluster can be started here; None if one can."""
    if os.getuid() != 0:
        return "a SLURM cluster can be started by root only"
    wanted = (*PROGRAMS, *(("ip", "nsenter", "unshare") if namespaces else ()))
    path = f"{os.environ.get('PATH', '')}:{SBIN}"
    missing = [name for name in wanted if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Cluster:
    """The daemons of one cluster. Use it as a context manager."""

    def __init__(
        self,
        nodes: int = 2,
        cpus: int = 2,
        gpus: int = 0,
        *,
        namespaces: bool = False,
        grace_s: int = 20,
    ) -> None:
        self.nodes = nodes
        self._cpus, self._gpus, self._grace_s = cpus, gpus, grace_s
        self._namespaces = namespaces
        self.dir = Path(tempfile.mkdtemp(prefix="unisono-slurm-"))
        self.conf = self.dir / "slurm.conf"
        self._daemons: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._made: list[list[str]] = []
        self._env = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "UNISONO"))},
            "PATH": f"{os.environ.get('PATH', '')}:{SBIN}",
            "SLURM_CONF": str(self.conf),
        }

    @property
    def variables(self) -> dict[str, str]:
        """What a process needs to use the cluster."""
        return {"SLURM_CONF": str(self.conf), "PATH": self._env["PATH"]}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *words: str) -> str:
        """Run one of SLURM's programs and return what it prints."""
        done = subprocess.run(
            words, env=self._env, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End the jobs, then the daemons, and remove every trace."""
        if len(self._daemons) > 1:
            with suppress(RuntimeError, subprocess.TimeoutExpired):
                if self.call("squeue", "--noheader").strip():
                    self.call("scancel", "--user=root")
                    self._wait_until(lambda: not self.call("squeue", "--noheader").strip(), 15)
        for number, limit_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            running = [daemon for _, daemon in reversed(self._daemons) if daemon.poll() is None]
            for daemon in running:
                daemon.send_signal(number)
            for daemon in running:
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(limit_s)
        for words in reversed(self._made):
            subprocess.run(words, capture_output=True, check=False)
        shutil.rmtree(self.dir, ignore_errors=True)

    # From here on: the start.

    def _start(self) -> None:
        for name in ("ctld", "log", "munge"):
            (self.dir / name).mkdir()
        self.dir.chmod(0o755)
        control = "127.0.0.1"
        if self._namespaces:
            control = f"{_SUBNET}.254"
            self._make_networks(control)
        self._start_munge()
        self._write_configuration(control)
        self._run("slurmctld", "slurmctld", "-D", "-c", "-f", str(self.conf))
        for number in range(1, self.nodes + 1):
            (self.dir / f"d.n{number}").mkdir()
            self._run(f"slurmd.n{number}", *self._slurmd(number))
        idle = "sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T"
        self._wait_until(lambda: self.call(*idle).split() == ["idle"] * self.nodes, START_S)

    def _run(self, name: str, *words: str) -> None:
        with (self.dir / "log" / f"{name}.out").open("wb") as output:
            daemon = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._daemons.append((name, daemon))

    def _wait_until(self, condition, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while True:
            with suppress(RuntimeError):
                if condition():
                    return
            ended = [name for name, daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > end:
                logs = [p.read_text(errors="replace")[-800:] for p in self.dir.glob("log/*.out")]
                raise RuntimeError(f"the cluster does not come up ({ended})\n" + "\n".join(logs))
            time.sleep(0.05)

    def _start_munge(self) -> None:
        """Start an authentication daemon with a key and a socket of its own."""
        munge = self.dir / "munge"
        key = munge / "key"
        key.write_bytes(os.urandom(256))
        key.chmod(0o400)
        self._run(
            "munged",
            *("munged", "--force", "--foreground", f"--key-file={key}", f"--socket={munge}/sock"),
            *(f"--{what}-file={munge}/{what}" for what in ("pid", "log", "seed")),
        )
        self._wait_until(lambda: self.call("munge", "-S", f"{munge}/sock", "-n"), START_S)

    def _write_configuration(self, control: str) -> None:
        ports = _free_ports(self.nodes + 1)
        host = socket.gethostname().partition(".")[0]
        names = ",".join(f"n{number}" for number in range(1, self.nodes + 1))
        lines = [
            "ClusterName=unisono",
            f"SlurmctldHost={host}({control})",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={self.dir}/munge/sock",
            "CredType=cred/munge",
            f"StateSaveLocation={self.dir}/ctld",
            f"SlurmdSpoolDir={self.dir}/d.%n",
            f"SlurmctldPidFile={self.dir}/slurmctld.pid",
            f"SlurmdPidFile={self.dir}/slurmd.%n.pid",
            f"SlurmctldLogFile={self.dir}/log/slurmctld.log",
            f"SlurmdLogFile={self.dir}/log/slurmd.%n.log",
            *_CONFIGURATION,
        ]
        for number in range(1, self.nodes + 1):
            address = f"{_SUBNET}.{number}" if self._namespaces else "127.0.0.1"
            gres = f" Gres=gpu:{self._gpus}" if self._gpus else ""
            lines.append(
                f"NodeName=n{number} NodeHostname={host} NodeAddr={address} Port={ports[number]} "
                f"CPUs={self._cpus} RealMemory=64000 State=UNKNOWN{gres}"
            )
        if self._gpus:
            lines.append("GresTypes=gpu")
            self._write_gpus(names)
        common = f"Nodes={names} MaxTime=60 State=UP"
        lines.append(
            f"PartitionName=debug {common} Default=YES OverSubscribe=NO PriorityTier=1 "
            f"GraceTime={self._grace_s} PreemptMode=REQUEUE"
        )
        lines.append(f"PartitionName=urgent {common} PriorityTier=10 PreemptMode=OFF")
        self.conf.write_text("\n".join(lines) + "\n")

    def _write_gpus(self, names: str) -> None:
        """Pretend to have GPUs: devices that nobody opens."""
        lines = []
        for number in range(self._gpus):
            device = self.dir / f"gpu{number}"
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
            lines.append(f"NodeName={names} Name=gpu File={device}")
        (self.dir / "gres.conf").write_text("\n".join(lines) + "\n")

    def _slurmd(self, number: int) -> list[str]:
        own = ["slurmd", "-D", "-N", f"n{number}", "-f", str(self.conf)]
        if not self._namespaces:
            return own
        # nsenter and not `ip netns exec`: that hides the control groups slurmd looks for.
        script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        network = f"--net=/run/netns/unisono-n{number}"
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, "sh"]
        return ["nsenter", network, *inside, f"n{number}", str(self.dir / "hosts"), *own]

    def _make_networks(self, control: str) -> None:
        """Give each node a network of its own, joined by a bridge."""

        def ip(*words: str, undo: list[str] | None = None) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True, env=self._env)
            if undo:
                self._made.append(["ip", *undo])

        bridge = "unisono0"
        ip("link", "add", bridge, "type", "bridge", undo=["link", "del", bridge])
        ip("addr", "add", f"{control}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        hosts = ["127.0.0.1 localhost", f"{control} {socket.gethostname()}"]
        for number in range(1, self.nodes + 1):
            space, link = f"unisono-n{number}", f"unisono-v{number}"
            ip("netns", "add", space, undo=["netns", "del", space])
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "addr", "add", f"{_SUBNET}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            hosts.append(f"{_SUBNET}.{number} n{number}")
        (self.dir / "hosts").write_text("\n".join(hosts) + "\n")


_CONFIGURATION = (
    "ProctrackType=proctrack/linuxproc",
    "TaskPlugin=task/none",
    "JobAcctGatherType=jobacct_gather/none",
    "AccountingStorageType=accounting_storage/none",
    "JobCompType=jobcomp/none",
    "MpiDefault=none",
    "SwitchType=switch/none",
    "SchedulerType=sched/backfill",
    "SelectType=select/cons_tres",
    "SelectTypeParameters=CR_CPU",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    # Pre-emption sends what the job asked for with --signal, so that it can save its work.
    "SlurmctldParameters=preempt_send_user_signal",
    "SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1",
    # A node may claim more CPUs and memory than this host has.
    "SlurmdParameters=config_overrides",
    "ReturnToService=2",
    "KillWait=5",
    "MinJobAge=3600",
    "InactiveLimit=0",
    "SlurmctldTimeout=30",
    "SlurmdTimeout=60",
    "JobRequeue=1",
)


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; daemons of SLURM cannot be given an open socket."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def main() -> None:
    """Keep a cluster up until Ctrl-C or TERM."""
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    if (reason := why_not()) is not None:
        sys.exit(f"not possible here: {reason}")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs ignore the first
        signal.signal(number, signal.default_int_handler)
    with Cluster(nodes, cpus=4) as cluster:
        print(cluster.call("sinfo"))
        print(f"export SLURM_CONF={cluster.conf}", flush=True)
        with suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()

"""A platform as a table for people."""

from __future__ import annotations

from unisono.launch.device import Device
from unisono.launch.platform import Platform


def platform_table(platform: Platform) -> str:
    """Return the facts of a platform, one a line; where ranks meet only if they do."""
    size, nodes = platform.world_size, platform.n_nodes
    per_rank = platform.cpus_per_rank
    rows: list[tuple[str, object]] = [
        ("name", platform.name),
        ("device", platform.kind.value),
        (
            "ranks",
            f"{size} ({platform.ranks_per_node} on each of {nodes} nodes)" if nodes > 1 else size,
        ),
        ("threads", f"{per_rank} each"),
        ("backend", platform.backend or "chosen by the device"),
        ("seed", "none" if platform.seed is None else platform.seed),
        ("groups", _groups(platform)),
    ]
    if platform.requires_ipc:
        addr = platform.master_addr or "decided at the start"
        port = "" if platform.master_port is None else f":{platform.master_port}"
        rows.append(("master", f"{platform.ipc_protocol}, {addr}{port}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def rank_table(platform: Platform, host: str) -> str:
    """Return one line for each rank: its node and its device."""
    per_node = platform.ranks_per_node
    lines = [f"{'rank':>4}  {'node':<16}  device"]
    for rank in range(platform.world_size):
        node, local_rank = divmod(rank, per_node)
        name = host if platform.n_nodes == 1 else f"node {node}"
        if platform.kind is Device.SLURM:  # not a device of this host
            device = f"cuda:{local_rank}" if platform.n_gpus_per_node else "cpu"
            name = f"node {node}"
        else:
            device = str(platform.torch_device(local_rank))
        lines.append(f"{rank:>4}  {name:<16}  {device}")
    return "\n".join(lines)


def _groups(platform: Platform) -> str:
    if platform.ipc_groups is None:
        return "none"
    if not platform.ipc_groups:
        return "all ranks together"
    return "; ".join(", ".join(map(str, group)) for group in platform.ipc_groups)

"""Public names that are gone, each with what to write instead, for one version.

The modules that had them ask this table in their `__getattr__`; so do the checks of places,
fields, options and variables. Nothing here imports torch.
"""

from __future__ import annotations

__all__ = ["REMOVED", "removed_name"]

_BY_MPI = 'on="mpi", hosts=["a", "b"]: mpiexec reaches the hosts by ssh'

REMOVED: dict[str, str] = {
    "unisono.Device.SSH": _BY_MPI,
    "unisono.Platform.ssh_args": f"{_BY_MPI}, with the options of ~/.ssh/config",
    "unisono.Platform.python": f"{_BY_MPI}, with the same Python on all of them",
    "unisono.Communicator.coalesce": (
        "flat = torch.cat([a.view(-1), b.view(-1)]); comm.all_reduce_(flat)"
    ),
    "unisono.Communicator.tune": "nothing: the size of a tensor decides how it travels",
    "UNISONO_ALGO": "nothing: the size of a tensor decides how it travels",
    "UNISONO_SHM_MAX_MB": "UNISONO_SHM_SLOT_KB=64, which makes groups smaller",
    "unisono.Communicator.is_single_host": "len(set(comm.hosts)) == 1",
    "unisono.data_parallel.PowerSGD": (
        "compression=functools.partial(powerSGD_hook, PowerSGDState(group, ...)), of torch"
    ),
    "unisono.graph_parallel.layout_check": "unisono.comm.check(), or UNISONO_CHECK=1",
    "unisono.graph_parallel.layout_of": "unisono.comm.check(), which compares values",
    "unisono.graph_parallel.mark": "unisono.comm.check(), which compares values",
    "unisono.graph_parallel.GraphBatchSampler": (
        "torch_geometric.loader.DynamicBatchSampler, with one seed for a row of ranks"
    ),
    "unisono.launch.functional": "unisono.compat.ddpw.functional",
    "unisono topo": "unisono run --dry-run for the ranks, unisono.topology.draw for their blocks",
    "unisono run --to": "runs/NAME/metrics.csv, which every tracker reads",
    "unisono run --script": "mpiexec or torchrun in the batch script: unisono.run joins its ranks",
    "unisono run --chaos": "kill -9 of a rank's process; os.kill(os.getpid(), 9) in the function",
    "unisono run --invite": 'on="ray" or on="slurm" with elastic=True; ray start joins hosts',
    "unisono run --join": 'on="ray" or on="slurm" with elastic=True; ray start joins hosts',
    "unisono bench --json": "unisono bench, whose tables are Markdown",
    "unisono trace --json": "the trace file itself, which is JSON",
    "unisono job list": "squeue --me",
    "unisono job resize": "job.resize(ranks) of the handle that unisono.submit returns",
    "unisono.nn.distribute": (
        "split(copy.deepcopy(net), partition, blocks=True), with equal weights on all ranks"
    ),
    "unisono.nn.plan_report": (
        "unisono.comm.trace around one step counts what was sent; unisono plan predicts times"
    ),
    "unisono.nn.Interpolate": (
        "unisono.nn.DistributedUpsample; own points alone: unisono.compat.distdl.nn.Interpolate"
    ),
    "unisono plan --algorithm": "nothing: the fastest one is predicted",
    "unisono plan --plot": "unisono plan --json for some numbers of ranks",
    "unisono.plan.Curve": "unisono.plan.compare for some clusters",
    "unisono.plan.Potential": "Subject(model, batch, graph=GraphInput(...)): a graph that is cut",
    "unisono.plan.scaling": "unisono.plan.compare for some clusters",
    "unisono.topology.Layout": "unisono.topology.RankGrid",
    "unisono.topology.Piece": "unisono.topology.HaloPiece",
    **{
        f"unisono.operators.{name}": f"unisono.operators.{name}Map; the layer is in unisono.nn"
        for name in (
            *("AllGather", "AllSumReduce", "Broadcast", "HaloAdd"),
            *("HaloExchange", "ReduceScatter", "Repartition", "SumReduce"),
        )
    },
    "unisono.Platform.submitter": "nothing: submitit submits every job",
}
"""What to write instead, by the dotted name, or by the words of a command."""


def removed_name(dotted: str) -> AttributeError:
    """Return the error of a name that is looked up in a module, or a class, without it.

    >>> print(removed_name("unisono.nothing"))
    'unisono' has no attribute 'nothing'
    >>> print(removed_name("unisono.Device.SSH").args[0].partition(";")[0])
    unisono.Device.SSH is gone
    """
    owner, _, name = dotted.rpartition(".")
    if dotted in REMOVED:
        return AttributeError(f"{dotted} is gone; write instead: {REMOVED[dotted]}", name=name)
    return AttributeError(f"{owner!r} has no attribute {name!r}", name=name)

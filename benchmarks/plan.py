"""The planner against the clock: predicted and measured training steps on 1, 2 and 4 ranks.

    python benchmarks/plan.py [--quick]

On each number of ranks four things take turns: steps without communication, sums over the links,
overlap, and real steps: data parallel, networks split in space, potentials split by atoms. The
first three calibrate the planner, which predicts the fourth. Four ranks share two cores here.
`unisono plan` finds the calibration, unless --quick.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

import split as networks
import torch
from harness import Row, interleaved, markdown, parser_for, publish
from torch import Tensor, nn

import graph_parallel
import unisono
from unisono import bayes
from unisono import graph_parallel as gp
from unisono.comm import Communicator
from unisono.cores import usable_cores
from unisono.data_parallel import DataParallel, DataParallelOptimizer
from unisono.nn import split
from unisono.plan import Calibration, Impossible, Prediction, Subject, Workload, calibrate, profile
from unisono.plan.calibration import (
    SIZES,
    TYPICAL,
    calibration_file,
    fit_link,
    group_over,
    hidden_share,
    overlapping,
    sums_over,
)
from unisono.plan.profile import played, step_of
from unisono.plan.subject import PRESETS, Potential
from unisono.plan.ways import bayes as predict_bayes
from unisono.plan.ways import data_parallel as predict_data_parallel
from unisono.plan.ways import graph as predict_graph
from unisono.plan.ways import grid_of
from unisono.plan.ways import spatial as predict_spatial
from unisono.topology import Partition


def unet() -> Subject:
    """Return a U-Net on one picture."""
    net = networks.UNet(channels=(8, 16, 32), inputs=4)
    return Subject(name="unet", model=net, batch=(torch.randn(1, 4, 192, 192),))


def mace() -> Subject:
    """Return a MACE on a crystal, trained on energy and forces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = graph_parallel.mace_model(4.0).train().requires_grad_(True)
    cell, pos = graph_parallel.crystal(4)
    potential = Potential(model, torch.full((len(pos),), 29), cell=cell)
    return Subject(name="mace", model=potential, batch=(pos[None],))


SUBJECTS = {**PRESETS, "unet": unet, "mace": mace}
REPLICATED = ("mlp", "cnn", "transformer", "bayes")
"""Whole models on each rank."""
SHARED = ("cnn", "unet", "potential", "mace")
"""Ranks share each sample, by space or by atoms."""
MODELS = tuple(dict.fromkeys((*REPLICATED, *SHARED)))
RANKS = (1, 2, 4)
WAYS = (("blocking", "shm"), ("blocking", "gloo"), ("non-blocking", "gloo"))
WITHIN = (0.75, 1.25)
Step = Callable[[], object]


def training_step(subject: Subject, mode: str, comm: Communicator) -> Step:
    """Return one step of this rank. Collective over `comm`."""
    model = subject.model
    if isinstance(model, bayes.Sequential):
        config = bayes.DDPConfig(
            device_ids=[], backend="auto", rank=comm.rank, world_size=comm.size
        )
        net = bayes.DDPSequential(model, config, comm=comm)
        updater = bayes.OutputUpdater(model.device)
        target = torch.zeros_like(torch.as_tensor(model(*subject.batch)[0]))

        def bayesian() -> None:
            net(*subject.batch)
            updater.update(net.output_z_buffer, target, 0.5, net.input_delta_z_buffer)
            net.backward()
            net.step()

        return bayesian
    optimizer = DataParallelOptimizer(subject.optimizer(model.parameters()))
    wrapped: nn.Module = DataParallel(model, comm, optimizer, mode == "blocking")

    def step() -> None:
        subject.loss(wrapped(*subject.batch)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def shared_step(subject: Subject, comm: Communicator) -> Step:
    """Return one step of this rank on its part of the batch. Collective over `comm`."""
    model, x = cast("nn.Module", subject.model), subject.batch[0]
    optimizer = subject.optimizer(model.parameters())
    if isinstance(model, Potential):
        groups, whole = gp.graph_groups(comm.size, backend="shm"), model.potential
        part = gp.GraphPartition.morton(x[0], comm.size)
        parts = gp.split_potential(whole.model, part, adapter=whole.adapter, comm=groups.gp)

        def output() -> Tensor:
            return model.read(parts, x[0])

    else:
        groups, partition = None, Partition(parts_of(subject, comm.size), comm=comm)
        net, own = split(model, partition), x[partition.local_slices(x.shape)].clone()

        def output() -> Tensor:
            return net(own)

    def step() -> None:
        subject.loss(output()).backward()
        if groups is not None:
            gp.sync_gradients(model, groups=groups)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def parts_of(subject: Subject, ranks: int) -> tuple[int, ...]:
    """Return how ranks share a sample."""
    is_potential = isinstance(subject.model, Potential)
    return (ranks,) if is_potential else (1, 1, *grid_of(ranks, subject.batch[0].shape[2:]))


def measure_shared(name: str, rounds: int) -> dict[tuple[object, ...], float]:
    """Return the medians of steps on parts, and of the same without communication, in turns."""
    torch.set_num_threads(1)
    comm = group_over("shm")
    torch.manual_seed(0)
    subject = SUBJECTS[name]()
    part = played(subject, parts_of(subject, comm.size), comm.rank)
    optimizer = subject.optimizer(cast("nn.Module", subject.model).parameters())

    def alone() -> None:
        part().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.manual_seed(0)
    cases = {"part": alone, "shared": shared_step(SUBJECTS[name](), comm)}
    found = interleaved(comm, cases, rounds=rounds)
    return {(case, name): seconds for case, seconds in found.items()}


def measure(names: list[str], rounds: int) -> dict[tuple[object, ...], float]:
    """Return the medians of everything, in turns; the slowest rank of a round counts."""
    torch.set_num_threads(1)
    comm = unisono.world()
    groups = {backend: group_over(backend) for backend in ("shm", "gloo")}
    cases: dict[tuple[object, ...], Step] = {}
    for name in names:
        torch.manual_seed(0)
        cases["step", name] = step_of(SUBJECTS[name]())
        for mode, backend in WAYS[: 2 if name == "bayes" else None]:
            torch.manual_seed(0)
            case = training_step(SUBJECTS[name](), mode, groups[backend])
            cases["way", name, mode, backend] = case
    if comm.size > 1:
        for backend, group in groups.items():
            cases |= {("sum", backend, n): add for n, add in sums_over(group).items()}
        parts = overlapping(groups["gloo"])
        cases |= {("overlap", i): part for i, part in enumerate(parts)}
    for case in cases.values():
        case()
    named = {str(key): case for key, case in cases.items()}
    found = interleaved(comm, named, rounds=rounds, repeats=3)
    return dict(zip(cases, found.values(), strict=True))


def calibration(
    measured: dict[int, dict[tuple[object, ...], float]], workloads: dict[str, Workload]
) -> Calibration:
    """Return what steps without communication, sums and overlap tell about this machine."""
    links = {}
    for backend, typical in TYPICAL.links.items():
        sums = {
            ranks: [(n, found["sum", backend, n]) for n in SIZES]
            for ranks, found in measured.items()
            if ranks > 1
        }
        links[backend] = fit_link(typical, sums)
    share = hidden_share(*(measured[2]["overlap", i] for i in range(3)))
    links["gloo"] = replace(links["gloo"], overlap=share)
    slowdown: dict[str, dict[int, float]] = {}
    for name, work in workloads.items():
        if name not in REPLICATED:
            continue
        alone = work.compute(SUBJECTS[name]().samples)
        slowdown[name] = {n: found["step", name] / alone for n, found in measured.items()}
    return replace(TYPICAL, cores=usable_cores(), links=links, slowdown=slowdown)


def predict(workload: Workload, machine: Calibration, ranks: int, mode: str, backend: str) -> float:
    """Return the predicted seconds of a step of whole models."""
    cluster = machine.here(ranks, link=backend, model=workload.name)
    batch = SUBJECTS[workload.name]().samples
    if workload.is_bayesian:
        return told(predict_bayes(workload, cluster, batch)).step_s
    blocking = mode == "blocking"
    return told(predict_data_parallel(workload, cluster, batch, blocking=blocking)).step_s


def predict_shared(workload: Workload, machine: Calibration, ranks: int, part_s: float) -> float:
    """Return the predicted seconds of a step on parts, of which those without messages are known.

    As with whole models, they tell how much ranks that compute at once slow each other down.
    """
    way = predict_spatial if workload.graph is None else predict_graph
    batch = SUBJECTS[workload.name]().samples / ranks
    alone = replace(machine.here(ranks), cores_per_node=None, slowdown={})
    factor = part_s / told(way(workload, alone, batch)).compute_s
    return told(way(workload, replace(machine.here(ranks), slowdown={ranks: factor}), batch)).step_s


def told(found: Prediction | Impossible) -> Prediction:
    """Return a prediction, which must be possible."""
    if not isinstance(found, Prediction):
        raise RuntimeError(found.reason)
    return found


def main() -> None:
    """Measure, calibrate, predict, compare."""
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    options = parser.parse_args()
    rounds = 3 if options.quick else 15
    names = [n for n in options.models if n != "mace" or find_spec("mace") is not None]
    replicated = [name for name in names if name in REPLICATED]
    measured = {
        ranks: unisono.run(measure, replicated, rounds, ranks=ranks, timeout_s=900)[0]
        for ranks in RANKS
    }
    workloads = {name: profile(SUBJECTS[name]()) for name in names}
    for name in names:
        for ranks in RANKS if name in SHARED else ():
            few = max(2, rounds // 3) if name == "mace" else rounds  # its steps take long
            found = unisono.run(measure_shared, name, few, ranks=ranks, timeout_s=900)[0]
            measured[ranks] = found | measured[ranks]
    machine = calibration(measured, workloads)
    rows: list[Row] = []
    low, high = WITHIN
    for ranks, found in measured.items():
        for (kind, *key), seconds in found.items():
            name = str(key[0])
            if kind == "shared":
                guess = predict_shared(workloads[name], machine, ranks, found["part", name])
                by = "in space" if workloads[name].graph is None else "by atoms"
                way = f"split {by}, {ranks} rank{'s' if ranks > 1 else ''}"
            elif kind == "way" and (ranks > 1 or key[1:] == [*WAYS[0]]):
                mode, backend = map(str, key[1:])
                guess = predict(workloads[name], machine, ranks, mode, backend)
                way = "alone" if ranks == 1 else f"{mode}, {backend}, {ranks} ranks"
            else:
                continue
            rows.append(Row(f"{name}: {way}", guess, seconds, "measured", high, at_least=low))
    text = f"Predicted over measured steps.\n\n{markdown(rows)}\n\nCalibration:\n\n"
    text += "\n".join(f"- {line}" for line in machine.describe().splitlines()[1:])
    publish("Planner", text, write=not options.quick)
    if not options.quick:
        calibrate([PRESETS[name] for name in ("mlp", "cnn")]).write(calibration_file())


if __name__ == "__main__":
    main()

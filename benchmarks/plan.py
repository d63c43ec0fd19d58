"""The planner against the clock: predicted and measured training steps on 1, 2 and 4 ranks.

    python benchmarks/plan.py [--quick]

On each number of ranks four things take turns: steps without communication, sums over the links,
overlap, and real steps of data parallel training. The first three calibrate the planner, which
predicts the fourth. Four ranks share two cores here.
`unisono plan` finds the calibration, unless --quick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from harness import Row, interleaved, markdown, parser_for, publish
from torch import nn

import unisono
from unisono import bayes
from unisono.comm import Communicator
from unisono.cores import usable_cores
from unisono.data_parallel import DataParallel, DataParallelOptimizer
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
from unisono.plan.profile import step_of
from unisono.plan.subject import PRESETS
from unisono.plan.ways import bayes as predict_bayes
from unisono.plan.ways import data_parallel as predict_data_parallel

MODELS = ("mlp", "cnn", "transformer", "bayes")
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


def measure(names: list[str], rounds: int) -> dict[tuple[object, ...], float]:
    """Return the medians of everything, in turns; the slowest rank of a round counts."""
    torch.set_num_threads(1)
    comm = unisono.world()
    groups = {backend: group_over(backend) for backend in ("shm", "gloo")}
    cases: dict[tuple[object, ...], Step] = {}
    for name in names:
        torch.manual_seed(0)
        cases["step", name] = step_of(PRESETS[name]())
        for mode, backend in WAYS[: 2 if name == "bayes" else None]:
            torch.manual_seed(0)
            case = training_step(PRESETS[name](), mode, groups[backend])
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


def calibration(measured: dict[int, dict[tuple[object, ...], float]]) -> Calibration:
    """Return what sums and overlap tell about this machine."""
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
    return replace(TYPICAL, cores=usable_cores(), links=links)


def slowdown(
    name: str, workload: Workload, measured: dict[int, dict[tuple[object, ...], float]]
) -> dict[int, float]:
    """Return how much longer a step without communication takes on ranks that compute at once."""
    alone = workload.compute(PRESETS[name]().samples)
    return {ranks: found["step", name] / alone for ranks, found in measured.items()}


def predict(workload: Workload, machine: Calibration, ranks: int, mode: str, backend: str) -> float:
    """Return the predicted seconds of a step of whole models."""
    cluster = machine.here(ranks, link=backend)
    batch = PRESETS[workload.name]().samples
    if workload.is_bayesian:
        return told(predict_bayes(workload, cluster, batch)).step_s
    blocking = mode == "blocking"
    return told(predict_data_parallel(workload, cluster, batch, blocking=blocking)).step_s


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
    names = options.models
    measured = {
        ranks: unisono.run(measure, names, rounds, ranks=ranks, timeout_s=900)[0] for ranks in RANKS
    }
    workloads = {name: profile(PRESETS[name]()) for name in names}
    machine = calibration(measured)
    machines = {
        name: replace(machine, slowdown=slowdown(name, work, measured))
        for name, work in workloads.items()
    }
    rows: list[Row] = []
    low, high = WITHIN
    for ranks, found in measured.items():
        for (kind, *key), seconds in found.items():
            name = str(key[0])
            if kind != "way" or (ranks == 1 and key[1:] != [*WAYS[0]]):
                continue
            mode, backend = map(str, key[1:])
            guess = predict(workloads[name], machines[name], ranks, mode, backend)
            way = "alone" if ranks == 1 else f"{mode}, {backend}, {ranks} ranks"
            rows.append(Row(f"{name}: {way}", guess, seconds, "measured", high, at_least=low))
    text = f"Predicted over measured steps.\n\n{markdown(rows)}\n\nCalibration:\n\n"
    text += "\n".join(f"- {line}" for line in machine.describe().splitlines()[1:])
    publish("Planner", text, write=not options.quick)
    if not options.quick:
        calibrate([PRESETS[name] for name in ("mlp", "cnn")]).write(calibration_file())


if __name__ == "__main__":
    main()

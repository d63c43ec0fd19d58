"""Whole training steps of Bayesian nets against the same architecture in torch.nn with SGD.

    python benchmarks/bayes.py [--pytagi PATH] [--rounds 25] [--no-write]

Reference: forward, sum of squares, backward and `SGD.step` in the same process, in turns with ours;
one torch thread. Times are the best of the rounds, except for ranks, where they are medians of the
slowest rank. PATH is a virtual environment of this Python with pytagi, whose LSTM is one more
reference; nothing is installed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import Row, interleaved, markdown, parser_for, publish
from peers import imported
from torch import nn

import unisono
from unisono import bayes
from unisono.comm import world

NOISE = 0.5


def bayesian_step(net, x, y, updater=None):
    updater = updater or bayes.OutputUpdater(net.device)

    def step():
        net(x)
        updater.update(net.output_z_buffer, y, NOISE, net.input_delta_z_buffer)
        net.backward()
        net.step()

    return step


def torch_step(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        (model(x) - y).square().sum().backward()
        optimizer.step()

    return step


def mlp(batch, sizes=(784, 256, 256, 10)):
    pairs = list(itertools.pairwise(sizes))
    ours: list[bayes.BaseLayer] = []
    theirs: list[nn.Module] = []
    for a, b in pairs:
        ours += [bayes.Linear(a, b), bayes.ReLU()]
        theirs += [nn.Linear(a, b), nn.ReLU()]
    x, y = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
    net, model = bayes.Sequential(*ours[:-1]), nn.Sequential(*theirs[:-1])
    return bayesian_step(net, x, y), torch_step(model, x, y)


def cnn(batch):
    net = bayes.Sequential(
        bayes.Conv2d(1, 16, 4, padding=1, in_width=28, in_height=28),
        bayes.ReLU(),
        bayes.AvgPool2d(3, 2),
        bayes.Conv2d(16, 32, 5),
        bayes.ReLU(),
        bayes.AvgPool2d(3, 2),
        bayes.Linear(512, 100),
        bayes.ReLU(),
        bayes.Linear(100, 11),
    )
    model = nn.Sequential(
        nn.Conv2d(1, 16, 4, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(3, 2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.AvgPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(512, 100),
        nn.ReLU(),
        nn.Linear(100, 11),
    )
    x, y = torch.randn(batch, 1, 28, 28), torch.randn(batch, 11)
    return bayesian_step(net, x, y), torch_step(model, x, y)


class TorchLSTM(nn.Module):
    """Two recurrent layers and a readout of all steps."""

    def __init__(self, steps):
        super().__init__()
        self.lstm, self.readout = nn.LSTM(1, 8, 2, batch_first=True), nn.Linear(8 * steps, 1)

    def forward(self, x):
        """Read out the hidden states of all steps."""
        return self.readout(self.lstm(x)[0].flatten(1))


def lstm(batch, steps=5):
    layers = bayes.LSTM(1, 8, steps), bayes.LSTM(8, 8, steps), bayes.Linear(8 * steps, 1)
    net = bayes.Sequential(*layers)
    x, y = torch.randn(batch, steps, 1), torch.randn(batch, 1)
    return bayesian_step(net, x, y), torch_step(TorchLSTM(steps), x, y)


def pytagi_lstm(pytagi, batch, steps):
    """Return a step of pytagi's own `lstm(batch, steps)`."""
    kinds = importlib.import_module("pytagi.nn")
    net = kinds.Sequential(
        kinds.LSTM(1, 8, steps), kinds.LSTM(8, 8, steps), kinds.Linear(8 * steps, 1)
    )
    net.set_threads(1)
    pytagi.manual_seed(0)
    updater = kinds.OutputUpdater(net.device)
    x, y = torch.randn(batch * steps).numpy(), torch.randn(batch).numpy()
    noise = torch.full((batch,), NOISE).numpy()

    def step():
        net(x)
        updater.update(net.output_z_buffer, y, noise, net.input_delta_z_buffer)
        net.backward()
        net.step()

    return step


def against_pytagi(path, rounds, clock):
    pytagi = imported("pytagi", path)
    if pytagi is None:
        return
    for batch, steps in ((10, 12), (64, 5)):
        ours, _ = lstm(batch, steps)
        candidates = [ours, pytagi_lstm(pytagi, batch, steps)]
        here, there = best_of(candidates, rounds, 10, clock)
        yield Row(f"LSTM of {steps} steps, batch {batch}, as pytagi", here, there, "pytagi", 2.0)


def best_of(candidates, rounds, repeats, clock):
    for run in candidates:
        run()
        run()
    best = [float("inf")] * len(candidates)
    for _ in range(rounds):
        for n, run in enumerate(candidates):
            start = clock()
            for _ in range(repeats):
                run()
            best[n] = min(best[n], (clock() - start) / repeats)
    return best


def one_process(rounds, clock):
    cases = [
        ("MLP 784-256-256-10, batch 16", mlp(16), 3.5, 10),
        ("MLP, batch 128", mlp(128), 2.8, 5),
        ("MLP, batch 512", mlp(512), 2.5, 2),
        ("CNN on 28x28, batch 128", cnn(128), 3.0, 1),
        ("LSTM(1,8,5)-LSTM(8,8,5)-Linear, batch 64", lstm(64), 1.2, 10),
        ("LSTM, batch 256", lstm(256), 1.2, 5),
        ("LSTM of 12 steps, batch 10", lstm(10, 12), 1.2, 10),
    ]
    for name, candidates, target, repeats in cases:
        ours, theirs = best_of(candidates, rounds, repeats, clock)
        yield Row(name, ours, theirs, "torch + SGD", target)


def ranks_step(rows, rounds):
    """Time a step of two ranks with `rows` each against one rank with all rows."""
    torch.set_num_threads(1)
    comm = world()
    sizes = (784, 256, 256, 10)
    layers = [
        bayes.Linear(sizes[0], sizes[1]),
        bayes.ReLU(),
        bayes.Linear(sizes[1], sizes[2]),
        bayes.ReLU(),
        bayes.Linear(sizes[2], sizes[3]),
    ]
    net = bayes.DDPSequential(
        bayes.Sequential(*layers), bayes.DDPConfig([], backend="auto"), average=False
    )
    updater = bayes.OutputUpdater("cpu")
    x, y = torch.randn(rows, sizes[0]), torch.randn(rows, sizes[-1])
    alone, _ = mlp(2 * rows)
    step = bayesian_step(net, x, y, updater)

    def one_rank():
        if comm.rank == 0:
            alone()

    times = interleaved(comm, {"ours": step, "one": one_rank}, rounds=rounds)
    return times["ours"], times["one"]


def two_ranks(rounds):
    for backend, target in (("shm", 0.65), ("gloo", 0.85)):
        platform = unisono.Platform(device="cpu", ranks=2, backend=backend)
        found = unisono.run(ranks_step, 256, rounds, on=platform)[0]
        name = f"DDP on 2 ranks, MLP, 256 rows a rank, {backend}"
        yield Row(name, *found, "one rank, 512 rows", target)


def growth_of_memory(kind):
    """Print by how many bytes the peak memory grows while a large MLP trains."""
    torch.set_num_threads(1)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    sizes = (4096, 4096, 4096, 10)
    x, y = torch.randn(256, sizes[0]), torch.randn(256, sizes[-1])
    pairs = list(itertools.pairwise(sizes))
    if kind == "ours":
        layers = [part for a, b in pairs for part in (bayes.Linear(a, b), bayes.ReLU())][:-1]
        net = bayes.Sequential(*layers)
        del layers
        step = bayesian_step(net, x, y)
    else:
        parts = [part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())][:-1]
        step = torch_step(nn.Sequential(*parts), x, y)
    for _ in range(3):
        step()
    print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def memory():
    grown = []
    for kind in ("ours", "torch"):
        command = [sys.executable, __file__, "--memory", kind]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(done.stdout))
    ours, theirs = grown
    verdict = "ok" if ours <= 3 * theirs else "MISSED"
    sizes = f"{ours / 2**20:.0f} MB | {theirs / 2**20:.0f} MB torch + SGD"
    return (
        "| growth of peak memory | ours | reference | ratio | target | verdict |\n"
        "|---|---:|---:|---:|---:|---|\n"
        f"| peak memory, MLP 4096-4096-4096-10, batch 256 | {sizes} "
        f"| {ours / theirs:.2f} | <= 3 | {verdict} |"
    )


def main():
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pytagi", type=Path, help="a virtual environment with pytagi")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time (busy machines)")
    parser.add_argument("--memory", choices=["ours", "torch"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        growth_of_memory(options.memory)
        return
    torch.set_num_threads(1)
    clock = time.process_time if options.cpu_time else time.perf_counter
    rounds = 3 if options.quick else options.rounds
    rows = [*one_process(rounds, clock), *two_ranks(rounds)]
    rows += against_pytagi(options.pytagi, rounds, clock)
    write = not (options.quick or options.no_write)
    publish("Bayesian nets", f"{markdown(rows)}\n\n{memory()}", write=write)


if __name__ == "__main__":
    main()

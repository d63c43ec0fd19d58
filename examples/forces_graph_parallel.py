"""Forces from an energy, with data and graph split over ranks: 2 x 2 ranks equal one process.

Prints the largest difference from one process, trains on snapshots of shaken clusters, draws
predicted against true forces, and shows on a large cluster that no rank ever holds all atoms'
features: each keeps its own rows and the few of other ranks that its edges touch.
"""

from __future__ import annotations

import argparse

import torch
from morse_potential import Potential, cluster, loss_of

import unisono
from unisono import graph_parallel as gp

WIDTH = 20


def difference_from_one_process(model, groups):
    """Return how far energy, forces and gradients of all ranks are from those of this one."""
    results, this_row_first = (
        [],
        sorted(range(groups.dp.size), key=lambda row: row != groups.dp.rank),
    )
    one_rank = gp.graph_groups(1).gp
    for comm, seeds in ((groups.gp, this_row_first[:1]), (one_rank, this_row_first)):
        model.zero_grad()
        losses = [loss_of(model, cluster(seed), comm) for seed in seeds]
        torch.stack([loss for loss, *_ in losses]).mean().backward()
        if comm is groups.gp:
            gp.sync_gradients(model, groups=groups)
        results.append([*losses[0][1:], *(p.grad.clone() for p in model.parameters())])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def train(size, steps, snapshots=16):
    torch.manual_seed(0)
    mesh = unisono.Mesh(dp=-1, gp=size)
    model = Potential().double()
    with gp.use_groups(mesh) as groups:
        far = difference_from_one_process(model, groups)
        data = [cluster(seed, atoms=32, jitter=0.06) for seed in range(snapshots)]
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            optimizer.zero_grad()
            sample = data[(step * groups.dp.size + groups.dp.rank) % snapshots]
            loss_of(model, sample, groups.gp)[0].backward()
            gp.sync_gradients(model)
            optimizer.step()
            schedule.step()
        unseen = cluster(1000, atoms=32, jitter=0.06)
        _, _, forces = loss_of(model, unseen, groups.gp)
        return far, forces, unseen[2]


class Kept:
    """Counts the memory autograd keeps for the backward, and tensors with all atoms' features."""

    def __init__(self, atoms):
        self.atoms, self.bytes, self.whole = atoms, 0, 0

    def pack(self, x):
        self.bytes += x.numel() * x.element_size()
        self.whole += x.dim() == 2 and x.shape[0] == self.atoms and x.shape[1] == WIDTH
        return x


def memory(atoms):
    """What each rank keeps in a training step of one large cluster."""
    torch.manual_seed(0)
    kept, model = Kept(atoms), Potential(WIDTH).double()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
        loss, *_ = loss_of(model, cluster(0, atoms), unisono.world())
    loss.backward()
    return kept.bytes, kept.whole


def draw(forces, truth, path):
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4, 4))
    axes.scatter(truth, forces, s=8)
    limits = [float(truth.min()), float(truth.max())]
    axes.plot(limits, limits, color="gray")
    axes.set(xlabel="true force", ylabel="predicted force", title="an unseen cluster")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return f"drawn: {path}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--atoms", type=int, default=700, help="of the large cluster")
    parser.add_argument("--plot", default="forces.png")
    options = parser.parse_args()
    size = 2 if options.ranks % 2 == 0 else 1
    far, forces, truth = unisono.run(train, size, options.steps, ranks=options.ranks)[0]
    print(f"{options.ranks // size} x {size} ranks equal one process to {far:.1e}")
    assert far < 1e-10
    together = torch.stack([forces.flatten(), truth.flatten()])
    print(f"forces of an unseen cluster: correlation {float(torch.corrcoef(together)[0, 1]):.3f}")
    print(draw(forces.flatten(), truth.flatten(), options.plot))
    whole, tensors = unisono.run(memory, options.atoms, ranks=1)[0]
    print(f"a step of {options.atoms} atoms: memory kept, tensors with the features of all atoms")
    print(f"  one process {whole / 2**20:4.0f} MB  100%  {tensors}")
    for rank, (kept, tensors) in enumerate(unisono.run(memory, options.atoms, ranks=options.ranks)):
        print(f"  rank {rank}      {kept / 2**20:4.0f} MB  {kept / whole:4.0%}  {tensors}")


if __name__ == "__main__":
    main()

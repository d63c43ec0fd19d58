"""`EnergyHead`: energies of structures, each with an error bar, from features of their atoms."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from unisono.bayes import metric
from unisono.bayes.data import batches
from unisono.bayes.ddp import DDPConfig, DDPSequential
from unisono.bayes.layers.linear import Linear
from unisono.bayes.moments import ArrayLike, check_count, check_finite, integers, to_tensor
from unisono.bayes.sequential import Sequential
from unisono.bayes.updater import OutputUpdater
from unisono.comm import Communicator, world
from unisono.errors import PartitionError
from unisono.expect import expect_float, expect_int

CPU = torch.device("cpu")


class EnergyHead:
    """A Bayesian layer over the features of a frozen potential: `E = sum over atoms of w . f`.

    All atoms share the weights, so the energies of two atoms are correlated. Features are summed
    over the atoms of a structure *before* they meet the Gaussian weights: the standard deviation of
    `E` then has the covariances of all pairs of atoms in it. Two copies of a crystal have twice its
    standard deviation, where independent atoms would give the root of two.

    TAGI takes the weights for independent. Features are therefore turned to the principal axes of
    the structures that the head learns from: there the weights are independent in the exact
    posterior, too, and the result is that of Bayesian linear regression.

    Args:
        num_features: columns of the features.
        prior: standard deviation of a weight before anything is known; 1 expects that the
            combination of features that varies most explains the energies.

    >>> rows, structure = torch.randn(40, 3), torch.arange(40) // 4
    >>> energy = torch.zeros(10).index_add(0, structure, rows[:, 0] + 1)
    >>> head = EnergyHead(3)
    >>> head.learn(rows, structure, energy)
    >>> mean, std = head(rows, structure)
    >>> bool((mean - energy).abs().max() < 0.2)
    True
    """

    def __init__(self, num_features: int, *, prior: float = 10.0) -> None:
        self.num_features = expect_int("num_features", num_features, 1, error=PartitionError)
        self.prior = expect_float("prior", prior, 0, error=PartitionError)
        self.noise = 0.0
        """Standard deviation of the energy per atom that the weights do not explain, as `calibrate`
        measures it. It counts as common to all atoms of a structure."""
        self.factor = 1.0
        """What `calibrate` multiplies the standard deviations of the weights by."""
        self._learnt: tuple[Tensor, ...] | None = None
        """Offset and axes of the features, energy of an atom, means and variances of weights."""

    def learn(
        self,
        rows: Tensor,
        structure: Tensor | None,
        energy: ArrayLike,
        *,
        noise: float = 0.1,
        epochs: int = 40,
        batch_size: int = 1,
        comm: Communicator | None = None,
    ) -> None:
        """Learn from these structures, and forget others. Collective.

        Args:
            rows: features of all atoms of this rank's structures, `[atoms, num_features]`.
            structure: number of the structure of each atom, from 0, as torch_geometric's `batch`;
                None: there is one.
            energy: of each structure.
            noise: a guess: which part of the spread of the energies the features cannot explain.
            epochs: passes over the structures. All passes together count each structure once; the
                more there are, the closer the result is to the exact posterior.
            batch_size: structures of a rank in each step; 1 is the most accurate.
            comm: the ranks that learn together; default: the running world.
        """
        expect_int("epochs", epochs, 1, error=PartitionError)
        expect_float("noise", noise, 0, error=PartitionError)
        comm = world() if comm is None else comm
        x, y = self._examples(rows, structure, energy, comm)
        offset, level, spread = x.mean(0), y.mean(), y.std(correction=0).clamp_min(1e-12)
        sizes, axes = torch.linalg.eigh((x - offset).T @ (x - offset) / len(x))
        scale = sizes[-1].clamp_min(1e-24).sqrt()
        axes = comm.broadcast(axes)  # unlike machines may round, and turn, otherwise

        layer = Linear(self.num_features, 1, bias=False)
        net: Sequential | DDPSequential = Sequential(layer).double()
        layer.mu_w = torch.zeros(self.num_features)
        layer.var_w = torch.full((self.num_features,), self.prior**2)
        if comm.size > 1:
            config = DDPConfig([], backend="auto")
            net = DDPSequential(net, config, average=False, cap_batch="global", comm=comm)
        inputs, targets = (x - offset) @ axes / scale, (y - level)[:, None] / spread
        updater = OutputUpdater()
        for epoch in range(epochs):
            for a, b in batches(inputs, targets, batch_size, epoch=epoch, comm=comm):
                var = torch.as_tensor(net(a)[1]).reshape(-1)
                # A pass is worth 1 / epochs of an observation. The rows of a step do not see each
                # other, so that each one leaves its part of the correction to the others.
                doubt = epochs * noise**2 + (batch_size * comm.size - 1) * var
                updater.update(net.output_z_buffer, b, doubt, net.input_delta_z_buffer)
                net.backward()
                net.step()
        mean, var = (torch.as_tensor(t).to(x) for t in (layer.mu_w, layer.var_w))
        gain = spread / scale
        self._learnt = offset, axes, level, gain * mean, gain**2 * var
        self.noise, self.factor = 0.0, 1.0

    def _examples(
        self, rows: Tensor, structure: Tensor | None, energy: ArrayLike, comm: Communicator
    ) -> tuple[Tensor, Tensor]:
        """Return mean features and energies per atom, of the structures of all ranks."""
        problem, table = None, torch.empty(0, self.num_features + 1, dtype=torch.float64)
        try:
            x, y, _ = self._per_atom(rows, structure, energy)
            table = torch.cat([x, y[:, None]], 1)
        except PartitionError as error:
            problem = str(error)
        problems = comm.all_gather_object(problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise PartitionError.because(f"learn() on rank {rank} of {comm.size}", text)
        table = comm.all_gather(table)
        if len(table) < 2:
            raise PartitionError.because("learn()", f"{len(table)} structures", hint="two or more")
        return table[:, :-1], table[:, -1]

    def _per_atom(
        self, rows: Tensor, structure: Tensor | None, energy: ArrayLike
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean features, energies per atom, and atoms of each structure, on the host."""
        sums, atoms = self._sums(rows.detach().to(CPU), structure)
        check_finite(sums, "features", "positions that are not NaN, and no two atoms in one place")
        values = to_tensor(energy, CPU, torch.float64).reshape(-1)
        hint = "one energy for each structure; structure counts from 0"
        check_count(f"energies of {len(atoms)} structures", values.numel(), len(atoms), hint)
        check_finite(values, "energy", "leave structures out whose calculation failed")
        return sums / atoms[:, None], values / atoms, atoms

    def _sums(self, rows: Tensor, structure: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the summed features and the number of atoms of each structure."""
        if rows.dim() != 2 or rows.shape[1] != self.num_features:
            raise PartitionError.because(
                f"features of shape {list(rows.shape)}",
                f"expected [atoms, {self.num_features}]",
                hint=f"EnergyHead({rows.shape[-1] if rows.dim() else 1}), or rows of each atom",
            )
        rows = rows.double()
        if structure is None:
            return rows.sum(0, keepdim=True), rows.new_full((1,), len(rows))
        hint = "the number of its structure for each atom"
        check_count(f"{len(rows)} atoms", len(structure), len(rows), hint)
        index = integers(structure, "structure").to(rows.device)
        atoms = torch.bincount(index).to(rows)
        if not bool((atoms > 0).all()):
            empty = int((atoms == 0).nonzero()[0])
            raise PartitionError.because(
                f"{len(atoms)} structures", f"structure {empty} has no atoms", hint="numbers from 0"
            )
        return rows.new_zeros(len(atoms), rows.shape[1]).index_add(0, index, rows), atoms

    def __call__(self, rows: Tensor, structure: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return energy and standard deviation of each structure. Local.

        The energies have a graph if `rows` have one.

        Args:
            rows: features of all atoms, `[atoms, num_features]`.
            structure: number of the structure of each atom, from 0; None: there is one.
        """
        sums, atoms = self._sums(rows, structure)
        offset, axes, level, mean, var = self._known(rows.device)
        turned = (sums - atoms[:, None] * offset) @ axes
        energy = turned @ mean + atoms * level
        spread = self.factor * (turned.detach().square() @ var).sqrt()
        std = torch.hypot(spread, atoms * self.noise)
        return energy.to(rows.dtype), std.to(rows.dtype)

    def calibrate(self, rows: Tensor, structure: Tensor | None, energy: ArrayLike) -> None:
        """Measure `factor` and `noise` on structures that the head has not learnt from. Local.

        They are the two that make these energies most likely; from then on error bars have them.
        """
        _, target, atoms = self._per_atom(rows, structure, energy)
        self.noise, self.factor = 0.0, 1.0
        mean, std = ((t.detach().to(CPU) / atoms).numpy() for t in self(rows, structure))
        best = -np.inf
        for factor in np.geomspace(0.1, 10, 41):
            noise = float(metric.observation_noise(mean, factor * std, target.numpy()))
            spread = np.hypot(factor * std, noise)
            likelihood = float(metric.log_likelihood(mean, target.numpy(), spread))
            if likelihood > best:
                best, self.factor, self.noise = likelihood, float(factor), noise

    def forces(self, rows: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Return forces `[atoms, 3]`, and the standard deviation of each component. Local.

        Forces are linear in the weights, so this is exact for the weights that were learnt. The
        `noise` of energies has no part in it: it does not say how much of it is a slope.

        Args:
            rows: features of all atoms, of one structure or of many.
            pos: the positions from which they were computed, with `requires_grad`.
        """
        sums, _ = self._sums(rows, None)
        _, axes, _, mean, var = self._known(rows.device)
        force, square = torch.zeros_like(pos), torch.zeros_like(pos)
        turned = (sums @ axes)[0]
        for n in range(self.num_features):
            (slope,) = torch.autograd.grad(turned[n], pos, retain_graph=True)
            force -= mean[n] * slope
            square += var[n] * slope.square()
        return force, self.factor * square.sqrt()

    def _known(self, device: torch.device) -> tuple[Tensor, ...]:
        if self._learnt is None:
            raise PartitionError.because(
                "a prediction of an EnergyHead", "it has learnt nothing", hint="head.learn(...)"
            )
        return tuple(t.to(device) for t in self._learnt)

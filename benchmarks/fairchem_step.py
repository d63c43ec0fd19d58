"""A step of fairchem's eSCN-MD with fairchem's own graph parallelism; prints its seconds as JSON.

    python -m torch.distributed.run --nproc_per_node 2 benchmarks/fairchem_step.py

It needs fairchem-core 2.x and nothing of unisono: `potentials.py --fairchem` runs it in a virtual
environment that has it. The model has two layers of 64 channels and random weights.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from ase.build import bulk
from fairchem.core.common import gp_utils  # pyright: ignore[reportMissingImports]
from fairchem.core.datasets.atomic_data import (  # pyright: ignore[reportMissingImports]
    AtomicData,
)
from fairchem.core.models.uma.escn_md import (  # pyright: ignore[reportMissingImports]
    MLP_EFS_Head,
    eSCNMDBackbone,
)

CUBES, ROUNDS = 5, 5


def main() -> None:
    """Time energy and forces of a shaken copper crystal, neighbours included."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        gp_utils.setup_graph_parallel_groups(dist.get_world_size(), "gloo")
    atoms = bulk("Cu", cubic=True).repeat(CUBES)
    atoms.rattle(0.05, seed=0)
    atoms.info.update(charge=0, spin=0)
    data = AtomicData.from_ase(atoms, task_name="omat", r_data_keys=["spin", "charge"])
    network = eSCNMDBackbone(
        sphere_channels=64, hidden_channels=64, edge_channels=64, num_distance_basis=64,
        lmax=2, mmax=2, num_layers=2, cutoff=4.5, otf_graph=True, direct_forces=False,
        dataset_mapping={"omat": "omat"},
    ).eval()  # fmt: skip
    head = MLP_EFS_Head(network).eval()
    seconds, energy = [], 0.0
    for _ in range(ROUNDS + 1):
        batch = data.clone()
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        out = head(batch, network(batch))
        seconds.append(time.perf_counter() - start)
        energy = out["energy"]["energy"].item()
    if not dist.is_initialized() or dist.get_rank() == 0:
        step = sorted(seconds[1:])[ROUNDS // 2]
        print(json.dumps({"step": step, "atoms": len(atoms), "energy": energy}))


main()  # without a guard: it is a part of another benchmark, and `unisono bench` does not list it

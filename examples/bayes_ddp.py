"""Digits on any number of ranks: the same script alone, under `unisono run`, under mpirun.

    python examples/bayes_ddp.py
    unisono run --ranks 2 examples/bayes_ddp.py
    mpirun -n 2 python examples/bayes_ddp.py

One line makes it data-parallel. Deltas are summed, so two ranks learn what one process learns from
batches twice as large; the parameters of all ranks agree to the last bit.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from unisono.bayes import (
    DDPConfig,
    DDPSequential,
    HRCSoftmaxMetric,
    Linear,
    OutputUpdater,
    ReLU,
    Sequential,
    Utils,
    batches,
    manual_seed,
)


def main():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]

    manual_seed(0)
    net = Sequential(Linear(64, 100), ReLU(), Linear(100, 11))
    net = DDPSequential(net, DDPConfig([], backend="auto"), average=False, cap_batch="global")
    updater, tools = OutputUpdater(net.get_device_with_index()), Utils()
    for epoch in range(4):
        for a, b in batches(x[:1424], y[:1424], 16 // net.world_size, epoch=epoch):
            net(a)
            turns, outputs, _ = tools.label_to_obs(b, 10)
            updater.update_using_indices(
                net.output_z_buffer, turns, 1.0, outputs, net.input_delta_z_buffer
            )
            net.backward()
            net.step()

    net.check_sync()
    net.eval()
    mean, var = net(x[1424:])
    error = HRCSoftmaxMetric(10).error_rate(mean, var, y[1424:])
    if net.rank == 0:
        print(f"parameters agree on {net.world_size} ranks; error {error:.1%} on new digits")
    assert error < 0.08


main()

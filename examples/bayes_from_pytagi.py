"""A program written for pytagi; only the import lines are changed.

python examples/bayes_from_pytagi.py
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_diabetes

from unisono.compat import pytagi
from unisono.compat.pytagi import Normalizer, exponential_scheduler, metric
from unisono.compat.pytagi.nn import Linear, OutputUpdater, ReLU, Sequential


def main():
    pytagi.manual_seed(0)
    x, y = load_diabetes(return_X_y=True, scaled=False)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    x_mean, x_std = Normalizer.compute_mean_std(x[:350])
    y_mean, y_std = Normalizer.compute_mean_std(y[:350])
    x = Normalizer.standardize(x, x_mean, x_std).astype(np.float32)
    unit = Normalizer.standardize(y, y_mean, y_std).astype(np.float32)

    net = Sequential(Linear(10, 50), ReLU(), Linear(50, 1))
    updater = OutputUpdater(net.device)
    batch_size, sigma = 10, 0.7
    for epoch in range(5):
        sigma_v = exponential_scheduler(
            curr_v=1.0, min_v=sigma, decaying_factor=0.9, curr_iter=epoch
        )
        var_y = np.full((batch_size,), sigma_v**2, dtype=np.float32)
        for start in range(0, 350, batch_size):
            rows = slice(start, start + batch_size)
            net(x[rows].flatten())
            updater.update(
                output_states=net.output_z_buffer,
                mu_obs=unit[rows],
                var_obs=var_y,
                delta_states=net.input_delta_z_buffer,
            )
            net.backward()
            net.step()

    net.eval()
    mean, var = net(x[350:440].flatten())
    std = np.sqrt(var + sigma**2)
    mean = Normalizer.unstandardize(mean, y_mean, y_std)
    std = Normalizer.unstandardize_std(std, y_std)
    error = metric.rmse(mean, y[350:440])
    likelihood = metric.log_likelihood(prediction=mean, observation=y[350:440], std=std)
    print(f"RMSE {error:.1f}, log-likelihood {likelihood:.3f} on 90 new patients")
    assert error < 65


main()

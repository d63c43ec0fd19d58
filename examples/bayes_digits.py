"""Handwritten digits by a Bayesian CNN with hierarchical softmax, and the digits it doubts.

    python examples/bayes_digits.py

Writes bayes_digits.png (the most uncertain test digits) if matplotlib is there.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

from unisono.bayes import (
    AvgPool2d,
    Conv2d,
    HRCSoftmaxMetric,
    Linear,
    OutputUpdater,
    ReLU,
    Sequential,
    Utils,
    batches,
    manual_seed,
)


def build():
    return Sequential(
        Conv2d(1, 16, 3, padding=1, in_width=8, in_height=8),
        ReLU(),
        AvgPool2d(2),
        Linear(256, 64),
        ReLU(),
        Linear(64, 11),  # the inner nodes of a tree with 10 leaves
    )


def train(net, x, y, epochs):
    updater, tools = OutputUpdater(net.device), Utils()
    for epoch in range(epochs):
        for a, b in batches(x, y, 16, epoch=epoch):
            net(a)
            turns, outputs, _ = tools.label_to_obs(b, 10)
            updater.update_using_indices(
                net.output_z_buffer, turns, 1.0, outputs, net.input_delta_z_buffer
            )
            net.backward()
            net.step()


def plot(images, labels, found, doubt):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    figure.suptitle("The digits the net is least sure of")
    for n, row in enumerate(np.argsort(-doubt)[:12]):
        axes = figure.add_subplot(2, 6, n + 1)
        axes.imshow(images[row].reshape(8, 8), cmap="gray_r")
        colour = "black" if found[row] == labels[row] else "red"
        axes.set_title(
            f"{labels[row]} read as {found[row]}\ndoubt {doubt[row]:.0%}", fontsize=8, color=colour
        )
        axes.axis("off")
    figure.savefig("bayes_digits.png", dpi=120)
    print("wrote bayes_digits.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    options, _ = parser.parse_known_args()
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order]
    manual_seed(0)
    net = build()
    print(net)
    train(net, x[:1424], y[:1424], options.epochs)
    net.eval()
    mean, var = net(x[1424:])
    measure = HRCSoftmaxMetric(10)
    rows = len(x) - 1424
    found, prob = measure.utils.get_labels(mean, var, measure.hrc_softmax, 10, rows)
    prob = prob.reshape(rows, 10)
    doubt = 1 - prob.max(1) / prob.sum(1)
    wrong = found != y[1424:]
    print(f"error {wrong.mean():.1%} of {rows} test digits")
    print(
        f"mean doubt: {doubt[~wrong].mean():.1%} where right, {doubt[wrong].mean():.1%} where wrong"
    )
    assert wrong.mean() < 0.1
    assert doubt[wrong].mean() > doubt[~wrong].mean()
    plot(x[1424:], y[1424:], found, doubt)


main()

"""Which input gives the wanted output? Inference of the input through a trained net.

    python examples/bayes_inverse.py

The net learns a forward model; then the wanted output is the observation, the weights stay, and
the input is conditioned again and again. Writes bayes_inverse.png if matplotlib is there.
"""

from __future__ import annotations

import numpy as np

from unisono.bayes import Linear, OutputUpdater, Sequential, Tanh, batches, manual_seed


def model_of_the_world(x):
    return 1.5 * x[:, 0] - x[:, 1] + 0.5 * np.sin(3 * x[:, 0])


def train(x, y):
    manual_seed(0)
    net = Sequential(Linear(2, 60), Tanh(), Linear(60, 1))
    updater = OutputUpdater(net.device)
    for epoch in range(30):
        noise = max(0.03, 0.85**epoch)
        for a, b in batches(x, y, 10, epoch=epoch):
            net(a)
            updater.update(net.output_z_buffer, b, noise**2, net.input_delta_z_buffer)
            net.backward()
            net.step()
    return net


def infer(net, wanted, steps=25):
    """Start in the middle with a wide guess; return the path of the input's mean, and its std."""
    net.input_state_update = True
    updater = OutputUpdater(net.device)
    mean, path = np.zeros(2, np.float32), []
    var = np.full(2, 0.05, np.float32)
    for _ in range(steps):
        path.append(mean.copy())
        net(mean, np.full(2, 0.05, np.float32))
        # A vague wish moves the input a little at a time, which a curved model needs.
        updater.update(net.output_z_buffer, [wanted], 0.5, net.input_delta_z_buffer)
        net.backward()  # and no step(): the weights stay
        mean, var = net.input_states_posterior()
    return np.array(path), np.sqrt(var)


def plot(path, wanted):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    side = np.linspace(-1, 1, 60)
    a, b = np.meshgrid(side, side)
    world = model_of_the_world(np.stack([a.ravel(), b.ravel()], 1)).reshape(60, 60)
    shown = axes.contourf(a, b, world, 20)
    axes.contour(a, b, world, [wanted], colors="white")
    axes.plot(*path.T, "o-", color="red", ms=3)
    figure.colorbar(shown)
    axes.set(xlabel="x0", ylabel="x1", title=f"The input moves to where y = {wanted}")
    figure.savefig("bayes_inverse.png", dpi=120)
    print("wrote bayes_inverse.png")


def main():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (500, 2)).astype(np.float32)
    y = (model_of_the_world(x) + 0.03 * rng.normal(size=500)).astype(np.float32)
    net = train(x, y)
    wanted = 1.0
    path, _ = infer(net, wanted)
    reached = model_of_the_world(path[-1:])[0]
    print(f"wanted {wanted}, found x = {path[-1].round(3).tolist()}, which gives {reached:.3f}")
    assert abs(reached - wanted) < 0.15
    plot(path, wanted)


main()

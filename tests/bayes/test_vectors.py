"""Numbers computed with pytagi, replayed: forward, updater, backward, step, smoother."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from unisono import bayes

FILE = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())


def made(entry):
    name, arguments = entry
    arguments = dict(arguments)
    if name == "ResNetBlock":
        main = bayes.LayerBlock(*map(made, arguments["main"]))
        shortcut = arguments.get("shortcut")
        if shortcut:
            parts = [made(part) for part in shortcut]
            shortcut = parts[0] if len(parts) == 1 else bayes.LayerBlock(*parts)
        return bayes.ResNetBlock(main, shortcut)
    return getattr(bayes, name)(**arguments)


def numbers(values):
    return np.array([math.nan if v is None else v for v in values])


class Close:
    """`|got - want| <= tol * (1 + |want|)`, with the place in the message."""

    def __init__(self, tol):
        self.tol = tol

    def __call__(self, got, want, where):
        got, want = np.asarray(got, dtype=float), numbers(want)
        assert got.shape == want.shape, where
        worst = np.max(np.abs(got - want) / (1 + np.abs(want)), initial=0.0)
        assert worst <= self.tol, f"{where}: off by {worst:.2e}"

    def states(self, got, want, where):
        assert set(got) == set(want), where
        for key in want:
            for n, (mine, theirs) in enumerate(zip(got[key], want[key], strict=True)):
                self(mine, theirs, f"{where} {key}[{n}]")


def update(net, updater, given):
    z, delta = net.output_z_buffer, net.input_delta_z_buffer
    if given["method"] == "update":
        updater.update(z, numbers(given["y"]), given["var_y"], delta)
    elif given["method"] == "update_using_indices":
        obs, idx, _ = bayes.Utils().label_to_obs(given["labels"], given["num_classes"])
        assert np.array_equal(obs, given["y"])
        assert np.array_equal(idx, given["idx"])
        updater.update_using_indices(z, given["y"], given["var_y"], given["idx"], delta)
    else:
        assert given["method"] == "update_heteros"
        updater.update_heteros(z, numbers(given["y"]), delta)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", FILE["cases"], ids=lambda case: case["name"])
def test_a_recorded_run_is_reproduced(case, dtype):
    close = Close(case.get("tol", FILE["tol"]))
    net = getattr(
        bayes.Sequential(*map(made, case["layers"])),
        {"float32": "float", "float64": "double"}[dtype],
    )()
    net.load_state_dict(case["state"])
    net.input_state_update = case.get("input_state_update", False)
    net.num_samples = case.get("num_samples", 0)
    updater = bayes.OutputUpdater(net.device)
    for n, step in enumerate(case["steps"]):
        mean, var = net(np.array(step["x"]), step.get("var_x"))
        close(mean, step["out_mu"], f"step {n} mean")
        close(var, step["out_var"], f"step {n} variance")
        close(net.output_z_buffer.jcb, step["out_jcb"], f"step {n} slope")
        update(net, updater, step["update"])
        close(net.input_delta_z_buffer.delta_mu, step["delta_mu"], f"step {n} delta_mu")
        close(net.input_delta_z_buffer.delta_var, step["delta_var"], f"step {n} delta_var")
        net.backward()
        if "input_delta_mu" in step:
            got = net.get_input_states()
            close(got[0], step["input_delta_mu"], f"step {n} input delta_mu")
            close(got[1], step["input_delta_var"], f"step {n} input delta_var")
        for index, want in step.get("lstm_states", {}).items():
            close.states({index: net.get_lstm_states()[int(index)]}, {index: want}, f"step {n}")
        net.step()
        close.states(net.state_dict(), step["state_after"], f"step {n} state")
        for key, (mean_ra, var_ra) in step.get("norm", {}).items():
            got = net.get_norm_mean_var()[key]
            close(got[0][0], mean_ra, f"step {n} running mean")
            close(got[1][0], var_ra, f"step {n} running variance")
    if "smoother" in case:
        want = case["smoother"]
        mean, var = net.smoother()
        close(mean, want["mu"], "smoothed mean")
        close(var, want["var"], "smoothed variance")
        for t, states in enumerate(want["lstm_states"]):
            for index, state in states.items():
                got = net.get_lstm_states(t)[int(index)]
                close.states({index: got}, {index: state}, f"smoothed {t}")
    if "eval" in case:
        net.eval()
        mean, var = net(np.array(case["eval"]["x"]))
        close(mean, case["eval"]["out_mu"], "eval mean")
        close(var, case["eval"]["out_var"], "eval variance")


def test_the_replay_would_notice_a_wrong_number():
    with pytest.raises(AssertionError, match="here"):
        Close(1e-6)([1.00001], [1.0], "here")

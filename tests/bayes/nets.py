"""How tests teach a net: one line for forward, updater, backward and step."""

from __future__ import annotations

import numpy as np

from unisono.bayes import OutputUpdater


def observe(net, y, var_y=0.1):
    """Condition the last output on `y`, one number for all outputs or one for each, and go back."""
    out = net.output_z_buffer
    targets = np.full(out.size, y) if np.ndim(y) == 0 else y
    OutputUpdater("cpu").update(out, targets, var_y, net.input_delta_z_buffer)
    net.backward()


def condition(net, y, var_y=0.1):
    """Learn from the last output and what was observed."""
    observe(net, y, var_y)
    net.step()


def learn(net, x, y, var_y=0.1, var_x=None):
    """Leave the deltas of a batch in the net, for its next step; return the net."""
    net(x, var_x)
    observe(net, y, var_y)
    return net


def trained(net, x, y, var_y=0.1, var_x=None):
    """Learn from a batch; return the net."""
    learn(net, x, y, var_y, var_x).step()
    return net


def same_parameters(source, target):
    """Give the layers of one net the parameters of another's, whatever blocks they stand in."""
    for kept, taken in zip(source.leaves(), target.leaves(), strict=True):
        for name, tensor in taken[1].tensors().items():
            tensor.copy_(kept[1].tensors()[name])

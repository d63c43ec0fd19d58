"""Double backward through every kind of layer, against torch on the whole tensors."""

from __future__ import annotations

import pytest
import torch


def differentiated_twice(net, inputs, weigh):
    """Leave in inputs and parameters the gradients of the squared gradient of a weighted result."""
    y = net(*inputs)
    grown = y if y.dim() == 0 else y**3  # losses are curved themselves
    leaf = next(x for x in [*inputs, *net.parameters()] if x.requires_grad)
    (grad,) = torch.autograd.grad(weigh(grown), leaf, create_graph=True)
    grad.square().sum().backward()


def whole_or_own(part, x):
    """Return where the own block is; everything for what is no tensor of blocks."""
    return part.local_slices(x.shape[: part.dim]) if part.active and x.dim() else ...


@pytest.mark.ranks(3)
def test_second_derivatives_of_every_layer_equal_torch(proof):
    for case in proof.zoo():
        ours, theirs = proof.pair(case.build, case.plain)
        own = [x.requires_grad_(x.is_floating_point()) for x in case.own_inputs()]
        whole = [x.clone().requires_grad_(x.is_floating_point()) for x in case.inputs]
        weights = proof.ramp(theirs(*whole).detach())
        mine = weights[whole_or_own(case.P_y, weights)] if case.P_y.active else None
        # Statistics of norms have moved once more on the whole tensor: they do not matter here.
        differentiated_twice(ours, own, lambda y, w=mine: proof.score(y, w))
        differentiated_twice(theirs, whole, lambda y, w=weights: proof.score(y, w))
        for x, z, part in zip(own, whole, case.parts, strict=True):
            if z.grad is not None and part.active:
                torch.testing.assert_close(x.grad, z.grad[whole_or_own(part, z)], msg=case.name)
        expected = dict(theirs.named_parameters())
        for name, p in ours.named_parameters():
            holding, grad = ours._holdings[name], expected[name].grad
            if grad is not None and 0 not in holding.shape:
                found = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(found, grad[holding.slices], msg=case.name)

"""What every operator and every region is held to, and how tests draw tensors and blocks."""

from __future__ import annotations

import torch

from unisono.comm import world


def drawn(*shape, seed=0, dtype=torch.float64):
    """Return random numbers, the same on every rank for one seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, dtype=dtype, generator=generator, device="cpu")
    return x.to(torch.get_default_device())


def block_at(x, cuts, index):
    """Return the block of `x` at this index of the grid that the cuts make."""
    return x[tuple(slice(c[i], c[i + 1]) for c, i in zip(cuts, index, strict=True))]


def check_derivatives(forward, x, weights, domain, range_, eps=1e-6):
    """Compare two derivatives with finite differences of the function of all ranks together.

    The entries of all ranks' inputs move one after the other; the other ranks join each call.
    """
    comm = world()

    def loss(at):
        return (weights * forward(at).sin()).sum()

    def total(at):
        value = loss(at).detach()
        return value if range_ == "R" else comm.all_reduce(value)

    def gradient(at):
        at = at.clone().requires_grad_()
        return torch.autograd.grad(loss(at), at)[0]

    at = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(loss(at), at, create_graph=True)
    counts = [n for (n,) in comm.all_gather_ints([x.numel()])]
    for turn in [0] if domain == "R" else range(comm.size):
        for i in range(counts[turn]):
            moves = domain == "R" or comm.rank == turn
            step = torch.zeros_like(x)
            if moves:
                step.view(-1)[i] = eps
            slope = (total(x + step) - total(x - step)) / (2 * eps)
            if moves:
                assert abs(slope - exact.detach().reshape(-1)[i]) < 1e-7
    along = drawn(*x.shape, seed=3 if domain == "R" else 3 + comm.rank)
    numeric = (gradient(x + eps * along) - gradient(x - eps * along)) / (2 * eps)
    (second,) = torch.autograd.grad(exact, at, along)
    torch.testing.assert_close(second, numeric, atol=1e-7, rtol=1e-6)


def column_major(x):
    """Return the same values, laid out the other way round."""
    return x.t().contiguous().t() if x.dim() > 1 else x.clone()


def check_nothing_is_changed(forward, adjoint, x, y):
    """Any layout is right, and inputs, results and incoming gradients stay as they were."""
    leaf, grad = column_major(x).requires_grad_(), column_major(y)
    out = forward(leaf)
    assert out.dtype == x.dtype
    kept = out.detach().clone()
    torch.testing.assert_close(kept, forward(x.contiguous()))
    out.backward(grad)
    for now, before in ((leaf.detach(), x), (grad, y), (out.detach(), kept)):
        assert torch.equal(now, before)
    torch.testing.assert_close(leaf.grad, adjoint(y.contiguous()))
    return leaf.grad, grad

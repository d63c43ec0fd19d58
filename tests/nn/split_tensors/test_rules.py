"""Every rule against torch in one process: cut in each dim, even, uneven and with few points."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unisono import Partition
from unisono.errors import PartitionError, UnisonoError
from unisono.nn.split_tensors import Split

IMAGE, TOKENS = (4, 6, 9, 10), (4, 7, 8)


def param(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def held(x: Tensor) -> Tensor:
    """A replicated tensor that a network would hold."""
    return param(*x.shape)


IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + held(x),
    "broadcast": lambda x: x * param(6, 1, 1) + param(1, 6, 9, 1) * 2 - param(10),
    "where": lambda x: torch.where(x > 0, x, param(1)),
    "clamp": lambda x: x.clamp(min=-0.5).exp().sqrt(),
    "inplace": lambda x: (x * 1).add_(param(6, 1, 1)).mul_(2).relu_(),
    "mask": lambda x: x.masked_fill(held(x).detach() > 0, 0.0),
    "prelu": lambda x: F.prelu(x, param(6)),
    "glu": lambda x: F.glu(x, 1),
    "softmax 1": lambda x: x.softmax(1),
    "softmax 2": lambda x: F.softmax(x, dim=2),
    "log_softmax -1": lambda x: F.log_softmax(x, dim=-1),
    "mean": lambda x: x - x.mean((2, 3), keepdim=True),
    "mean all": lambda x: x.mean() * x,
    "sum 0": lambda x: x.sum(0) * param(6, 9, 10),
    "var": lambda x: x.var((0, 2), keepdim=True) + x.std(3, keepdim=True),
    "amax": lambda x: x.amax((2, 3), keepdim=True) * x,
    "max dim": lambda x: x.max(1)[0],
    "maximum": lambda x: torch.max(x, held(x)),
    "cumsum": lambda x: x.cumsum(2),
    "conv": lambda x: F.conv2d(x, param(5, 6, 3, 3), param(5), padding=1),
    "conv stride": lambda x: F.conv2d(x, param(4, 3, 3, 2), None, (2, 1), (1, 0), groups=2),
    "conv dilated": lambda x: F.conv2d(x, param(4, 6, 2, 3), None, 1, "same", dilation=(2, 1)),
    "conv valid": lambda x: F.conv2d(x, param(2, 6, 5, 5), padding="valid"),
    "transposed": lambda x: F.conv_transpose2d(x, param(6, 3, 3, 3), param(3), 2, 1, 1),
    "transposed 2": lambda x: F.conv_transpose2d(x, param(6, 2, 2, 2), None, 2),
    "transposed apart": lambda x: F.conv_transpose2d(
        x, param(6, 2, 3, 2), param(4), (3, 4), (2, 0), (2, 3), 2, (2, 1)
    ),
    "transposed one": lambda x: F.conv_transpose2d(x[1], param(6, 2, 4, 3), param(2), 1, (3, 1)),
    "conv one": lambda x: F.conv2d(x[1], param(2, 6, 3, 3), param(2), 1, (1, 0)),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool one": lambda x: F.max_pool2d(x[1], 3, 1, (1, 0)),
    "avg_pool one": lambda x: F.avg_pool2d(x[1], (3, 2), 1, (1, 0)),
    "max_pool of nothing": lambda x: F.max_pool2d(x - torch.inf, 3, 2, 1),
    "max_pool of nothing, apart": lambda x: F.max_pool2d(x - torch.inf, 2, 3, 1, 2, True),
    "max_pool indices": lambda x: torch.mul(*F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    "max_pool ceil": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool no pad": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool uneven": lambda x: F.avg_pool2d(x, (4, 3), 1, (2, 1), count_include_pad=False),
    "avg_pool ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool ceil 2": lambda x: F.avg_pool2d(x, (4, 3), (3, 2), (1, 0), True, False),
    "avg_pool divided": lambda x: F.avg_pool2d(x, 3, 2, 1, False, False, 5),
    "adaptive 1": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 2, 3, 0), value=2.0),
    "pad reflect": lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
    "pad circular": lambda x: F.pad(x, (2, 1, 1, 2), mode="circular"),
    "pad replicate": lambda x: F.pad(x, (2, 1, 1, 2), mode="replicate"),
    "crop": lambda x: F.pad(x, (-2, -1, -1, 1)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(13, 21), mode="bilinear"),
    "bilinear corners": lambda x: F.interpolate(
        x, scale_factor=(1.7, 2), mode="bilinear", align_corners=True
    ),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic"),
    "area": lambda x: F.interpolate(x, size=(3, 5), mode="area"),
    "shrink": lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
    "batch_norm": lambda x: F.batch_norm(x, None, None, param(6), param(6), True),
    "batch_norm eval": lambda x: F.batch_norm(
        x, param(6).detach(), torch.ones(6).double(), param(6)
    ),
    "instance_norm": lambda x: F.instance_norm(x, weight=param(6), bias=param(6)),
    "group_norm": lambda x: F.group_norm(x, 3, param(6), param(6)),
    "layer_norm": lambda x: F.layer_norm(x, (9, 10), param(9, 10), param(9, 10)),
    "layer_norm last": lambda x: F.layer_norm(x, (10,)),
    "permute": lambda x: x.permute(0, 2, 3, 1) @ param(6, 3),
    "flatten": lambda x: x.flatten(2).transpose(1, 2) * param(6),
    "flatten all": lambda x: x.flatten(1) @ param(540, 2),
    "view heads": lambda x: x.view(4, 2, 3, 9, 10).sum(2),
    "merge batch": lambda x: x.reshape(24, 9, 10).mul(2).view(4, 6, 90).sum(-1),
    "windows": lambda x: (
        (
            F.pad(x, (0, 2, 0, 3))
            .view(4, 6, 3, 4, 3, 4)
            .permute(0, 2, 4, 3, 5, 1)
            .reshape(-1, 16, 6)
            @ param(6, 6)
        )
        .view(4, 3, 3, 4, 4, 6)
        .permute(0, 5, 1, 3, 2, 4)
        .reshape(4, 6, 12, 12)[:, :, :9, :10]
    ),
    "unsqueeze": lambda x: x.unsqueeze(2).squeeze(2)[:, None].squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1, -1) * param(2, 1, 1, 1, 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat space": lambda x: x.repeat(1, 1, 2, 1),
    "chunk": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "split": lambda x: x.split(4, 2)[1] * 2,
    "slice": lambda x: x[:, :, 1:-1, ::2] * 3,
    "pick": lambda x: x[:, :, 3] + x[:, :, -1],
    "pick two": lambda x: x[:, 2, :, 4] * 2,
    "index": lambda x: x[:, torch.tensor([2, 0])],
    "setitem": lambda x: _set(x),
    "cat": lambda x: torch.cat([x, held(x), x.relu()], 1),
    "cat space": lambda x: torch.cat([held(x)[:, :, :2], x, held(x)[:, :, :1]], 2),
    "cat self": lambda x: torch.cat([x, x], 3),
    "cat many": lambda x: torch.cat([x, held(x)[:, :, :2], x[:, :, 1:], x.relu()], 2),
    "cat tokens": lambda x: torch.cat([param(4, 6, 1), x.flatten(2)], 2)[:, :, 1:5] * param(4),
    "cat runs": lambda x: torch.cat([x.flatten(2), x.transpose(2, 3).flatten(2)], 2),
    "part of runs": lambda x: x.flatten(2)[:, :, 3:80:2] * x.flatten(2)[:, :, 13, None],
    "stack": lambda x: torch.stack([x, held(x)], 2).sum(2),
    "roll": lambda x: torch.roll(x, (3, -2), (2, 3)) + torch.roll(x, 1, 0),
    "flip": lambda x: x.flip(2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(F.conv2d(x, param(8, 6, 1, 1)), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[:, :, :8], 2),
    "unfold": lambda x: F.unfold(x, 3),
    "einsum": lambda x: torch.einsum("nchw,cd->ndhw", x, param(6, 2)),
    "einsum sum": lambda x: torch.einsum("nchw,hw->nc", x, param(9, 10)),
    "gram": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
    "item": lambda x: x * (2.0 if x.sum().item() > 1e9 else 3.0),
    "inner mean": lambda x: x * x.mean(2, keepdim=True) * x.mean(3, keepdim=True),
    "movedim": lambda x: x.movedim(1, -1) * param(6),
    "dtype": lambda x: x.float().double().to(torch.float64),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "norm space": lambda x: x * x.norm(dim=(2, 3), keepdim=True) + torch.linalg.vector_norm(x),
    "norm of zeros": lambda x: (x * 0).norm(dim=(0, 2)) + x.norm(p=1, dim=2).sum(0).mean(-1, True),
    "normalize": lambda x: F.normalize(x, dim=1) + F.normalize(x, dim=2),
    "expand as": lambda x: param(6, 1, 1).expand_as(x) * x + held(x).view_as(x),
    "max of held": lambda x: torch.max(held(x), x),
    "topk": lambda x: x.topk(2, 1)[0],
    "tokens and back": lambda x: x + (x.flatten(2) * param(90)).view(4, 6, 9, 10) * x,
    "back from tokens": lambda x: x.flatten(2).mul(2).view_as(x) * x + x.flatten(2).view_as(x),
    "columns first": lambda x: x.permute(0, 3, 2, 1).flatten(1, 2) * param(90, 1),
    "image beside tokens": lambda x: torch.cat([x, x.flatten(2).unflatten(2, (9, 10))], 1),
    "unlike tokens": lambda x: x.flatten(2) @ x.transpose(2, 3).flatten(2).transpose(1, 2),
    "one dim gone, one narrow": lambda x: (
        x[:, 0, 3:4] * x[:, 1, :1, 2:3] + x[None, ..., 4, 7:8].sum()
    ),
    "as another": lambda x: param(10).float().type_as(x) * x + torch.ones(1).to(x).type_as(x),
    "deviation of nothing": lambda x: (x * 0).std(2) + x.std(2),
    "sum in integers": lambda x: x * (x.long().sum(2, dtype=torch.int32).dtype == torch.int32),
    "numpy's names": lambda x: (
        x.sort(axis=0)[0] * x.amax(2, keepdims=True) + torch.cat(x.chunk(2, axis=1), axis=1)
    ),
    "weighted mse": lambda x: F.mse_loss(x, held(x).detach(), weight=held(x).detach().exp()),
    "softmax, as float32": lambda x: x * (x.softmax(2, torch.float32).dtype == torch.float32),
    "narrow from the end": lambda x: x.narrow(2, -3, 2) + x.narrow(2, 0, 2),
    "einsum of one point": lambda x: torch.einsum("nchw,nchw->nhw", x, param(4, 6, 1, 1)),
    "slope of a sum": lambda x: torch.autograd.grad(x.pow(3).sum() * 2, x, create_graph=True)[0],
    "slope of points": lambda x: torch.autograd.grad(x.pow(3), x, x * 2, create_graph=True)[0],
    "conv, split bias": lambda x: F.conv2d(x, param(10, 6, 3, 3), x[0, 0, 0]),
    "attended tokens": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).mT[:, None]] * 3),
}
SEQUENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, param(5, 8), param(5)),
    "layer_norm": lambda x: F.layer_norm(x, (8,), param(8), param(8)),
    "rms_norm": lambda x: F.rms_norm(x, (8,), param(8)) + F.rms_norm(x, (7, 8), eps=0.1),
    "class token": lambda x: torch.cat([param(1, 1, 8).expand(4, -1, -1), x], 1)[:, 0],
    "class token 2": lambda x: torch.cat([param(1, 1, 8).expand(4, -1, -1), x], 1)[:, 1:] + x,
    "positions": lambda x: x + param(1, 7, 8),
    "attention": lambda x: F.scaled_dot_product_attention(*_heads(x)),
    "causal": lambda x: F.scaled_dot_product_attention(*_heads(x), is_causal=True),
    "masked": lambda x: F.scaled_dot_product_attention(*_heads(x), attn_mask=param(7, 7)),
    "by hand": lambda x: _by_hand(*_heads(x)),
    "multi head": lambda x: F.multi_head_attention_forward(
        *[x.transpose(0, 1)] * 3, 8, 2, param(24, 8), param(24), None, None, False, 0.0,
        param(8, 8), param(8), need_weights=False,
    )[0],
    "multi head, hidden keys": lambda x: F.multi_head_attention_forward(
        *[x.transpose(0, 1)] * 3, 8, 2, param(24, 8), param(24), None, None, False, 0.0,
        param(8, 8), param(8), need_weights=False, attn_mask=param(7, 7).triu(1) > 0.3,
    )[0],
    "cross": lambda x: F.scaled_dot_product_attention(x, param(4, 5, 8), param(4, 5, 8)),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x * 2),
    "linear attention": lambda x: x @ (x.transpose(1, 2) @ x),
    "conv1d": lambda x: F.conv1d(x.transpose(1, 2), param(3, 8, 3), padding=1),
    "pool of nothing": lambda x: F.max_pool1d(x.mT - torch.inf, 3, 2, 1),
    "pool windows": lambda x: F.avg_pool1d(x.mT, 3, 2, 1, True) + F.max_pool1d(x.mT, 3, 2, 1),
    "pool": lambda x: F.adaptive_avg_pool1d(x.transpose(1, 2), 1).squeeze(-1),
    "last": lambda x: x[:, -1] @ param(8, 3),
    "gathered ids": lambda x: x.gather(1, torch.zeros(4, 2, 8, dtype=torch.long)),
    "baddbmm": lambda x: torch.baddbmm(param(4, 7, 7), x, x.transpose(1, 2), alpha=0.5),
    "flip": lambda x: x.flip(1, 2) * x,
    "diagonals": lambda x: x.diagonal(-1, 1, 2) * 2 + x.diagonal(1, 1, 2)[:, :6],
    "diagonals made": lambda x: torch.diag_embed(x, 1) + torch.diag_embed(x, -1),
    "norms": lambda x: torch.linalg.vector_norm(x, 3, 1) * x.norm(p=5) + x.renorm(2, 1, 0.5).sum(),
    "distances": lambda x: torch.dist(x, param(4, 7, 8), 6) * x,
    "bilinear": lambda x: F.bilinear(x, param(4, 7, 5), param(3, 8, 5), param(3)),
    "one scattered": lambda x: torch.select_scatter(x, param(4, 8), 1, 2) * x,
    "filters": lambda x: F.conv1d(param(2, 7, 9), x, param(4)),
    "filters of a transposed": lambda x: F.conv_transpose1d(param(2, 4, 5), x, stride=2),
    "scale and shift": lambda x: F.layer_norm(param(2, 4, 7, 8), (7, 8), x[0], x[1]),
    "a vector of features": lambda x: x @ x[0, 0] + F.linear(x[0, 0], param(3, 8)).sum(),
}  # fmt: skip


def _set(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 1:3, 2] = 0.5
    return y * 2


def _heads(x: Tensor) -> list[Tensor]:
    qkv = (x @ param(8, 24)).reshape(x.shape[0], x.shape[1], 3, 2, 4).permute(2, 0, 3, 1, 4)
    return list(qkv.unbind(0))


def _by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = ((q @ k.transpose(-2, -1)) * 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def compare(
    program: Callable[[Tensor], Tensor], shape: tuple[int, ...], cuts: dict[int, int]
) -> None:
    """Run a program whole and on blocks; outputs, and gradients of a loss of them, must agree."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    y = program(x)
    probe = torch.randn(y.shape, dtype=torch.float64, generator=generator)
    (wanted,) = torch.autograd.grad((y * probe).sum(), x)

    partition = Partition([cuts.get(d, 1) for d in range(len(shape))])
    if not partition.active:
        return
    own = partition.local_slices(shape)
    block = x.detach()[own].clone().requires_grad_()
    split = Split.of(block, partition)
    result = program(split)
    whole = result.whole() if isinstance(result, Split) else result
    torch.testing.assert_close(whole, y, rtol=1e-9, atol=1e-11)
    loss = (result * probe).sum()
    assert not isinstance(loss, Split)
    (grad,) = torch.autograd.grad(loss, block)
    torch.testing.assert_close(grad, wanted[own], rtol=1e-9, atol=1e-11)


@pytest.mark.ranks(3, backend="shm")
@pytest.mark.parametrize("name", IMAGES)
def test_images_cut_in_any_dim(name):
    for cuts in ({0: 3}, {1: 3}, {2: 3}, {3: 3}, {2: 2}, {0: 2}):
        compare(IMAGES[name], IMAGE, cuts)


@pytest.mark.ranks(4, backend="shm")
@pytest.mark.parametrize("name", IMAGES)
def test_images_cut_in_two_dims(name):
    for cuts in ({2: 2, 3: 2}, {0: 2, 2: 2}, {1: 2, 3: 2}):
        compare(IMAGES[name], IMAGE, cuts)


@pytest.mark.ranks(4, backend="shm")
def test_two_cut_dims_that_a_view_merges_stay_cut():
    partition = Partition([1, 1, 2, 2])
    own = partition.local_slices(IMAGE)
    for name in ("flatten", "tokens and back", "back from tokens", "image beside tokens"):
        x = Split.of(param(*IMAGE).detach()[own], partition, strict=True)
        y = IMAGES[name](x)
        assert isinstance(y, Split)
        assert y.local.numel() <= 3 * 10 * y.numel() / 90, name  # three rows of nine at most


@pytest.mark.ranks(3, backend="shm")
@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_cut_in_any_dim(name):
    for cuts in ({0: 3}, {1: 3}, {2: 3}, {1: 2}):
        compare(SEQUENCES[name], TOKENS, cuts)


TWICE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attention to itself": lambda x, w: (
        lambda y: F.scaled_dot_product_attention(y, y, y[..., :3])
    )(x * w),
    "a norm twice": lambda x, w: (
        lambda norm: norm(norm(x, (7, 8), w[0, 0], w[0, 0]).square(), (7, 8), w[0, 0], w[0, 0])
    )(F.layer_norm),
    "a convolution twice": lambda x, w: (
        lambda conv: conv(conv(x, w, None, 1, (3, 4)).square(), w)
    )(F.conv2d),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", TWICE)
def test_slopes_that_are_differentiated_again_where_inputs_depend_on_each_other(name):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((4, 1, 7, 8), dtype=torch.float64, generator=generator)

    def slopes(leaf: Tensor, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        weight = param(1, 1, 7, 8)
        y = TWICE[name](x, weight).pow(3).sum()
        first = torch.autograd.grad(y, [leaf, weight], create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), [leaf, weight])
        return [first[0], second[0]], [first[1], second[1]]

    for partition in (Partition([2, 1, 1, 1]), Partition([1, 1, 2, 1]), Partition([1, 1, 1, 2])):
        own = partition.local_slices(x.shape)
        whole, block = x.clone().requires_grad_(), x[own].clone().requires_grad_()
        found, wanted = slopes(block, Split.of(block, partition)), slopes(whole, whole)
        torch.testing.assert_close(found[0], [slope[own] for slope in wanted[0]])
        torch.testing.assert_close(found[1], wanted[1])


@pytest.mark.ranks(2, backend=["gloo", "shm"])
def test_gradients_that_torch_keeps_without_memory_reach_every_rank():
    """Of `sgn` the first derivative, of an absolute value the second, is zeros without storage."""
    x = param(5, 4)
    whole = Split.cut(x, Partition([2, 1]))
    slope = torch.autograd.grad(whole.sgn().whole().sum(), x)[0]
    assert torch.equal(slope, torch.zeros_like(x))
    for function in (Tensor.abs, lambda y: F.l1_loss(y, y.detach() + 1)):
        first = torch.autograd.grad(function(whole).sum(), x, create_graph=True)[0]
        (second,) = torch.autograd.grad(first.square().sum(), x, allow_unused=True)
        assert second is None or torch.equal(second, torch.zeros_like(x))


REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "narrow beyond": lambda x: x.narrow(2, 5, 100),
    "unknown reduction": lambda x: F.mse_loss(x, x, reduction="most"),
    "unknown reduction of classes": lambda x: F.nll_loss(
        x, torch.zeros(4, 9, 10).long(), reduction="most"
    ),
    "norm of another shape": lambda x: F.layer_norm(x, (5, 10)),
    "size and factor": lambda x: F.interpolate(x, 4, 2.0),
    "wide reflection": lambda x: F.pad(x, (0, 0, 9, 0), mode="reflect"),
    "two rounds": lambda x: F.pad(x, (0, 0, 10, 0), mode="circular"),
    "pool beyond": lambda x: F.max_pool2d(x, (2, 1), 1, (2, 0)),
    "probability": lambda x: F.dropout(x, 1.5),
}
UNSEEN: dict[str, Callable[[Tensor], object]] = {
    "another shape in place": lambda x: x.transpose_(2, 3),
    "data": lambda x: setattr(x, "data", x * 2),
    "several outs": lambda x: torch.frexp(x, out=(x * 1, x.int())),
}


@pytest.mark.ranks(2)
def test_what_torch_refuses_and_what_no_rank_would_see_is_refused():
    partition = Partition([1, 1, 2, 1])
    block = param(*IMAGE).detach()[partition.local_slices(IMAGE)]
    for refused in REFUSED.values():
        with pytest.raises((RuntimeError, ValueError, PartitionError)):
            refused(param(*IMAGE).detach())
        with pytest.raises((RuntimeError, ValueError, PartitionError)):
            refused(Split.of(block, partition))
    for unseen in UNSEEN.values():
        with pytest.raises(UnisonoError, match="HINT"):
            unseen(Split.of(block.clone(), partition))
    compare(IMAGES["pad circular"], IMAGE, {2: 2})


@pytest.mark.ranks(2)
def test_a_split_leaf_takes_gradients_as_a_plain_one_does():
    x = Split.of(torch.ones(3, 2), Partition([2, 1]))
    x.requires_grad = True
    (x * 2).sum().backward()
    assert torch.equal(x.grad.whole(), torch.full((6, 2), 2.0))
    x.grad = None
    assert x.grad is None


@pytest.mark.ranks(2)
def test_channels_of_a_single_sample_are_dropped_whole():
    for shape, drop in (((16, 5), F.dropout1d), ((16, 2, 3, 5), F.dropout3d)):
        for parts in (
            Partition([2, *[1] * (len(shape) - 1)]),
            Partition([*[1] * (len(shape) - 1), 2]),
        ):
            x = torch.ones(shape)[parts.local_slices(shape)]
            kept = drop(Split.of(x, parts), 0.5).whole().flatten(1)
            assert torch.equal(kept.amin(1), kept.amax(1))
            assert 0 < kept.count_nonzero() < kept.numel()


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "std": lambda x: x.std(0),
    "norm": lambda x: x.norm(dim=0),
    "softmax": lambda x: (x * 0).softmax(0) * 65536,
    "mse_loss": lambda x: F.mse_loss(x, x * 0),
    "kl_div": lambda x: F.kl_div(x / 64, x * 0 + 1, reduction="batchmean"),
    "cross_entropy": lambda x: F.cross_entropy(
        torch.cat([x, -x], 1)[:, :2], torch.ones(len(x), dtype=torch.long), label_smoothing=0.1
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_16_bit_values_neither_overflow_nor_lose_digits(name):
    """What is summed over ranks exceeds 65504, or is a count above 256."""
    partition = Partition([2, 1])
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((70001, 1), 30.0, dtype=dtype)
        x[::2] = 10.0
        wanted = SUMS[name](x.float())
        found = SUMS[name](Split.of(x[partition.local_slices(x.shape)], partition))
        whole = found.whole() if isinstance(found, Split) else found
        assert whole.dtype == dtype
        torch.testing.assert_close(whole.float(), wanted, rtol=3 * torch.finfo(dtype).eps, atol=0.0)


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(2),
    "max_pool": lambda x: F.max_pool2d(x.int(), 3, 2, 1),
    "avg_pool": lambda x: F.avg_pool2d(x.long(), 3, 2, 1, count_include_pad=False),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(13, 21), mode="bilinear"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_become_what_torch_makes_of_them(name):
    x = torch.randint(255, IMAGE, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for partition in (Partition([1, 1, 2, 1]), Partition([1, 1, 1, 2])):
        y = INTEGERS[name](Split.of(x[partition.local_slices(IMAGE)], partition))
        whole, wanted = y.whole() if isinstance(y, Split) else y, INTEGERS[name](x)
        assert whole.dtype == wanted.dtype
        assert torch.equal(whole, wanted)
    with pytest.raises(RuntimeError, match="floating point"):
        Split.of(x[partition.local_slices(IMAGE)], partition).var(3)

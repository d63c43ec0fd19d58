"""Public networks, unmodified, on blocks: outputs, gradients and statistics of one process.

Float64, random weights, every network under every cut. An output, the gradient of the input and a
running statistic agree to 1e-9 of their largest value. So does the gradient of each parameter; if
it is smaller than 1e-4 of the network's largest one, it is compared with that instead: a bias
before a norm, or of keys, has the gradient 0, and what any computation finds there is rounding of
numbers as large as the others. For the same reason the mean of a norm is compared with its standard
deviation: what comes out of one norm and goes through a convolution has the mean 0 in the next.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono import Partition
from unisono.nn import Split, split
from unisono.nn.split_tensors import Gathered
from unisono.testing.pool import RankPool

NEEDED = {
    "monai": "monai.networks.nets",
    "einops": "einops",
    "transformers": "transformers.models.segformer",
    "diffusers": "diffusers.models.unets.unet_2d",
}
TOLERANCE = 1e-9
SMALL_GRADIENT = 1e-4

CUTS = {
    "rows": {2: 2},
    "rows by 3": {2: 3},
    "columns": {3: 2},
    "columns by 3": {3: 3},
    "rows and columns": {2: 2, 3: 2},
    "batch": {0: 2},
    "batch by 3": {0: 3},
}
Case = tuple[str, bool, bool]
"""Cut, odd sizes, train."""
ALWAYS: Case = ("rows and columns", True, True)
IN_TURN: list[Case] = [
    ("rows", False, True),
    ("columns by 3", True, False),
    ("batch", False, True),
    ("rows by 3", True, True),
    ("columns", False, True),
    ("batch by 3", True, False),
    ("rows and columns", False, False),
]
"""Each network takes two of them."""


def _monai(name: str, *args: Any, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("monai.networks.nets"), name)(*args, **options)


def _transformers(config: str, model: str, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    return getattr(library, model)(getattr(library, config)(**options))


def _diffusers(name: str, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("diffusers"), name)(**options)


ATTENTION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 24,
    "patch_size": 4,
}
# Library; the network; an even and an odd shape (as odd as the network itself allows); what its
# forward gets beside the image.
NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], list[tuple[int, ...]], dict[str, Any]]] = {
    "UNet": (
        "monai",
        lambda: _monai(
            "UNet", 2, 3, 4, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm="batch"
        ),
        [(2, 3, 16, 24), (3, 3, 20, 28)],
        {},
    ),
    "resnet18": (
        "monai",
        lambda: _monai(
            "ResNet", "basic", [2, 2, 2, 2], [4, 6, 8, 8], spatial_dims=2, n_input_channels=3,
            num_classes=5,
        ),
        [(2, 3, 64, 96), (3, 3, 67, 53)],
        {},
    ),
    "SEResNet50": (
        "monai",
        lambda: _monai("SEResNet50", (1, 1, 1, 1), spatial_dims=2, in_channels=3, num_classes=2),
        [(2, 3, 64, 96), (3, 3, 69, 67)],
        {},
    ),
    "SwinUNETR": (
        "monai",
        lambda: _monai(
            "SwinUNETR", in_channels=3, out_channels=2, feature_size=12, spatial_dims=2,
            depths=(2, 1, 1, 1), num_heads=(1, 2, 3, 4),
        ),
        [(2, 3, 64, 96), (3, 3, 96, 64)],
        {},
    ),
    "ViT": (
        "transformers",
        lambda: _transformers("ViTConfig", "ViTModel", **ATTENTION),
        [(2, 3, 24, 32), (3, 3, 28, 20)],
        {"interpolate_pos_encoding": True},
    ),
    "SegFormer": (
        "transformers",
        lambda: _transformers(
            "SegformerConfig", "SegformerForSemanticSegmentation", num_encoder_blocks=4,
            depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 2, 2, 4],
            decoder_hidden_size=16, num_labels=3, classifier_dropout_prob=0.0,
        ),
        [(2, 3, 96, 128), (3, 3, 101, 99)],
        {},
    ),
    "ConvNeXt": (
        "transformers",
        lambda: _transformers(
            "ConvNextConfig", "ConvNextForImageClassification", num_stages=4,
            hidden_sizes=[4, 8, 8, 8], depths=[1, 1, 2, 1], num_labels=3, drop_path_rate=0.2,
        ),
        [(2, 3, 96, 128), (3, 3, 101, 107)],
        {},
    ),
    "MobileNetV2": (
        "transformers",
        lambda: _transformers(
            "MobileNetV2Config", "MobileNetV2ForImageClassification", num_labels=3,
            depth_multiplier=0.25, classifier_dropout_prob=0.0,
        ),
        [(2, 3, 64, 96), (3, 3, 75, 67)],
        {},
    ),
    "UNet2DModel": (
        "diffusers",
        lambda: _diffusers(
            "UNet2DModel", sample_size=16, in_channels=3, out_channels=3, layers_per_block=1,
            block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, attention_head_dim=8,
        ),
        [(2, 3, 16, 24), (3, 3, 18, 22)],
        {"timestep": 7},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks_with_networks(rank_pool: RankPool) -> Iterator[RankPool]:
    """Ranks forked from a process that has loaded the three libraries, which takes a while."""
    found = [module for name, module in NEEDED.items() if importlib.util.find_spec(name)]
    with RankPool(preload=found) as pool:
        pool.by_value = rank_pool.by_value
        yield pool


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_public_network_on_blocks_is_that_of_one_process(name, ranks_with_networks):
    library = NETWORKS[name][0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'unisono[others]'")
    ranks_with_networks.run(compare_all, name, world=4, backend="shm", timeout=120)


VIDEO = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "latent_channels": 4}
LINEAR = {
    f"{part}_{key}": value
    for part in ("encoder", "decoder")
    for key, value in {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 16),
        "layers_per_block": (1, 1),
        "qkv_multiscales": ((), (5,)),
    }.items()
}
# Arguments and the shape of an image or a video.
AUTOENCODERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKL": (
        {"block_out_channels": (8, 16), "latent_channels": 4, "norm_num_groups": 4,
         "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        (1, 3, 16, 16),
    ),
    "AutoencoderKLWan": (
        {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1,
         "temperal_downsample": [True]},
        (1, 3, 5, 16, 16),
    ),
    "AutoencoderKLHunyuanVideo": (VIDEO | {"norm_num_groups": 4}, (1, 3, 5, 32, 32)),
    "AutoencoderKLLTXVideo": (
        {"block_out_channels": (8, 8, 16, 16), "decoder_block_out_channels": (8, 8, 16, 16),
         "layers_per_block": (1,) * 5, "decoder_layers_per_block": (1,) * 5, "latent_channels": 8},
        (1, 3, 9, 64, 64),
    ),
    "AutoencoderDC": (LINEAR | {"latent_channels": 4, "attention_head_dim": 4}, (1, 3, 16, 16)),
    "AutoencoderKLCogVideoX": (VIDEO | {"norm_num_groups": 4}, (1, 3, 5, 32, 32)),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", AUTOENCODERS)
def test_an_autoencoder_encodes_and_decodes_blocks_of_images_and_videos(name, ranks_with_networks):
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed: pip install 'unisono[others]'")
    ranks_with_networks.run(compare_autoencoder, name, world=4, backend="shm", timeout=120)


def compare_autoencoder(name: str) -> None:
    """Compare outputs and gradients of a cut along the height, and along height and width.

    Some of these networks compute norms in float32, whatever their dtype.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    arguments, shape = AUTOENCODERS[name]
    net = _diffusers(name, **arguments).double().eval()
    x = drawn(shape, 1).requires_grad_()
    wanted = net(x).sample
    (slope,) = torch.autograd.grad(wanted.square().mean(), x)
    for cut in ((2, 1), (2, 2)):
        partition = Partition([*[1] * (len(shape) - 2), *cut])
        if not partition.active:
            continue
        own = partition.local_slices(shape)
        block = x.detach()[own].clone().requires_grad_()
        parts = split(net, partition)
        y = parts(block).sample
        (found,) = torch.autograd.grad(y.square().mean(), block)
        assert isinstance(y, Split)
        torch.testing.assert_close(y.whole(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found, slope[own], rtol=1e-4, atol=1e-5 * float(slope.abs().max())
        )
        large = 0.05 * 8 / 3 * x.numel()  # of the largest activation, which has 8 channels
        assert all(torch.Size(of.shape).numel() <= large for of, _ in parts.report())


# Arguments and the shape of a volume.
VOLUMES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "UNet": (
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "channels": (8, 16),
         "strides": (2,), "num_res_units": 1},
        (1, 1, 12, 12, 12),
    ),
    "SegResNet": (
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "init_filters": 8,
         "blocks_down": (1, 1), "blocks_up": (1,)},
        (1, 1, 12, 12, 12),
    ),
    "SwinUNETR": (
        {"spatial_dims": 3, "in_channels": 1, "out_channels": 2, "feature_size": 12,
         "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
        (1, 1, 64, 32, 32),
    ),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", VOLUMES)
def test_a_network_of_volumes_runs_on_slabs_and_columns(name, ranks_with_networks):
    if importlib.util.find_spec("monai") is None:
        pytest.skip("monai is not installed: pip install 'unisono[others]'")
    ranks_with_networks.run(compare_volume, name, world=4, backend="shm", timeout=120)


def compare_volume(name: str) -> None:
    """Compare a step of a network of volumes with that of one process."""
    arguments, shape = VOLUMES[name]
    torch.manual_seed(0)
    compare_cuts(_monai(name, **arguments).double(), shape)


def compare_cuts(
    net: nn.Module,
    shape: tuple[int, ...],
    *others: Tensor,
    gathered: float = 0.05,
    tolerance: float = TOLERANCE,
) -> None:
    """Compare output and gradients where dim 2 is cut, and where dims 2 and 3 are.

    Nothing that is gathered is larger than this share of the largest activation.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sizes: list[int] = []
    watched = copy.deepcopy(net)
    for module in watched.modules():
        module.register_forward_hook(
            lambda _, __, y: sizes.append(y.numel() if isinstance(y, Tensor) else 0)
        )
    watched(drawn(shape, 1).to(dtype_of(net)), *others)
    for cut in ({2: 2}, {2: 2, 3: 2}):
        report = compare(copy.deepcopy(net), shape, cut, *others, tolerance=tolerance)
        large = [of for of in report if torch.Size(of.shape).numel() > gathered * max(sizes)]
        assert not large, (cut, max(sizes), large)


def compare_all(name: str) -> None:
    """Compare every case of a network; ranks that a cut does not need wait."""
    warnings.simplefilter("ignore")  # what these libraries warn of is not ours
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    net = NETWORKS[name][1]().double()
    number = list(NETWORKS).index(name)
    cases = [ALWAYS, *(IN_TURN[(2 * number + i) % len(IN_TURN)] for i in range(2))]
    _, _, shapes, options = NETWORKS[name]
    for cut, is_odd, train in cases:
        try:
            model = copy.deepcopy(net).train(train)
            report = compare(model, shapes[is_odd], CUTS[cut], **options)
        except BaseException as error:
            error.add_note(f"{name}, {cut}, {'odd' if is_odd else 'even'}, train={train}")
            raise
        # Gathered are dims with fewer points than ranks, and what is smaller than what it meets.
        reasons = "points for", "smaller argument"
        assert all(any(r in of.reason for r in reasons) for of in report), report


def compare(
    net: nn.Module,
    shape: tuple[int, ...],
    cut: dict[int, int],
    *others: Tensor,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> list[Gathered]:
    """Compare a step of a network on blocks with that of one process; return what was gathered."""
    partition = Partition([cut.get(dim, 1) for dim in range(len(shape))])
    if not partition.active:
        return []
    whole, dtype = copy.deepcopy(net), dtype_of(net)
    x = drawn(shape, 1).to(dtype).requires_grad_()
    torch.manual_seed(1)  # of paths that are dropped
    wanted = tensors_in(whole(x, *others, **options))
    probes = [drawn(y.shape, 2 + i).to(dtype) for i, y in enumerate(wanted)]
    scored(wanted, probes).backward()

    own = partition.local_slices(shape)
    block = x.detach()[own].clone().requires_grad_()
    parts = split(net, partition)
    torch.manual_seed(1)
    found = tensors_in(parts(block, *others, **options))
    assert any(isinstance(y, Split) for y in found) or all(y.ndim < 3 for y in found)
    scored(found, probes).backward()

    assert len(found) == len(wanted)
    for y, z in zip(found, wanted, strict=True):
        agree(y.whole() if isinstance(y, Split) else y, z, "output", tolerance * z.abs().max())
    assert x.grad is not None
    limit = tolerance * x.grad.abs().max()
    agree(block.grad, x.grad[own], "gradient of the input", limit)
    grads = {key: p.grad for key, p in whole.named_parameters()}
    top = max(grad.abs().max() for grad in grads.values() if grad is not None)
    for key, p in net.named_parameters():
        grad = grads[key]
        if grad is None:
            assert p.grad is None, key
        else:
            scale = max(grad.abs().max(), SMALL_GRADIENT * top)
            agree(p.grad, grad, key, tolerance * scale)
    buffers = dict(whole.named_buffers())
    for key, b in net.named_buffers():
        c = buffers[key].double()
        scale = c.abs().max()
        if key.endswith("running_mean"):
            scale = max(scale, buffers[key.replace("mean", "var")].max().sqrt())
        agree(b.double(), c, key, tolerance * scale)
    return [of for of, _ in parts.report()]


def dtype_of(net: nn.Module) -> torch.dtype:
    return next(net.parameters()).dtype


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the same numbers on every rank."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors_in(y: Any) -> list[Tensor]:
    """Return all tensors of an output, which may be a structure of its library."""
    if isinstance(y, Tensor):
        return [y]
    return [t for part in (y.to_tuple() if hasattr(y, "to_tuple") else y) for t in tensors_in(part)]


def scored(ys: list[Tensor], probes: list[Tensor]) -> Tensor:
    """Return a number to which every point of every output has its own weight."""
    total = torch.zeros((), dtype=probes[0].dtype)
    for y, probe in zip(ys, probes, strict=True):
        total = total + (y * probe).sum()
    return total


def agree(found: Tensor, wanted: Tensor, what: str, limit: Tensor) -> None:
    assert found.shape == wanted.shape, what
    assert (found - wanted).abs().max() <= limit, what

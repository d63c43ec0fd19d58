"""pytagi's names: `from unisono.compat.pytagi.nn import Linear, Sequential`.

The very classes of `unisono.bayes`, so there is nothing to convert between the two.
"""

from __future__ import annotations

from unisono import bayes
from unisono.bayes import cuda, metric
from unisono.compat.modules import Module, build


def _itself(thing: object) -> object:
    """The object: it has no other one behind it."""
    return thing


# Objects of pytagi wrap one of C++ each, and programs reach for it now and then.
for _kind in (
    bayes.BaseLayer, bayes.BaseDeltaStates, bayes.BaseHiddenStates, bayes.DDPConfig,
    bayes.DDPSequential, bayes.HRCSoftmax, bayes.HRCSoftmaxMetric, bayes.Normalizer,
    bayes.OutputUpdater, bayes.Sequential, bayes.Utils,
):  # fmt: skip
    setattr(_kind, "_cpp_backend", property(_itself))  # noqa: B010

TOOLS = (bayes, "HRCSoftmax Normalizer Utils exponential_scheduler")
_LAYERS = {
    "activation": "ClosedFormSoftmax EvenExp LeakyReLU MixtureReLU MixtureSigmoid MixtureTanh ReLU "
    "Remax Sigmoid Softmax Softplus Tanh",
    "attention": "MultiheadAttention",
    "base_layer": "BaseLayer",
    "batch_norm": "BatchNorm2d",
    "conv2d": "Conv2d",
    "convtranspose2d": "ConvTranspose2d",
    "data_struct": "BaseDeltaStates BaseHiddenStates HRCSoftmax",
    "ddp": "DDPConfig DDPSequential",
    "embedding": "Embedding",
    "layer_block": "LayerBlock",
    "layer_norm": "LayerNorm",
    "linear": "Linear",
    "lstm": "LSTM",
    "output_updater": "OutputUpdater",
    "pooling": "AvgPool2d MaxPool2d",
    "resnet_block": "ResNetBlock",
    "rms_norm": "RMSNorm",
    "sequential": "Sequential",
    "slinear": "SLinear",
    "slstm": "SLSTM",
}
"""Module of `pytagi.nn` -> its classes."""

__version__ = "0.2.1"

MODULES = {
    "": Module(
        "",
        TOOLS,
        (bayes, "HRCSoftmaxMetric manual_seed"),
        (cuda, "is_cuda_available=is_available"),
    ),
    "cuda": Module(
        "pytagi's `cuda`: questions about devices.",
        (cuda, "get_current_device get_device_count get_device_memory get_device_properties"),
        (cuda, "is_available is_device_available is_nccl_available set_device"),
    ),
    "metric": Module(
        "pytagi's `metric`: errors and likelihoods.",
        (metric, "HRCSoftmaxMetric classification_error log_likelihood mse rmse"),
    ),
    "nn": Module(
        "pytagi's `nn`: every layer, `Sequential`, the updater, data-parallel training.",
        *((bayes, names) for names in _LAYERS.values()),
    ),
    "tagi_utils": Module("pytagi's `tagi_utils`: scaling, schedules, class trees.", TOOLS),
} | {f"nn.{path}": Module(f"pytagi's `nn.{path}`.", (bayes, n)) for path, n in _LAYERS.items()}

build(__name__, MODULES)

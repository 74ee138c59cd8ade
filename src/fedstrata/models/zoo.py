"""Models by name, each built from the shape of one input and the number of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.named import registered
from fedstrata.core.options import check, param
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.models.augment import augmentations
from fedstrata.models.layers import (
    ChannelsLast,
    CharacterLSTM,
    Columns,
    Depthwise,
    MeanOverPositions,
    Patches,
    Pointwise,
    Residual,
    ResidualBlock,
)

Shape = Sequence[int]
Norm = Literal["group", "batch"]
F = TypeVar("F", bound=Callable[..., nn.Module])

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", hint=YOUR_OWN)
"""Every model by its name in a configuration file."""

_RECIPE = "_recipe_of_fedstrata"
"""An attribute of the modules that :func:`model` returns."""

NORM = param("group", "normalisation layers; 'batch' also needs batchnorm = 'batch' in the problem")
WIDTH = param(32, "channels of the first layer", least=1)


@registered(MODELS)
def logreg(shape: Shape, outputs: int) -> nn.Module:
    """Build logistic (softmax) regression: one linear layer on the flattened input, initialised to zero."""
    linear = nn.Linear(math.prod(shape), outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


@registered(MODELS)
def mlp(
    shape: Shape,
    outputs: int,
    hidden: Sequence[int] = param((200, 200), "widths of the hidden layers", least=1),
    dropout: float = param(0.0, "dropout after each hidden layer", least=0, below=1),
) -> nn.Module:
    """Build a multilayer perceptron with ReLU and hidden layers of the widths ``hidden``."""
    if not hidden:
        raise invalid("hidden of the mlp model", hidden, "at least one width")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for h in hidden:
        layers += [nn.Linear(width, h), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        width = h
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@registered(MODELS)
def lenet5(shape: Shape, outputs: int) -> nn.Module:
    """Build LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 6 and 16 kernels of 5x5, then 120, 84, outputs."""
    channels, height, width = _image(shape, "lenet5", 12)
    padding = 2 if height <= 28 else 0
    side = [((n + 2 * padding - 4) // 2 - 4) // 2 for n in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side[0] * side[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, outputs),
    )


@registered(MODELS)
def patchnet(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Build two convolutions over adjacent patches (4x4 to ``width`` channels, 2x2 to twice as many), then outputs.

    A convolution whose stride equals its kernel size is a linear map of patches, which is fast for many clients at once
    and for second derivatives. Sides that are not multiples of 8 are padded with zeros.
    """
    channels, height, side = _image(shape, "patchnet", 4)
    positions = math.ceil(height / 8) * math.ceil(side / 8)
    return nn.Sequential(
        ChannelsLast(),
        Patches(4),
        nn.Linear(16 * channels, width),
        nn.ReLU(),
        Patches(2),
        nn.Linear(4 * width, 2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * positions, outputs),
    )


@registered(MODELS)
def cnn4(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Build two 3x3 convolutions (``width``, 2 ``width``) with max pooling, then layers of 128 and outputs."""
    channels, height, side = _image(shape, "cnn4", 4)
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (side // 4), 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


@registered(MODELS)
def cnn7(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Build three pairs of 3x3 convolutions (``width``, 2 ``width``, 4 ``width``) with max pooling, then outputs."""
    channels, height, side = _image(shape, "cnn7", 8)
    layers: list[nn.Module] = []
    inside = channels
    for outside in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inside = outside
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inside * (height // 8) * (side // 8), outputs))


@registered(MODELS)
def resnet20(
    shape: Shape,
    outputs: int,
    norm: Norm = NORM,
    width: int = param(16, "channels of the first layer", least=1),
) -> nn.Module:
    """Build ResNet-20 for small images (He et al. 2016, section 4.2); ``norm`` is "group" (8 groups) or "batch".

    "batch" keeps running statistics: build the problem with ``batchnorm="batch"`` to use those of the batch instead.
    """
    channels, _, _ = _image(shape, "resnet20", 4)
    normed = _norm(norm)
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), normed(width), nn.ReLU()]
    inside = width
    for outside, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range(3):
            layers.append(ResidualBlock(inside, outside, stride if block == 0 else 1, normed))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, outputs))


@registered(MODELS)
def convmixer(
    shape: Shape,
    outputs: int,
    width: int = param(256, "channels", least=1),
    depth: int = param(8, "number of blocks, each a depthwise and a pointwise convolution", least=1),
    kernel: int = param(5, "side of the depthwise kernels, an odd number", least=1),
    patch: int = param(2, "side of a patch", least=1),
    norm: Norm = NORM,
) -> nn.Module:
    """Build ConvMixer (Trockman & Kolter 2022): patches, then ``depth`` times a depthwise and a pointwise convolution.

    Maps of up to 64 patches (32x32 images in patches of 4) are convolved by matrix products, which is faster and lets
    clients advance together. ``norm`` is "group" (a pure function of the weights) or "batch", the authors' choice,
    which keeps running statistics: build the problem with ``batchnorm="batch"`` to use those of the batch instead.
    """
    if width == 1 and norm == "group":
        raise invalid(
            "width of the convmixer model",
            width,
            "at least 2, or norm='batch': the mean of a single normalised channel is 0",
        )
    if kernel % 2 == 0:
        raise invalid("kernel of the convmixer model", kernel, "an odd number")
    channels, height, side = _image(shape, "convmixer", patch)
    height, side = height // patch, side // patch
    normed = _norm(norm, 1 if height * side <= 64 else 2, alone=8)

    def active(layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, nn.GELU(), normed(width))

    if height * side <= 64:
        layers = [Columns(patch), active(Pointwise(channels * patch**2, width))]
        for _ in range(depth):
            layers += [Residual(active(Depthwise(width, kernel, height, side))), active(Pointwise(width, width))]
    else:
        layers = [active(nn.Conv2d(channels, width, patch, stride=patch))]
        for _ in range(depth):
            spatial = nn.Conv2d(width, width, kernel, groups=width, padding="same")
            layers += [Residual(active(spatial)), active(nn.Conv2d(width, width, 1))]
    return nn.Sequential(*layers, MeanOverPositions(), nn.Linear(width, outputs))


@registered(MODELS)
def lstm(
    shape: Shape,
    outputs: int,
    hidden: int = param(256, "units per layer", least=1),
    layers: int = param(2, "number of layers", least=1),
    embedding: int = param(8, "size of a character's embedding", least=1),
) -> nn.Module:
    """Build LEAF's stacked LSTM over characters: it takes tokens below ``outputs`` and predicts the next one."""
    if len(shape) != 1:
        raise InputError(f"The model lstm needs inputs of shape [length]. Got {tuple(shape)}.")
    return CharacterLSTM(outputs, embedding, hidden, layers)


def model(
    name: str,
    shape: Shape,
    outputs: int,
    *,
    seed: int = 0,
    augment: Sequence[str | Mapping[str, Any]] = (),
    **options: object,
) -> nn.Module:
    """Build a model by name, with initial weights that depend only on ``seed``; torch's random state is unchanged.

    ``augment`` adds random changes to the inputs, in training only, in this order: "flip", "crop", "jitter" or your own
    (:func:`augmentation`), or tables with their options, e.g. ``{"name": "crop", "padding": 2}``.
    """
    build = MODELS.find(name)
    values = check(build, options)
    if not isinstance(shape, tuple | list | torch.Size):
        raise invalid("shape of an input", shape, "a tuple such as (1, 28, 28)")
    layers = augmentations(augment, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            built = build(shape, outputs, **values)
            made = nn.Sequential(*layers, built) if layers else built
        except InputError:
            raise
        except (TypeError, RuntimeError, ValueError) as error:
            raise InputError(f"The model {name} cannot be built with the options {options}: {error}") from None
    if isinstance(made, nn.Module):  # a user's function may return anything
        setattr(made, _RECIPE, {"name": name, "shape": list(shape), "outputs": outputs, **options})
    return made


def recipe_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the arguments of :func:`model` that built a module, without augmentation; None if it was built by hand."""
    return getattr(module, _RECIPE, None)


def register(function: F) -> F:
    """Register a function that builds a model of your own, under its own name.

        @fs.models.register
        def bottleneck(shape, outputs, width: int = fs.param(16, "units of the hidden layer", least=1)):
            return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, outputs))

    It gets the shape of one input and the number of outputs. A file then uses it as ``[model]`` with ``name =
    "bottleneck"``, and its options are those declared with ``fs.param``. Initial weights are drawn from torch's
    generator, which is seeded for it.
    """
    return registered(MODELS)(function)


def _norm(norm: Norm, axes: int = 2, alone: int = 0) -> Callable[[int], nn.Module]:
    """Return a function that builds a norm for n channels; up to ``alone`` channels form a single group."""
    norms: dict[str, Callable[[int], nn.Module]] = {
        "group": lambda n: nn.GroupNorm(math.gcd(n, 8) if n > alone else 1, n),
        "batch": lambda n: nn.BatchNorm1d(n) if axes == 1 else nn.BatchNorm2d(n),
    }
    return norms[norm]


def _image(shape: Shape, name: str, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise InputError(
            f"The model {name} needs images [channels, height, width] of at least {least}x{least}. Got {tuple(shape)}."
        )
    return shape[0], shape[1], shape[2]

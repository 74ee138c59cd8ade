"""Models by name. Each takes the shape of one input and the number of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import check, options, param
from fedstrata.core.registry import Registry

Shape = Sequence[int]
Norm = Literal["group", "batch"]

NORM = param("group", "normalisation layers; batch needs batchnorm = 'batch' of the problem")
WIDTH = param(32, "channels of the first layer", least=1)


@options("the logreg model")
def logreg(shape: Shape, outputs: int) -> nn.Module:
    """Logistic (softmax) regression: one linear layer on the flattened input, starting at zero."""
    linear = nn.Linear(math.prod(shape), outputs)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


@options("the mlp model")
def mlp(
    shape: Shape, outputs: int, hidden: Sequence[int] = param((200, 200), "widths of the hidden layers", least=1)
) -> nn.Module:
    """Multilayer perceptron with ReLU."""
    if not hidden:
        raise invalid("hidden of the mlp model", hidden, "at least one width")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for h in hidden:
        layers += [nn.Linear(width, h), nn.ReLU()]
        width = h
    return nn.Sequential(*layers, nn.Linear(width, outputs))


@options("the lenet5 model")
def lenet5(shape: Shape, outputs: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: 6 and 16 kernels of 5x5, then 120, 84, outputs."""
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


class _Patches(nn.Module):
    """Cuts maps [B, H, W, channels] into patches side by side, each with all its numbers in the last axis."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.size
        x = nn.functional.pad(x, (0, 0, 0, -x.shape[2] % n, 0, -x.shape[1] % n))
        batch, height, width, channels = x.shape
        x = x.reshape(batch, height // n, n, width // n, n, channels).transpose(2, 3)
        return x.reshape(batch, height // n, width // n, n * n * channels)


class _ChannelsLast(nn.Module):
    """Puts the channels of images behind their rows and columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


@options("the patchnet model")
def patchnet(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Two convolutions without overlap (4x4 to ``width`` channels, 2x2 to twice as many), outputs.

    A convolution whose stride is its size is a linear map of patches: quick for many clients at once, and to
    differentiate twice. Images whose sides are not multiples of 8 are padded with zeros.
    """
    channels, height, side = _image(shape, "patchnet", 4)
    positions = math.ceil(height / 8) * math.ceil(side / 8)
    return nn.Sequential(
        _ChannelsLast(),
        _Patches(4),
        nn.Linear(16 * channels, width),
        nn.ReLU(),
        _Patches(2),
        nn.Linear(4 * width, 2 * width),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * positions, outputs),
    )


@options("the cnn4 model")
def cnn4(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Four-layer network: two 3x3 convolutions with max pooling (``width``, 2 ``width``), then 128 and outputs."""
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


@options("the cnn7 model")
def cnn7(shape: Shape, outputs: int, width: int = WIDTH) -> nn.Module:
    """Seven-layer network: three pairs of 3x3 convolutions (``width``, 2 and 4 times it) with max pooling, outputs."""
    channels, height, side = _image(shape, "cnn7", 8)
    layers: list[nn.Module] = []
    inside = channels
    for outside in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outside, outside, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inside = outside
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inside * (height // 8) * (side // 8), outputs))


class _Block(nn.Module):
    """A residual block of two 3x3 convolutions; the shortcut subsamples and pads with zeros (no weights)."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = norm(outside)
        self.stride, self.extra = stride, outside - inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        if self.extra:
            shortcut = nn.functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + shortcut)


@options("the resnet20 model")
def resnet20(
    shape: Shape,
    outputs: int,
    norm: Norm = NORM,
    width: int = param(16, "channels of the first layer", least=1),
) -> nn.Module:
    """ResNet-20 for small images (He et al. 2016, section 4.2), with group norms of 8 groups by default.

    Batch norms have running statistics: build the problem with ``batchnorm="batch"`` to use the batch's own instead.
    """
    channels, _, _ = _image(shape, "resnet20", 4)
    normed = _norm(norm)
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False), normed(width), nn.ReLU()]
    inside = width
    for outside, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
        for block in range(3):
            layers.append(_Block(inside, outside, stride if block == 0 else 1, normed))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, outputs))


class _Residual(nn.Module):
    """Adds its input to what a layer makes of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.layer(x)
        return out


class _Cut(nn.Module):
    """Cuts images [B, channels, H, W] into patches side by side: [B, numbers in a patch, patches]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        n = self.size
        x = x[:, :, : height // n * n, : width // n * n].reshape(batch, channels, height // n, n, width // n, n)
        return x.permute(0, 1, 3, 5, 2, 4).reshape(batch, channels * n * n, -1)


class _Pointwise(nn.Module):
    """A 1x1 convolution of maps [B, channels, positions], as a product of matrices."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Linear(channels, outputs).parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x + self.bias[:, None]


class _Depthwise(nn.Module):
    """A convolution within each channel of small maps [B, channels, positions], as a product of matrices.

    What a kernel does to a map of P positions is a P x P matrix whose entries are the kernel's; ``places`` says which
    stands where. For maps of up to 64 positions that is quicker than convolving, for several clients at once above all.
    """

    places: torch.Tensor

    def __init__(self, channels: int, kernel: int, height: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Conv2d(channels, channels, kernel, groups=channels).parameters()
        unit = torch.eye(height * width).reshape(-1, 1, height, width)
        taps = torch.eye(kernel**2).reshape(-1, 1, kernel, kernel)
        places = nn.functional.conv2d(unit, taps, padding=kernel // 2)  # from, tap, to
        self.register_buffer("places", places.flatten(2).transpose(0, 1).flatten(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = x.shape[-1]
        matrices = (self.weight.flatten(1) @ self.places.to(x.dtype)).reshape(-1, positions, positions)
        return (x.transpose(0, 1) @ matrices).transpose(0, 1) + self.bias[:, None]


class _Mean(nn.Module):
    """The mean over positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).mean(-1)


@options("the convmixer model")
def convmixer(
    shape: Shape,
    outputs: int,
    width: int = param(256, "channels", least=1),
    depth: int = param(8, "pairs of a depthwise and a pointwise convolution", least=1),
    kernel: int = param(5, "size of the depthwise kernels, an odd number", least=1),
    patch: int = param(2, "side of a patch", least=1),
    norm: Norm = NORM,
) -> nn.Module:
    """ConvMixer (Trockman & Kolter 2022): patches, then ``depth`` times a depthwise and a pointwise convolution.

    Maps of up to 64 patches (32x32 images in patches of 4) are convolved by products of matrices, which is faster and
    lets clients advance together. Group norms, the default, make it a pure function of the weights. Batch norms, the
    authors' own, have running statistics: build the problem with ``batchnorm="batch"`` to use the batch's own instead.
    """
    if width == 1 and norm == "group":
        raise invalid("width of the convmixer model", width, "at least 2, or norm='batch': one channel has no mean")
    if kernel % 2 == 0:
        raise invalid("kernel of the convmixer model", kernel, "an odd number")
    channels, height, side = _image(shape, "convmixer", patch)
    height, side = height // patch, side // patch
    normed = _norm(norm, 1 if height * side <= 64 else 2, alone=8)

    def active(layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer, nn.GELU(), normed(width))

    if height * side <= 64:
        layers = [_Cut(patch), active(_Pointwise(channels * patch**2, width))]
        for _ in range(depth):
            layers += [_Residual(active(_Depthwise(width, kernel, height, side))), active(_Pointwise(width, width))]
    else:
        layers = [active(nn.Conv2d(channels, width, patch, stride=patch))]
        for _ in range(depth):
            spatial = nn.Conv2d(width, width, kernel, groups=width, padding="same")
            layers += [_Residual(active(spatial)), active(nn.Conv2d(width, width, 1))]
    return nn.Sequential(*layers, _Mean(), nn.Linear(width, outputs))


class _Lstm(nn.Module):
    def __init__(self, outputs: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(outputs, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.is_floating_point():
            raise InputError("The model lstm takes sequences of class numbers, not of numbers with a point.")
        states, _ = self.lstm(self.embed(tokens.long()))
        out: torch.Tensor = self.out(states[:, -1])
        return out


@options("the lstm model")
def lstm(
    shape: Shape,
    outputs: int,
    hidden: int = param(256, "units of a layer", least=1),
    layers: int = param(2, "stacked layers", least=1),
    embedding: int = param(8, "size of a character's embedding", least=1),
) -> nn.Module:
    """Stacked LSTM over characters (LEAF's for Shakespeare): class numbers below ``outputs`` in, the next one out."""
    if len(shape) != 1:
        raise InputError(f"The model lstm wants sequences of numbers [length]. Got {tuple(shape)}.")
    return _Lstm(outputs, embedding, hidden, layers)


_BUILDERS: tuple[Callable[..., nn.Module], ...] = (
    *(logreg, mlp, lenet5, patchnet, cnn4, cnn7, resnet20, convmixer, lstm),
)

MODELS: Registry[Callable[..., nn.Module]] = Registry("model", {build.__name__: build for build in _BUILDERS})
"""Every model by its name in a configuration file."""


def model(name: str, shape: Shape, outputs: int, *, seed: int = 0, **options: object) -> nn.Module:
    """Build a model by name with reproducible starting weights, leaving torch's own random state alone."""
    build = MODELS.find(name)
    values = check(build, options)
    if not isinstance(shape, tuple | list | torch.Size):
        raise invalid("shape of an input", shape, "a tuple such as (1, 28, 28)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return build(shape, outputs, **values)
        except InputError:
            raise
        except (TypeError, RuntimeError, ValueError) as error:
            raise InputError(f"The model {name} cannot be built with the options {options}: {error}") from None


def _norm(norm: Norm, axes: int = 2, alone: int = 0) -> Callable[[int], nn.Module]:
    """Return what builds a norm; up to ``alone`` channels are normed in one group."""
    if norm == "group":
        return lambda n: nn.GroupNorm(math.gcd(n, 8) if n > alone else 1, n)
    return nn.BatchNorm1d if axes == 1 else nn.BatchNorm2d


def _image(shape: Shape, name: str, least: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < least:
        raise InputError(
            f"The model {name} wants images [channels, height, width] of at least {least}x{least}. Got {tuple(shape)}."
        )
    return shape[0], shape[1], shape[2]

"""Data augmentation: random changes to a model's inputs, in training only, drawn by names (``models/random.py``)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import nn

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.named import build_named, registered
from fedstrata.core.options import explained, options, param
from fedstrata.core.registry import YOUR_OWN, Registry
from fedstrata.models.random import RandomLayer

Function = Callable[..., torch.Tensor]
F = TypeVar("F", bound=Function)

AUGMENTATIONS: Registry[Callable[..., Augmentation]] = Registry("augmentation", hint=YOUR_OWN)
"""Every augmentation by its name in a configuration file."""


class Augmentation(RandomLayer):
    """A random change to inputs [B, ...], in training only; a subclass is registered under its ``name``.

    images: whether it takes only images [B, channels, H, W].
    """

    name: ClassVar[str]
    images: ClassVar[bool] = True

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.__init__ = options(cls.__name__)(cls.__init__)  # type: ignore[method-assign]
        cls.__doc__ = explained(cls.__doc__, cls)
        if "name" in vars(cls):
            AUGMENTATIONS.add(cls.name, cls)


class RandomFlip(Augmentation):
    """Mirror each image left to right with probability 1/2."""

    name = "flip"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, channels, H, W] to the same shape."""
        uniforms = self.uniforms((len(x), *[1] * (x.dim() - 1)), x)
        return x if uniforms is None else torch.where(uniforms < 0.5, x, x.flip(-1))


class RandomCrop(Augmentation):
    """Shift each image by up to ``padding`` pixels along both axes, and fill with zeros."""

    name = "crop"

    def __init__(self, padding: int = param(4, "largest shift, in pixels", least=1)) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, channels, H, W] to the same shape."""
        uniforms = self.uniforms((2, len(x)), x)
        if uniforms is None:
            return x
        rows, columns = (uniforms * (2 * self.padding + 1)).long()
        padded = nn.functional.pad(x, [self.padding] * 4)
        for shift, axis in ((rows, 2), (columns, 3)):
            shape = [len(x) if i == 0 else x.shape[axis] if i == axis else 1 for i in range(4)]
            index = (shift[:, None] + torch.arange(x.shape[axis], device=x.device)).view(shape)
            wide = [x.shape[i] if i in (0, axis) else padded.shape[i] for i in range(4)]
            padded = padded.gather(axis, index.expand(wide))
        return padded


class RandomJitter(Augmentation):
    """Change the brightness of each image, then its contrast, by random factors.

    As in torchvision's ColorJitter, ``brightness`` b multiplies an image by a factor that is uniform in
    [max(0, 1 - b), 1 + b], and ``contrast`` c multiplies its distance from its mean by a factor from
    [max(0, 1 - c), 1 + c]. Unlike there, the order is fixed, the mean is over all pixels and channels, and nothing is
    clipped, so images may have any range and any number of channels.
    """

    name = "jitter"

    def __init__(
        self,
        brightness: float = param(0.2, "largest relative change of an image's numbers", least=0),
        contrast: float = param(0.2, "largest relative change of their distance from their mean", least=0),
    ) -> None:
        super().__init__()
        self.brightness, self.contrast = brightness, contrast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images [B, channels, H, W] to the same shape."""
        uniforms = self.uniforms((2, len(x), *[1] * (x.dim() - 1)), x)
        if uniforms is None:
            return x
        x = x * _factor(self.brightness, uniforms[0]).to(x.dtype)
        factor = _factor(self.contrast, uniforms[1]).to(x.dtype)
        mean = x.mean(tuple(range(1, x.dim())), keepdim=True)
        return x * factor + mean * (1 - factor)


def _factor(change: float, uniforms: torch.Tensor) -> torch.Tensor:
    """Return factors between 1 - change, or 0 if that is negative, and 1 + change."""
    low = max(0.0, 1 - change)
    return low + (1 + change - low) * uniforms


class RandomFunction(Augmentation):
    """Change inputs by a function of your own, ``function(inputs, numbers) -> inputs``.

    It gets the inputs [B, ...] and ``numbers`` random numbers in [0, 1) for each of them, [B, numbers], and returns
    changed inputs of the same shape. All its randomness must come from these numbers: a function that calls
    ``torch.rand`` or another generator is refused when a run starts. Like the functions of a problem, it runs for one
    client's batch, and it is fastest if it does not read values (``if`` on a tensor, ``.item()``).
    """

    images = False

    def __init__(self, function: Function, numbers: int = param(1, "random numbers for each input", least=1)) -> None:
        super().__init__()
        if not callable(function):
            raise invalid("function of RandomFunction", function, "a function (inputs, numbers) -> inputs")
        self.function, self.numbers = function, numbers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs [B, ...] to the same shape."""
        uniforms = self.uniforms((len(x), self.numbers), x)
        if uniforms is None:
            return x
        out: Any = self.function(x, uniforms)
        if not isinstance(out, torch.Tensor) or out.shape != x.shape or out.dtype != x.dtype:
            got = _form(out) if isinstance(out, torch.Tensor) else type(out).__name__
            raise invalid(f"result of the augmentation {_name(self.function)}", got, f"inputs as given: {_form(x)}")
        return out


def _form(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}"


def _name(function: Function) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__))


@overload
def augmentation(function: F) -> Callable[..., RandomFunction]: ...


@overload
def augmentation(*, numbers: int = 1) -> Callable[[F], Callable[..., RandomFunction]]: ...


def augmentation(function: Any = None, *, numbers: int = 1) -> Any:
    """Register a function of your own as an augmentation, under its own name (:class:`RandomFunction`).

        @fs.models.augmentation(numbers=2)
        def erase(images, numbers, share: float = fs.param(0.3, "share of the rows to erase", above=0, below=1)):
            ...

    A file then uses it as ``augment = ["erase"]``, or with options as ``{ name = "erase", share = 0.5 }``; in Python,
    ``erase(share=0.5)`` is the layer. ``numbers`` is how many random numbers it gets for each input.
    """

    def declare(function: Function) -> Callable[..., RandomFunction]:
        own = list(inspect.signature(function).parameters.values())
        if len(own) < 2:
            raise TypeError(
                f"The augmentation {function.__name__} must take (inputs, numbers). Got {len(own)} arguments."
            )

        @functools.wraps(function)
        def layer(**values: Any) -> RandomFunction:
            return RandomFunction(functools.partial(function, **values), numbers)

        layer.__signature__ = inspect.Signature(own[2:])  # type: ignore[attr-defined]
        return registered(AUGMENTATIONS)(layer)

    return declare if function is None else declare(function)


def augmentations(entries: Sequence[str | Mapping[str, Any]], shape: Sequence[int]) -> list[Augmentation]:
    """Build the layers that ``augment`` names, each by a name or a table of a name and options, for such inputs."""
    if isinstance(entries, str):
        raise invalid("augment", entries, "a list of augmentations, e.g. ['flip', 'crop']")
    layers: list[Augmentation] = [build_named(AUGMENTATIONS, entry, "augment") for entry in entries]
    for layer in layers:
        if layer.images and len(shape) != 3:
            raise InputError(
                f"The augmentation {layer.name} needs images [channels, height, width]. Got inputs of shape "
                f"{tuple(shape)}."
            )
    return layers

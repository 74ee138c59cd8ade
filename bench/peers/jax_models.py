"""The models of the jobs as JAX functions, for FedJAX.

Images have their channels last, which XLA's convolutions on a CPU are made for. Weights are lists, in the order of the
torch module; :func:`from_torch` and :func:`to_torch` change their layout.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Weights = list[jax.Array]


def convolution(x: jax.Array, kernel: jax.Array, padding: int, stride: int = 1) -> jax.Array:
    """Convolve [B, H, W, C] with a kernel [h, w, C, outputs]."""
    sides = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), sides, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x: jax.Array) -> jax.Array:
    """Take the maximum over 2x2 squares."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))


def logreg(weights: Weights, x: jax.Array) -> jax.Array:
    """Return the scores of logistic regression."""
    return x.reshape(len(x), -1) @ weights[0] + weights[1]


def convolutions(weights: Weights, x: jax.Array, padding: int) -> jax.Array:
    """Return the scores of two convolutions with pooling, then dense layers; ``padding`` of the second."""
    x = pool(jax.nn.relu(convolution(x, weights[0], 2) + weights[1]))
    x = pool(jax.nn.relu(convolution(x, weights[2], padding) + weights[3])).reshape(len(x), -1)
    for k in range(4, len(weights) - 2, 2):
        x = jax.nn.relu(x @ weights[k] + weights[k + 1])
    return x @ weights[-2] + weights[-1]


def normalise(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Apply GroupNorm with 8 groups."""
    groups = x.reshape(len(x), -1, 8, x.shape[-1] // 8)
    mean, variance = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
    return ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale + shift


def resnet20(weights: Weights, x: jax.Array) -> jax.Array:
    """Return the scores of ResNet-20."""
    x = jax.nn.relu(normalise(convolution(x, weights[0], 1), *weights[1:3]))
    for k in range(3, len(weights) - 2, 6):
        kernel1, scale1, shift1, kernel2, scale2, shift2 = weights[k : k + 6]
        extra = kernel1.shape[3] - kernel1.shape[2]
        stride = 2 if extra else 1
        shortcut = jnp.pad(x[:, ::stride, ::stride], ((0, 0), (0, 0), (0, 0), (0, extra)))
        out = jax.nn.relu(normalise(convolution(x, kernel1, 1, stride), scale1, shift1))
        x = jax.nn.relu(normalise(convolution(out, kernel2, 1), scale2, shift2) + shortcut)
    return x.mean((1, 2)) @ weights[-2] + weights[-1]


MODELS: dict[str, Callable[[Weights, jax.Array], jax.Array]] = {
    "logreg": logreg,
    "lenet5": lambda weights, x: convolutions(weights, x, 0),
    "cnn": lambda weights, x: convolutions(weights, x, 2),
    "resnet20": resnet20,
}


def loss(model: str, weights: Weights, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean loss of a batch: cross-entropy, or the mean output of the trivial model."""
    if model == "trivial":
        return (x @ weights[0]).mean()
    scores = jax.nn.log_softmax(MODELS[model](weights, x))
    return -jnp.take_along_axis(scores, y[:, None], 1).mean()


def from_torch(values: list[np.ndarray]) -> Weights:
    """Convert weights from torch's layout."""
    converted, channels = [], 0
    for value in values:
        if value.ndim == 4:
            channels, value = value.shape[0], value.transpose(2, 3, 1, 0)
        elif value.ndim == 2:
            value = _channels(value.T, channels, last=True)
            channels = 0
        converted.append(jnp.asarray(value))
    return converted


def to_torch(weights: Weights) -> list[np.ndarray]:
    """Convert weights to torch's layout."""
    converted, channels = [], 0
    for value in map(np.asarray, weights):
        if value.ndim == 4:
            channels, value = value.shape[3], value.transpose(3, 2, 0, 1)
        elif value.ndim == 2:
            value = _channels(value, channels, last=False).T
            channels = 0
        converted.append(value)
    return converted


def _channels(dense: np.ndarray, channels: int, last: bool) -> np.ndarray:
    """Reorder the rows of the first dense layer after convolutions, so that channels come last or first."""
    if not channels:
        return dense
    shape = (channels, -1) if last else (-1, channels)
    return dense.reshape(*shape, dense.shape[1]).swapaxes(0, 1).reshape(dense.shape)

"""Models by name, and modules as pure functions of a flat vector."""

from fedstrata.models.augment import RandomCrop, RandomFlip, RandomFunction, RandomJitter, augmentation
from fedstrata.models.flat import Flat
from fedstrata.models.zoo import (
    MODELS,
    cnn4,
    cnn7,
    convmixer,
    lenet5,
    logreg,
    lstm,
    mlp,
    model,
    patchnet,
    register,
    resnet20,
)

__all__ = [
    "MODELS",
    "Flat",
    "RandomCrop",
    "RandomFlip",
    "RandomFunction",
    "RandomJitter",
    "augmentation",
    "cnn4",
    "cnn7",
    "convmixer",
    "lenet5",
    "logreg",
    "lstm",
    "mlp",
    "model",
    "patchnet",
    "register",
    "resnet20",
]

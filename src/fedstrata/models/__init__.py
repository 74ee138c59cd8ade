"""Models by name, and modules as pure functions of a flat vector."""

from fedstrata.models.flat import Flat
from fedstrata.models.random import RandomCrop, RandomFlip
from fedstrata.models.zoo import MODELS, cnn4, cnn7, convmixer, lenet5, logreg, lstm, mlp, model, patchnet, resnet20

__all__ = [
    "MODELS",
    "Flat",
    "RandomCrop",
    "RandomFlip",
    "cnn4",
    "cnn7",
    "convmixer",
    "lenet5",
    "logreg",
    "lstm",
    "mlp",
    "model",
    "patchnet",
    "resnet20",
]

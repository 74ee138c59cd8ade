"""Models by name, and modules as pure functions of a flat vector."""

from fedstrata.models.flat import Flat
from fedstrata.models.zoo import MODELS, model

__all__ = ["MODELS", "Flat", "model"]

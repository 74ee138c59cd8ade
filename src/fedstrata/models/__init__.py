"""Models by name, and any module as a pure function of a flat vector."""

from fedstrata.models.flat import Flat
from fedstrata.models.zoo import MODELS, model

__all__ = ["MODELS", "Flat", "model"]

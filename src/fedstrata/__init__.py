"""fedstrata: federated learning for layered objectives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedstrata.core.version import __version__ as __version__

if TYPE_CHECKING:
    from fedstrata.experiments.estimator import FederatedClassifier as FederatedClassifier
    from fedstrata.experiments.public import *  # noqa: F403


LATER = {"FederatedClassifier": "fedstrata.experiments.estimator"}
"""Names whose modules import what few need, here scikit-learn: they are imported when they are used."""


def __getattr__(name: str) -> Any:
    """Import the public interface when it is first used: ``fedstrata --help`` needs no PyTorch."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    from fedstrata.experiments import public

    names = {exported: getattr(public, exported) for exported in public.__all__}
    globals().update(names, __all__=sorted([*public.__all__, *LATER]))
    if name not in globals():
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]

"""fedstrata: federated learning for layered objectives."""

from typing import TYPE_CHECKING, Any

from fedstrata.core.version import __version__ as __version__

if TYPE_CHECKING:
    from fedstrata.experiments.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public interface when it is first used: ``fedstrata --help`` needs no PyTorch."""
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    from fedstrata.experiments import public

    names = {exported: getattr(public, exported) for exported in public.__all__}
    globals().update(names, __all__=public.__all__)
    if name not in globals():
        raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return [*__getattr__("__all__"), "__version__"]

"""Functions and classes with options that a configuration file names: how they are registered, and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedstrata.core.errors import invalid
from fedstrata.core.options import build, options
from fedstrata.core.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


def registered(registry: Registry[Any]) -> Callable[[F], F]:
    """Check the options of a function, as :func:`options` does, and register it under its own name."""

    def declare(function: F) -> F:
        name = function.__name__
        checked = options(f"the {name} {registry.kind}")(function)
        registry.add(name, checked)
        return checked

    return declare


def build_named(registry: Registry[Any], entry: str | Mapping[str, Any], key: str) -> Any:
    """Build what ``entry`` names: a name, or a table with a ``name`` and options. Messages call the entry ``key``."""
    table = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        example = next(iter(registry), "...")
        raise invalid(key, entry, f"a name, or a table with a name and options, e.g. {{name = '{example}'}}")
    return build(registry.find(table["name"]), {k: v for k, v in table.items() if k != "name"})

"""Registries: objects that a configuration file or the command line refers to by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedstrata.core.errors import unknown

T = TypeVar("T")

YOUR_OWN = "To add your own: fedstrata --import FILE ..."
"""The hint of registries that a user's file can add to."""


IMPORTED: dict[str, str] = {}
"""The files of the user that were imported to register objects, by name, with a digest of each."""


class Registry(dict[str, T]):
    """Objects of one ``kind`` by name; :meth:`find` raises the error for an unknown name, with a ``hint``.

    definition: returns the class or function that defines an object, with its options and its docstring; by default
                the object itself.
    """

    def __init__(
        self,
        kind: str,
        entries: Mapping[str, T] | None = None,
        hint: str = "",
        definition: Callable[[T], Any] = lambda entry: entry,
    ) -> None:
        super().__init__(entries or {})
        self.kind, self.hint, self.definition = kind, hint, definition

    def find(self, name: object, where: str = "") -> T:
        """Return the object with this name; the error for an unknown one suggests the nearest."""
        if isinstance(name, str) and name in self:
            return self[name]
        raise unknown(self.kind, name, self, where, self.hint)

    def add(self, name: str, entry: T) -> None:
        """Register an object under a name that is free; its own file, imported again, may replace it."""
        new, old = (self.definition(e) for e in (entry, self.get(name, entry)))
        if (new.__module__, new.__qualname__) != (old.__module__, old.__qualname__):
            raise TypeError(f"The name {name!r} of {new.__name__} is taken by {old.__module__}.{old.__qualname__}.")
        self[name] = entry

    def definitions(self) -> dict[str, Any]:
        """Return the definition of each object by its name."""
        return {name: self.definition(entry) for name, entry in self.items()}

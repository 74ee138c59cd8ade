"""Registries: objects that a configuration file or the command line refers to by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fedstrata.core.errors import unknown

T = TypeVar("T")


class Registry(dict[str, T]):
    """Objects of one ``kind`` by name; :meth:`find` raises the error for an unknown name, with a ``hint``."""

    def __init__(self, kind: str, entries: Mapping[str, T] | None = None, hint: str = "") -> None:
        super().__init__(entries or {})
        self.kind, self.hint = kind, hint

    def find(self, name: object, where: str = "") -> T:
        """Return the object with this name; the error for an unknown one suggests the nearest."""
        if isinstance(name, str) and name in self:
            return self[name]
        raise unknown(self.kind, name, self, where, self.hint)

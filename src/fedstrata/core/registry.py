"""Things that a configuration file or the command line calls by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fedstrata.core.errors import unknown

T = TypeVar("T")


class Registry(dict[str, T]):
    """Things of one ``kind`` by name; :meth:`find` is the one way to say that a name does not exist."""

    def __init__(self, kind: str, things: Mapping[str, T] | None = None) -> None:
        super().__init__(things or {})
        self.kind = kind

    def find(self, name: object, where: str = "") -> T:
        """Return the thing of this name; if there is none, the error suggests the nearest."""
        if isinstance(name, str) and name in self:
            return self[name]
        raise unknown(self.kind, name, self, where)

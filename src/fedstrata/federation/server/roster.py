"""Who may take part in a federation."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fedstrata.core.errors import InputError, invalid
from fedstrata.federation import keys


@dataclass(frozen=True)
class Roster:
    """Names and public keys of the nodes; their order is that of the clients."""

    names: tuple[str, ...]
    public: tuple[str, ...]

    @staticmethod
    def read(text: str) -> Roster:
        """Build from JSON, ``{"name": "public key", ...}``."""
        try:
            table = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"The nodes of the federation must be JSON, public keys by name: {error}") from None
        if not isinstance(table, dict) or not table:
            raise invalid("nodes of the federation", table, "public keys by name, at least one")
        public = tuple(keys.canonical(str(key)) for key in table.values())
        check_distinct(public)
        return Roster(tuple(table), public)

    def __len__(self) -> int:
        return len(self.names)


def check_distinct(public: tuple[str, ...]) -> None:
    """Refuse public keys that two nodes share."""
    if len(set(public)) < len(public):
        raise InputError("Two nodes of the federation have the same public key. Each needs its own.")

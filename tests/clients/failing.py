"""Work that fails on some clients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedstrata.clients import Client, remote


class Failing:
    """An algorithm whose work raises an error on some clients."""

    name = "failing"

    def __init__(self, error: Callable[[], Exception], *clients: int) -> None:
        self.error, self.clients = error, clients

    def local(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return x, or raise."""
        if set(client.ids.tolist()) & set(self.clients):
            raise self.error()
        return x

    @remote(pool=True)
    def pooled(self, client: Client, x: torch.Tensor) -> torch.Tensor:
        """Return x, or raise."""
        return self.local(client, x)

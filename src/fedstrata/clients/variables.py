"""The named variables of a client's local loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fedstrata.core.errors import FedstrataError, invalid
from fedstrata.core.trees import tree_map


class Variables:
    """The variables of C clients, by name: ``k.x``, ``k.w``, each a tensor [C, ...] or a list of such tensors.

    In a loop (:meth:`fedstrata.clients.Client.loop`) the rows of clients that have taken all their steps are removed,
    and put back afterwards. So tensors of the message that a loop uses must be variables too, unless all clients take
    the same number of steps.
    """

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            if hasattr(Variables, name):
                raise invalid("name of a variable", name, "a different one: this is the name of a method of Variables")
            setattr(self, name, list(value) if isinstance(value, tuple | list) else value)

    if TYPE_CHECKING:  # the names are the algorithm's own

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
        def __delattr__(self, name: str) -> None: ...

    def updates(self, **start: Any) -> tuple[Any, ...]:
        """Return the updates of the variables since ``start``, in its order, and remove the variables.

        The same as ``(k.x - x, k.y - y)``, without holding all variables and all updates at the same time.
        """
        return tuple(self._since(name, value) for name, value in start.items())

    def _since(self, name: str, start: Any) -> Any:
        value = vars(self).pop(name)
        if isinstance(value, torch.Tensor):
            return value - start
        value.reverse()
        return tuple(value.pop() - s for s in start)

    def _leave(self, active: int) -> dict[str, Any]:
        """Remove and return the rows after the first ``active``."""
        removed = {name: _rows(value, slice(active, None)) for name, value in vars(self).items()}
        for name, value in vars(self).items():
            setattr(self, name, _rows(value, slice(active)))
        return removed

    def _return(self, removed: dict[str, Any]) -> None:
        """Append rows that :meth:`_leave` removed."""
        for name, rest in removed.items():
            first = getattr(self, name)
            setattr(self, name, tree_map(lambda a, b: torch.cat([a, b]) if _is_tensor(a) else a, first, rest))

    def _check(self, active: int) -> None:
        """Raise if a variable has rows of clients that have left."""
        for name, value in vars(self).items():
            for leaf in value if isinstance(value, list) else [value]:
                if _is_tensor(leaf) and len(leaf) != active:
                    raise FedstrataError(
                        f"The variable {name} of a local loop must have one row for each client that is still in the "
                        f"loop, {active}. Got {len(leaf)}. Tensors of the message that a loop uses must be variables "
                        f"too: client.variables({name}=..., start=x)."
                    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _rows(value: Any, rows: slice) -> Any:
    """Return these rows of every tensor; plain numbers stay as they are."""
    return tree_map(lambda leaf: leaf[rows] if _is_tensor(leaf) else leaf, value)

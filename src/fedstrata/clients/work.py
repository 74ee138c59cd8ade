"""Work done by clients, and where an error in it came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fedstrata.clients.client import Client
from fedstrata.clients.engine import Request
from fedstrata.core.errors import FedstrataError

Method = TypeVar("Method", bound=Callable[..., Any])


class WorkError(FedstrataError):
    """The work of a client failed; the message says which algorithm, method, round and client."""


def remote(method: Method) -> Method:
    """Mark a method of an algorithm that clients run: a node does nothing else that a server asks for."""
    method.remote = True  # type: ignore[attr-defined]
    return method


def is_remote(method: object) -> bool:
    """Whether a method may be run on a node."""
    return getattr(method, "remote", False) is True


def perform(request: Request, client: Client, message: tuple[Any, ...]) -> Any:
    """Do the requested work; an error says in which method, round and client it arose."""
    try:
        answer = request.work(client, *message)
        if client.looping:
            raise FedstrataError("A local loop must run to its end: it cannot be left by break or return.")
        return answer
    except Exception as error:
        round = request.clock.round + 1
        when = f"round {round}" if round else "the preparation before round 1"
        where = f"in {request.label}, {when}, {client.label}"
        if isinstance(error, FedstrataError):
            named = type(error)(f"{error} ({where})")
            vars(named).update(vars(error))
            raise named from error
        what = str(error).split("\n")[0]
        if len(client) < len(client.ids):
            what += ". Some clients have left the local loop: what it uses of the message must be a variable of it"
        raise WorkError(f"{type(error).__name__} {where}: {what}") from error

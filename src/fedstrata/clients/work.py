"""The work of clients: which methods they may run, what they answer, and errors that say where they occurred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from fedstrata.clients.channel.channel import Channel, Packed
from fedstrata.clients.client import Client
from fedstrata.clients.engine import Request
from fedstrata.core.errors import FedstrataError, with_context
from fedstrata.core.trees import tree_leaves

Method = TypeVar("Method", bound=Callable[..., Any])


class WorkError(FedstrataError):
    """The work of a client failed; the message says which algorithm, method, round and client."""


@overload
def remote(method: Method) -> Method: ...


@overload
def remote(*, pool: bool = False) -> Callable[[Method], Method]: ...


def remote(method: Method | None = None, *, pool: bool = False) -> Method | Callable[[Method], Method]:
    """Mark a method of an algorithm as one that clients run: nodes run no other method for a server.

    ``@remote(pool=True)`` marks one that returns collections for ``clients.pool``, which a node may refuse to run.
    """

    def mark(method: Method) -> Method:
        method.remote, method.pool = True, pool  # type: ignore[attr-defined]
        return method

    return mark if method is None else mark(method)


def is_remote(method: object) -> bool:
    """Whether a method may be run on a node."""
    return getattr(method, "remote", False) is True


def is_pooled(method: object) -> bool:
    """Whether a method returns collections to pool."""
    return is_remote(method) and getattr(method, "pool", False) is True


def check_pool(request: Request) -> None:
    """Raise unless the request asks for collections to pool exactly if the method is marked as returning them."""
    if is_pooled(request.work) and request.pool is None:
        raise FedstrataError(
            f"{request.label} is marked @remote(pool=True): only clients.pool may ask for its answers."
        )
    if request.pool is not None and not is_pooled(request.work):
        raise FedstrataError(f"{request.label} returns collections to pool: mark it with @remote(pool=True).")


def _check_dtype(leaves: list[torch.Tensor], wants: torch.dtype) -> None:
    """Raise if an answer's dtype differs from that of x; whole numbers, such as counts, are allowed."""
    for leaf in leaves:
        if (leaf.is_floating_point() or leaf.is_complex()) and leaf.numel() and leaf.dtype != wants:
            raise FedstrataError(
                f"An answer must have the dtype of x, {wants}, or hold whole numbers. Got {leaf.dtype}."
            )


def answer_of(request: Request, client: Client, channel: Channel) -> tuple[Any, Packed | None]:
    """Do the requested work; return the answer, and the answer as packed for the channel if that changes it.

    An error says in which method, round and client it occurred.
    """
    try:
        answer = request.work(client, *client.receive(request.message))
        if client.looping:
            raise FedstrataError("A local loop must run to its end: it cannot be left by break or return.")
        leaves = tree_leaves(answer)
        request.check(leaves, len(client))
        if is_remote(request.work):
            _check_dtype(leaves, client.problem.x0.dtype)
        return answer, channel.send(client, request.name, answer) if leaves and request.packs(channel) else None
    except Exception as error:
        round = request.clock.round + 1
        when = f"round {round}" if round else "the preparation before round 1"
        where = f"in {request.label}, {when}, {client.label}"
        if isinstance(error, FedstrataError):
            raise with_context(error, where) from error
        what = str(error).split("\n")[0]
        if len(client) < len(client.ids):
            what += ". Some clients have left the local loop: tensors of the message that it uses must be its variables"
        raise WorkError(f"{type(error).__name__} {where}: {what}") from error

"""The work of a client on its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms import Algorithm
from fedstrata.clients.client import Client
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.engine import Request
from fedstrata.clients.queries import QUERIES
from fedstrata.clients.state import ClientState
from fedstrata.clients.work import answer_of, check_pool, is_pooled, is_remote
from fedstrata.core.clock import Clock
from fedstrata.core.errors import InputError, unknown
from fedstrata.core.machine import prepared
from fedstrata.core.trees import tree_map
from fedstrata.data.sampling import SAMPLINGS
from fedstrata.federation import wire
from fedstrata.federation.node.data import path_of, pools
from fedstrata.federation.node.faults import InjectedFault
from fedstrata.federation.node.runs import KnownRun
from fedstrata.federation.node.state import StateFolder
from fedstrata.federation.wire import QUERY, Call

Header = dict[str, Any]


def work(run: KnownRun, call: Call, message: Any, node: Mapping[str, Any]) -> tuple[Header, list[np.ndarray]]:
    """Run the algorithm's method, or answer the query, that the call names; return a header and arrays."""
    settings = run.config.settings
    policy = settings.faults
    fault = InjectedFault.of(None if policy is None else policy.inject, call)
    fault.before_work()
    oracles = run.oracles(call)
    request = _request(run.algorithm(call), call, message, settings.rounds, oracles.problem.x0.device)
    if is_pooled(request.work) and not pools(node):
        raise InputError(
            "This node does not send collections to be pooled (pool = false in its configuration), but "
            f"{request.label} returns them."
        )
    check_pool(request)
    folder, limit = StateFolder(path_of(node, "state"), call.run), settings.state_memory
    if request.query:
        state = ClientState(call.clients, limit)
    else:
        state = folder.load(call.kept, call.client, call.clients, limit, call.rejoins)
    side = ClientSide(
        oracles=oracles,
        data=run.ready(call),
        sampling=SAMPLINGS.find(settings.sampling),
        batch_size=settings.batch_size,
        seed=settings.seed,
        state=state,
    )
    client = Client(side, request.cohort, request.clock, request.exchange)
    with torch.no_grad(), prepared(settings.threads):
        value, packed = answer_of(request, client, settings.channel)
    header: Header = {}
    if packed is None:
        value = fault.spoil(value)
    else:  # the server needs the form of the answer to unpack it
        header = {"like": wire.pack(value)[0], "names": list(packed.parcel.tensors)}
        value = fault.spoil_parcel(packed.parcel)
    fault.after_work()
    kept = not request.query and folder.save((call.round + 1, call.exchange), state)
    folder.remove_before(call.oldest)
    form, arrays = wire.pack(value)
    return {**header, "form": form, "samples": client.samples, "steps": client.steps, "kept": kept}, arrays


def _request(algorithm: Algorithm, call: Call, message: Any, rounds: int, device: torch.device) -> Request:
    """Return the call as a request to this one client."""
    return Request(
        work=_method(algorithm, call.work),
        message=tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, message),
        clock=Clock(call.round, rounds, iteration=call.iteration),
        exchange=call.exchange,
        cohort=np.array([call.client]),
        places=np.zeros(1, dtype=np.int64),
        answered=np.zeros(1, dtype=bool),
        attempt=call.attempt,
        pool=call.pool,
    )


def _method(algorithm: Algorithm, name: str) -> Callable[..., Any]:
    """Return a query, or a method of the algorithm that is marked ``@remote``; raise for anything else."""
    kind = type(algorithm)
    methods = [method for method in dir(kind) if is_remote(getattr(kind, method, None))]
    allowed: dict[str, Callable[..., Any]] = {method: getattr(algorithm, method) for method in methods}
    allowed |= {f"{QUERY}{query}": answer for query, answer in QUERIES.items()}
    if name not in allowed:
        raise unknown("work", name, allowed, f"of {algorithm.name}")
    return allowed[name]

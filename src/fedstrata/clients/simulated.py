"""Simulated clients: all in this process, C at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from fedstrata.clients.channel import PLAIN, Channel
from fedstrata.clients.chunk import choose_chunk
from fedstrata.clients.client import Client
from fedstrata.clients.client_side import ClientSide
from fedstrata.clients.engine import Answer, Engine, Request
from fedstrata.clients.faults import SILENT, Fault, Faults, Inject
from fedstrata.clients.state import ClientState, LostState
from fedstrata.clients.work import answer_of
from fedstrata.core.errors import InputError
from fedstrata.core.trees import tree_map


class Simulated(Engine):
    """Runs the cohort in chunks of at most ``chunk`` clients of similar size."""

    def __init__(self, side: ClientSide, chunk: int, channel: Channel = PLAIN, policy: Faults | None = None) -> None:
        super().__init__(side, channel, policy)
        self.chunk = chunk

    def answers(self, request: Request) -> Iterator[Answer | Fault]:
        """Yield the answers, chunk by chunk."""
        places = self._local_places(request)
        spoiled: dict[int, str] = {}
        # A client that was drawn twice must not see, in a later chunk, what it kept in an earlier one.
        repeated = _repeats(request.cohort)
        side = replace(self.side, deferred=True) if repeated else self.side
        waiting: list[tuple[np.ndarray, Client]] = []
        if self.policy is not None and self.policy.inject is not None:
            kinds = self.policy.inject.kinds(
                request.cohort[places], request.clock.round, request.exchange, request.attempt
            )
            silent, spoiled = _injected(request, places, kinds, self.policy.inject, self.policy.timeout)
            yield from silent
            places = places[~np.isin(request.cohort[places], [fault.client for fault in silent])]
        for chunk in self._chunks(request.cohort, places):
            while len(chunk):
                client = Client(side, request.cohort[chunk], request.clock, request.exchange)
                try:
                    answer = self._answer(request, chunk, client)
                    break
                except LostState as error:
                    if self.policy is None:
                        raise
                    lost = np.isin(request.cohort[chunk], error.clients)
                    for number in request.cohort[chunk[lost]].tolist():
                        yield request.fault(number, "lost", "has not kept what it needs from an earlier exchange")
                    chunk = chunk[~lost]
            else:
                continue
            yield from _spoil(request, answer, spoiled, self.policy) if spoiled else (answer,)
            if repeated:
                waiting.append((chunk, client))
            else:
                client.commit(request.answered[chunk])
        for chunk, client in waiting:
            client.commit(request.answered[chunk])

    def _answer(self, request: Request, chunk: np.ndarray, client: Client) -> Answer:
        value, packed = answer_of(request, client, self.channel)
        if packed is None:
            return Answer(chunk, value, client.samples, client.steps)
        return Answer(chunk, packed.received, client.samples, client.steps, packed.parcel.nbytes)

    def _local_places(self, request: Request) -> np.ndarray:
        """Return the requested places whose clients are in this process."""
        return request.places

    def _chunks(self, cohort: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        """Split the places into chunks of nearly equal length, largest clients first."""
        if not len(places):
            return []
        sizes = self.side.data.train.sizes[cohort[places]]
        order = places if (sizes[1:] <= sizes[:-1]).all() else places[np.argsort(-sizes, kind="stable")]
        return [order] if len(order) <= self.chunk else np.array_split(order, math.ceil(len(order) / self.chunk))


def on_auxiliary(side: ClientSide) -> Simulated:
    """Return an engine whose clients are the classes of the server's auxiliary set."""
    data, problem = side.data, side.oracles.problem
    if data.auxiliary is None:
        raise InputError(
            f"There are no samples on the server (data {data.name!r}): split with auxiliary=8, or add some with "
            "with_auxiliary(inputs, targets)."
        )
    names = tuple(f"class {c}" for c in range(data.classes))
    data = replace(data, train=data.auxiliary, support=None, auxiliary=None, client_names=names)
    chunk = choose_chunk("auto", problem, data, side.batch_size, problem.x0.device)
    return Simulated(replace(side, data=data, state=ClientState(data.clients, 0, None), listeners=()), chunk)


def _repeats(cohort: np.ndarray) -> bool:
    """Whether a client was drawn twice. Cohorts are in increasing order, unless they were drawn by weights."""
    return not (cohort[1:] > cohort[:-1]).all() and len(np.unique(cohort)) < len(cohort)


# --- injected faults -------------------------------------------------------------------------------------------------


def _injected(
    request: Request, places: np.ndarray, kinds: list[str | None], inject: Inject, timeout: float
) -> tuple[list[Fault], dict[int, str]]:
    """Return the faults of clients that do not answer, and the kind of fault in each spoiled answer by place."""
    silent: list[Fault] = []
    spoiled: dict[int, str] = {}
    for place, kind in zip(places.tolist(), kinds, strict=True):
        if kind is None or (kind == "delay" and inject.seconds <= timeout):
            continue
        if kind in SILENT:
            why = f"answered after {inject.seconds:g} s" if kind == "delay" else "did not answer"
            silent.append(request.fault(int(request.cohort[place]), "silent", why))
        else:
            spoiled[place] = kind
    return silent, spoiled


def _spoil(request: Request, answer: Answer, kinds: dict[int, str], policy: Faults | None) -> Iterator[Answer | Fault]:
    """Yield the answer with the injected faults applied."""
    assert policy is not None and policy.inject is not None
    value, wrong = policy.inject.spoil(answer.value, [kinds.get(place) for place in answer.places.tolist()])
    for place in answer.places[wrong].tolist():
        yield request.fault(int(request.cohort[place]), "shape", "answered with the wrong shape")
    good = torch.from_numpy(~wrong)
    value = tree_map(lambda leaf: leaf[good.to(leaf.device)], value)
    yield Answer(answer.places[~wrong], value, answer.samples, answer.steps, answer.nbytes)  # garbage is sent too

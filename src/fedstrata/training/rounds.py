"""The rounds of an algorithm on its clients: what training, checks of algorithms and nodes have in common.

Clients that have lost what they kept rejoin at the end of the round in which they were left out. If a round would have
no quorum at its first exchange without them, they rejoin before it, as if at the end of the previous round. In both
cases the algorithm's ``rejoin`` calls ``clients.restore``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.clients import Clients
from fedstrata.clients.engine import Learned
from fedstrata.clients.queries import QUERIES
from fedstrata.core.clock import Clock
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.problem import Problem
from fedstrata.problems.queries import Query

LAST_EXCHANGE = 1 << 30
"""The number of the exchange in which clients rejoin before a round: above all exchanges of the previous round."""


def problem_of_round(problem: Problem, learned: Sequence[Learned], number: int, rounds: int) -> Problem:
    """Return the problem of a round, counted from 0: rates inside it may follow a schedule over rounds.

    learned: the answers to the problem's queries so far; empty if it has none, or knows the answers already.
    number:  the round; -1, the preparation before the first one, has the rates of the first.
    """
    for vector in learned:
        if problem.query is not None:
            problem = problem.query.informed(problem, vector)
    if problem.at is None:
        return problem
    return problem.at(problem, Clock.of_round(max(0, number), rounds))


def prepare(clients: Clients, number: int = 0) -> None:
    """Answer the problem's queries, and switch to the informed problem, before ``number``, the first round to run.

    The clients' tables are prepared first, if they have any. The answers are in every checkpoint, so a resumed run does
    not ask again.
    """
    clients.begin(-1)
    engine = clients.engine
    tables = prepare_tables(clients)
    _enter(clients, number, engine.learned[tables:])
    while (query := clients.problem.query) is not None:
        skipped = query.optional and (engine.channel.noise > 0 or not engine.side.data.classes)
        engine.learned.append(None if skipped else learn(query, clients))
        engine.adopt(query.informed(clients.problem, engine.learned[-1]))


def prepare_tables(clients: Clients) -> int:
    """Make inputs of the raw values of the clients' tables; return how many answers this took: 0 without tables."""
    engine = clients.engine
    plan = engine.side.data.plan
    if plan is None:
        return 0
    if not engine.learned:
        answers = clients.gather(QUERIES["column_statistics"]).double().cpu().numpy()
        engine.learned.append(torch.from_numpy(plan.fit(answers).vector))
    engine.prepare(Fitted.of(plan, engine.learned))
    return 1


def learn(query: Query, clients: Clients) -> torch.Tensor:
    """Ask all clients; return what the problem learns from the answers: of class counts, their shares if they do."""
    if clients.engine.sums_only and query.ask == "class_counts" and not clients.engine.channel.noise:
        shares = clients.mean(QUERIES["class_shares"]).double()
        return query.learn(shares[None], shares.new_ones(1)).double()
    message = (clients.problem.x0,) if query.ask == "first_loss" else ()
    answers: torch.Tensor = clients.gather(QUERIES[query.ask], *message).double()
    return query.learn(answers, clients.weights).double()


def start(algorithm: Algorithm, clients: Clients) -> Any:
    """Return the algorithm's state before the first round, at the problem's starting point."""
    x, y = clients.problem.x0.clone(), clients.problem.y0
    return algorithm.start(x, x[:0] if y is None else y.clone(), clients)


def one_round(
    algorithm: Algorithm, state: Any, clients: Clients, number: int, accept: Callable[[Any], None] = lambda state: None
) -> Any:
    """Run a round, then let clients that have lost what they kept rejoin; return the new state.

    If too many have lost it for the round to begin, they rejoin before it.

    accept: called with the new state before clients rejoin; raises if it cannot be used.
    """
    rejoins = type(algorithm).rejoin is not Algorithm.rejoin
    clients.begin(number, partial(_rejoin_before, algorithm, state, clients) if rejoins else None)
    _enter(clients, number)
    state = algorithm.round(state, clients)
    lost = np.unique([fault.client for fault in clients.faults if fault.kind == "lost" and fault.left_out])
    accept(state)
    if len(lost):
        algorithm.rejoin(state, clients.with_cohort(lost))
    return state


def _rejoin_before(algorithm: Algorithm, state: Any, clients: Clients, lost: np.ndarray) -> None:
    """Let clients rejoin as if at the end of the previous round."""
    number, earlier = clients.progress.round, clients.with_cohort(lost)
    earlier.progress = replace(clients.progress, round=number - 1, exchanges=LAST_EXCHANGE)
    earlier.faults = []
    _enter(clients, number - 1)
    algorithm.rejoin(state, earlier)
    _enter(clients, number)
    clients.faults += [replace(fault, round=number) for fault in earlier.faults]


def _enter(clients: Clients, number: int, learned: Sequence[Learned] = ()) -> None:
    """Switch to the problem of this round, if it differs."""
    problem = problem_of_round(clients.problem, learned, number, clients.progress.rounds)
    if problem is not clients.problem:
        clients.engine.adopt(problem)

"""What cannot be summed securely: refused before a run starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.engine import Answer, Request
from fedstrata.clients.faults import Fault
from fedstrata.core.errors import FedstrataError, InputError, invalid
from fedstrata.experiments.build import build_algorithm
from fedstrata.experiments.config import Config
from fedstrata.problems.problem import Problem
from fedstrata.training.examples import example_for, run_rounds, simulated_clients


def check_experiment(config: Config, cohort: int) -> None:
    """Raise if the answers in an experiment cannot be summed securely over a cohort of so many nodes."""
    needed = config.federation.needed(cohort)
    if not max(1, cohort / 2) < needed <= cohort:
        wants = f"more than half of the cohort of {cohort} nodes, and at least 2 of them"
        raise invalid("key federation.threshold", config.federation.threshold, wants)
    if config.data.schema is not None:
        raise InputError(
            "Tables cannot be used with federation.secure = true: their preparation, and the calibration of risks, "
            "need the statistics of every single node. Prepare the inputs at the nodes, or set federation.secure = "
            "false."
        )
    _check_channel(config)
    asked = single_answers(build_algorithm(config))
    if asked:
        raise InputError(
            f"The algorithm {config.algorithm.name} cannot run with federation.secure = true: the server needs the "
            f"answers to {asked} of every single client, or their maximum, or draws clients twice. Choose an "
            "algorithm, or an option of it, that takes only means."
        )


def _check_channel(config: Config) -> None:
    channel = config.channel
    used = {
        "reduce": channel.reduce != "mean",
        "bound": channel.bound is not None,
        "compress": channel.compress != "none",
    }
    for name in [name for name, wrong in used.items() if wrong]:
        raise InputError(
            f"The key channel.{name} cannot be used with federation.secure = true: the server sees no answer of a "
            "single node that it could limit or leave out, and masks cannot be compressed. Leave it out; clip and "
            "noise work with secure sums."
        )


def check_problem(problem: Problem) -> None:
    """Raise if what the problem asks the clients before the first round cannot be summed securely."""
    query = problem.query
    while query is not None:
        if query.ask != "class_counts":
            raise InputError(
                f"The problem {problem.name} cannot be used with federation.secure = true: it asks every single client "
                f"for {query.ask}. Pass the problem the number that it would compute (shift)."
            )
        query = query.then


def is_summed(request: Request) -> bool:
    """Whether nothing but the mean of the answers is wanted, over clients that are all different."""
    return request.weighting is not None and len(np.unique(request.cohort)) == len(request.cohort)


def single_answers(algorithm: Algorithm) -> str:
    """Return a method of the algorithm whose answers are not only summed, as two rounds of an example show, or nothing.

    Nothing either if there is no example, or none that fits the algorithm's options: the run then stops at the method.
    """
    asked = ""
    with suppress(AssertionError, FedstrataError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clients = simulated_clients(*example_for(type(algorithm)), 2)
        answers = clients.engine.answers

        def watched(request: Request) -> Iterator[Answer | Fault]:
            nonlocal asked
            if not is_summed(request) and not asked:
                asked = request.label
            return answers(request)

        clients.engine.answers = watched  # type: ignore[method-assign]
        run_rounds(algorithm, clients, 2)
    return asked

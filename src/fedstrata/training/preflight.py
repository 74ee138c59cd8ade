"""Checks before a run starts: settings, data and functions that do not fit together are refused."""

from __future__ import annotations

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.cohort import cohort_size
from fedstrata.clients.privacy import check_privacy
from fedstrata.core.errors import InputError, invalid
from fedstrata.data.federated import FederatedData
from fedstrata.data.sampling import SAMPLINGS, check_balanced
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.levels import level_sizes
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation
from fedstrata.training.settings import Settings


def check_run(
    problem: Problem,
    data: FederatedData,
    algorithm: Algorithm,
    settings: Settings,
    evaluate: Evaluate | None,
    pretrains: bool = False,
) -> None:
    """Raise if a run cannot work; nothing has been written yet.

    pretrains: whether it starts from the model of a pre-training.
    """
    _check_kinds(problem, data, algorithm, evaluate)
    device_of(settings, problem)
    data = data if data.plan is None else data.prepared(Fitted.neutral(data.plan))
    problem.check(data)
    _check_sampling(problem, data, settings)
    _check_dual(problem, data, algorithm, settings)
    algorithm.check(problem, settings.participation, data.clients)
    cohort_size(settings.participation, data.clients)
    check_channel_and_faults(settings, data.clients)
    if settings.channel.noise and pretrains:
        raise InputError("The noise of a channel does not cover a pre-training: leave out one of the two.")
    if algorithm.auxiliary:
        _check_auxiliary(algorithm, data)
    if problem.flat is None and problem.query is None:
        _try_out(problem, data)
    if isinstance(evaluate, Evaluation):
        evaluate.part(data)
        evaluate.adaptation(problem)
        evaluate.attacks(problem, data.train.arrays)


def device_of(settings: Settings, problem: Problem) -> torch.device:
    """Return the device of a run; raise if it cannot hold the numbers of the problem."""
    try:
        device = torch.device(settings.device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
        torch.empty(1, dtype=problem.x0.dtype, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(f"The device {settings.device!r} cannot be used: {error}") from None
    return device


def check_channel_and_faults(settings: Settings, clients: int) -> None:
    """Raise if there is noise without an accountant, or an injected fault for a client that does not exist."""
    check_privacy(settings.channel)
    inject = None if settings.faults is None else settings.faults.inject
    for client in () if inject is None else inject.clients:
        if client >= clients:
            raise invalid("clients of the injected faults", client, f"from 0 to {clients - 1}")


def _check_kinds(problem: Problem, data: FederatedData, algorithm: Algorithm, evaluate: Evaluate | None) -> None:
    if not isinstance(problem, Problem):
        raise invalid("problem", type(problem).__name__, "a fedstrata Problem, e.g. fs.erm(model)")
    if not isinstance(data, FederatedData):
        raise invalid("data", type(data).__name__, "FederatedData: call .split(...) on a data set first")
    if not isinstance(algorithm, Algorithm):
        raise invalid("algorithm", repr(algorithm), "an Algorithm, e.g. fs.FedAvg(lr=0.1)")
    if evaluate is not None and (not callable(evaluate) or isinstance(evaluate, type)):
        got = f"the class {evaluate.__name__}" if isinstance(evaluate, type) else type(evaluate).__name__
        wants = "a function (problem, data, x, y) -> {name: number}, an Evaluation, e.g. fs.Evaluation(), or left out"
        raise invalid("evaluate", got, wants)


def _check_sampling(problem: Problem, data: FederatedData, settings: Settings) -> None:
    sampling = settings.sampling
    if sampling == "balanced" and not problem.takes_weights:
        fit = ", ".join(name for name, kind in SAMPLINGS.items() if not kind.weighted)
        raise invalid("sampling", sampling, f"one of {fit}: the problem {problem.name} takes no sample weights")
    if sampling in ("stratified", "balanced") and not data.classes:
        raise InputError(f"The sampling {sampling!r} needs classes, which the data {data.name!r} do not have.")
    if sampling == "balanced" and settings.batch_size is not None:
        for level in filter(problem.draws, range(1 + len(problem.levels))):
            check_balanced(settings.batch_size, data.part(level).class_counts, np.arange(data.clients))


def _check_dual(problem: Problem, data: FederatedData, algorithm: Algorithm, settings: Settings) -> None:
    if problem.mixture and problem.y0 is not None and len(problem.y0) != data.clients:
        raise invalid(f"length of y0 of the problem {problem.name}", len(problem.y0), f"{data.clients}, one per client")
    per_client = problem.numbered and problem.y0 is not None and len(problem.y0) == data.clients
    if per_client and settings.weighting == "samples" and not algorithm.mixture:
        why = f"the dual of the problem {problem.name} has an entry for each client, and means would weight them twice"
        raise invalid("weighting", "samples", f"'uniform': {why}")


def _check_auxiliary(algorithm: Algorithm, data: FederatedData) -> None:
    if data.classes < 2:
        raise invalid(f"number of classes for {algorithm.name}", data.classes, "at least 2: it weights classes")
    if data.auxiliary is None:
        raise InputError(
            f"{algorithm.name} needs samples on the server, some of every class (data {data.name!r} have none there): "
            "split with auxiliary=8 (data.auxiliary in a configuration file), which moves 8 rows of each class from "
            "the clients to the server, or add others with with_auxiliary(inputs, targets)."
        )


def _try_out(problem: Problem, data: FederatedData) -> None:
    """Try a user's functions on a few samples; raise if they fail or return wrong shapes, before all clients run."""
    two, three = (level_sizes(problem, data, samples, outer=True) for samples in (2, 3))
    for k, (size, other) in enumerate(zip(two, three, strict=True), 1):
        if size != other:
            got = f"{size} numbers for 2 samples, {other} for 3"
            what = f"value of level {k} of the problem {problem.name}"
            raise invalid(what, got, "a vector of one length: a mean over the samples")

"""Training each client alone, on its own data: the baseline that a federation must beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.clients.ranks import ranks_here
from fedstrata.core.errors import Diverged, InputError, Unsolvable, invalid
from fedstrata.core.files import Row, folder_at
from fedstrata.data.federated import FederatedData
from fedstrata.data.tables.fitted import Fitted
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback, Titled
from fedstrata.training.fingerprint import digest_of, settings_of
from fedstrata.training.metrics.catalogue import COSTS, TIMES, WITHIN, measure
from fedstrata.training.metrics.evaluation import Evaluate, Evaluation, measured_on, pooled
from fedstrata.training.metrics.measures import as_numbers
from fedstrata.training.metrics.of_clients import measured_alone
from fedstrata.training.plots import plot
from fedstrata.training.run import Run
from fedstrata.training.rundir import RunDirectory
from fedstrata.training.settings import Settings, takes_settings
from fedstrata.training.train import train

SUMS = ("samples", *TIMES)
"""What all clients have used together; local training sends nothing."""


@dataclass(frozen=True, repr=False)
class LocalRun:
    """The runs of all clients, each trained alone.

    runs:      the run of each client; that of a client that cannot train has the starting point.
    history:   one row per evaluation. Pooled measures, on the same data for all, are means over the clients' models.
               ``_mean`` and ``_worst`` are over clients, each with its own model on its own data. Samples and seconds
               are those of all clients; nothing is sent.
    summary:   the last row, and ``untrained``: which clients cannot train alone, and why.
    """

    runs: list[Run]
    history: list[Row]
    summary: Row

    def __repr__(self) -> str:
        return f"<LocalRun of {self.summary['algorithm']} on {self.summary['data']}: {len(self.runs)} clients>"

    @property
    def final(self) -> Row:
        """The measures of the solutions and what the runs used, as a row."""
        return {name: self.summary[name] for name in self.history[-1]}


@takes_settings
def train_local(
    problem: Problem | Callable[[FederatedData], Problem],
    data: FederatedData,
    algorithm: Algorithm,
    *,
    settings: Settings,
    evaluate: Evaluate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    config: dict[str, Any] | None = None,
) -> LocalRun:
    """Train every client alone, on its own data: ``fs.train_local(problem, data, algorithm, rounds=100)``.

    A client that cannot train, for example because AUC needs two classes and it has one, keeps the starting point.

    problem:   the problem, or a function that builds it from the data of one client.
    settings:  the options below as one object, instead of as keywords; each client takes part in every round.
    evaluate, callbacks: as in :func:`fs.train`, for each client.
    out:       a directory to write, with a run directory for each client in ``clients/``.
    resume:    resume what is in ``out``.
    config:    what to write to config.toml, which a resumed run must agree with.
    """
    if not isinstance(data, FederatedData):
        raise invalid("data", type(data).__name__, "FederatedData: call .split(...) on a data set first")
    if ranks_here().size > 1:
        raise InputError("Clients are trained alone in one process only: run without torchrun.")
    if resume and out is None:
        raise InputError("resume=True needs out: the directory to resume.")
    if out is None:
        return _train_each(problem, data, algorithm, settings, evaluate, None, callbacks)
    with closing(RunDirectory(folder_at(out))) as directory:
        first = problem if isinstance(problem, Problem) else problem(data.alone(0))
        config = settings_of(first, data, algorithm, settings, evaluate) if config is None else config
        directory.open({**config, "digest": {**config.get("digest", {}), **digest_of(first, data)}}, resume)
        run = _train_each(problem, data, algorithm, settings, evaluate, directory.path / "clients", callbacks)
        directory.metrics.path.unlink(missing_ok=True)
        directory.metrics.append(*run.history)
        directory.write_summary(run.summary)
        plot({"local": [run.history]}, directory.path / "plot.png")
    return run


def _train_each(
    problem: Problem | Callable[[FederatedData], Problem],
    data: FederatedData,
    algorithm: Algorithm,
    settings: Settings,
    evaluate: Evaluate | None,
    out: Path | None,
    callbacks: Sequence[Callback],
) -> LocalRun:
    runs, untrained = [], {}
    error: Unsolvable | None = None
    evaluation = Evaluation() if evaluate is None else evaluate
    same = pooled(data)  # all models are measured on the same rows, besides each client's own
    for client in range(data.clients):
        own, name = replace(data.alone(client), test=same), data.name_of(client)
        its_problem = problem if isinstance(problem, Problem) else problem(own)
        folder = None if out is None else out / f"client-{client:04d}"
        try:
            run = train(
                its_problem,
                own,
                algorithm,
                settings=settings.for_local(data.clients),
                evaluate=evaluation,
                out=folder,
                resume=folder is not None and folder.exists(),
                callbacks=[Titled(c, f"{name}, {client + 1} of {data.clients}") for c in callbacks],
            )
        except Diverged as failure:
            raise Diverged(f"{name}, trained alone: {failure}", failure.history) from None
        except Unsolvable as failure:
            untrained[name], error = str(failure), failure
            run = _at_start(its_problem, own, evaluation)
        runs.append(run)
    if error is not None and len(untrained) == data.clients:
        raise error
    return _joined(runs, data, algorithm, settings, evaluation, untrained)


@torch.no_grad()
def _at_start(problem: Problem, data: FederatedData, evaluate: Evaluate) -> Run:
    """Return the run of a client that cannot train."""
    fitted = None if data.plan is None else Fitted.neutral(data.plan)
    if fitted is not None:
        data = data.prepared(fitted).to(problem.x0.device, problem.x0.dtype)
    measures = as_numbers(evaluate(problem, data, problem.x0, problem.y0), {})
    row = dict.fromkeys(("round", *COSTS), 0) | {
        name: value for name, value in measures.items() if math.isfinite(value)
    }
    about = evaluate.about(problem, data, problem.x0, problem.y0) if isinstance(evaluate, Evaluation) else {}
    return Run(problem.x0, problem.y0, [row], {**row, **about}, problem, fitted)


def _joined(
    runs: list[Run],
    data: FederatedData,
    algorithm: Algorithm,
    settings: Settings,
    evaluation: Evaluate,
    untrained: dict[str, str],
) -> LocalRun:
    each = _per_client(runs)
    length = max(len(run.history) for run in runs)
    pairs = each.get("pairs", [])
    history = [_together([run.history[min(i, len(run.history) - 1)] for run in runs], pairs) for i in range(length)]
    summary: Row = {"status": "finished", "algorithm": algorithm.name, "problem": runs[0].problem.name}
    summary |= {"data": data.name, "clients": data.clients, "seed": settings.seed, "sites": "local"}
    summary |= _together([run.final for run in runs], pairs) | {"untrained": untrained}
    stopped = [run.summary["stopped_by"] for run in runs if "stopped_by" in run.summary]
    if stopped:
        summary["stopped_by"] = stopped[0]
    if isinstance(evaluation, Evaluation):
        summary["measured_on"] = measured_on(runs[0].problem, data, evaluation) | measured_alone(each)
        summary["per_client"] = each
    if data.client_names:
        summary["client_names"] = list(data.client_names)
    return LocalRun(runs, history, summary)


def _per_client(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the measures of each client, with None where its run has none; empty without our own evaluation."""
    own = [run.summary.get("per_client", {}) for run in runs]
    names = dict.fromkeys(name for table in own for name in table)
    return {name: [table.get(name, [0 if name == "pairs" else None])[0] for table in own] for name in names}


def _together(rows: list[Row], pairs: list[int | None]) -> Row:
    """Return one row for all clients; ``pairs`` are the weights of their AUC in that within clients."""
    together: Row = {"round": max(row["round"] for row in rows), "steps": max(row["steps"] for row in rows)}
    together |= {"bytes_up": 0, "bytes_down": 0} | {name: sum(row[name] for row in rows) for name in SUMS}
    for name in dict.fromkeys(key for row in rows for key in row if key not in ("round", *COSTS)):
        values = np.array([row[name] for row in rows if name in row])
        better = measure(name).higher_is_better
        if name.endswith("_worst") and better is not None:
            together[name] = float(values.min() if better else values.max())
        elif name.endswith("_spread"):
            mean = f"{name.removesuffix('_spread')}_mean"
            together[name] = float(np.std([row[mean] for row in rows if mean in row]))
        elif name == WITHIN and pairs:
            weights = [n or 0 for row, n in zip(rows, pairs, strict=True) if name in row]
            together[name] = float(np.average(values, weights=weights))
        else:
            together[name] = float(values.mean())
    return together

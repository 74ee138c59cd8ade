"""Compare and tune from Python: ``fs.compare`` and ``fs.tune``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import invalid
from fedstrata.core.files import refuse_blocked
from fedstrata.data.federated import FederatedData
from fedstrata.experiments.compare import compare_in, folder_of, seeds_of
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.methods import Method
from fedstrata.experiments.object_methods import DataOf, ObjectMethod, ProblemOf
from fedstrata.experiments.overlay import check_labels
from fedstrata.experiments.schema import SITES, TuneTable
from fedstrata.experiments.tune import Tuned, files_of, tune_methods
from fedstrata.problems.problem import Problem
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import settings_of
from fedstrata.training.metrics.evaluation import Evaluate
from fedstrata.training.settings import Settings, takes_settings

Methods = Mapping[str, tuple[ProblemOf, Algorithm]]


@takes_settings
def compare(
    methods: Methods,
    data: DataOf,
    *,
    settings: Settings,
    seeds: int | Sequence[int] = 5,
    baseline: str | None = None,
    baselines: Sequence[str] = (),
    measure: str | None = None,
    evaluate: Evaluate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Comparison:
    """Compare methods over several seeds, and judge their differences from a baseline.

        fs.compare({"fedavg": (problem, fs.FedAvg(lr=0.1)), "fgda": (auc, fs.FGDA())}, data, rounds=50)

    methods:   by label, a problem and an algorithm. Instead of a problem you can pass a function that builds one from
               the seed, so that every seed starts from other weights.
    data:      the data, or a function that splits them for a seed.
    settings:  the options below as one object, instead of as keywords.
    seeds:     how many seeds, counted from ``seed``, or the seeds themselves.
    baseline:  the label to compare the others with; by default the first.
    baselines: "local" and "pooled" also run the first method with each client alone, and with all data in one place.
    measure:   the measure to judge by; by default distance if the solution is known, else auc, accuracy or loss. One of
               your own ``evaluate`` must be declared: see :func:`fedstrata.declare_measure`.
    evaluate:  as in :func:`fs.train`.
    out:       a directory for the runs, which must be new unless ``resume`` is set.
    resume:    resume what is in ``out``.
    jobs:      how many runs to do side by side, each in a process with one thread.
    callbacks: listeners of the runs, with a single job.
    """
    built = _methods(methods, data, settings, evaluate, baselines)
    how: dict[str, Any] = {"baseline": baseline, "measure": measure, "jobs": jobs, "callbacks": callbacks}
    return compare_in("method", built, seeds_of(seeds, settings.seed), out, resume, **how)


@takes_settings
def tune(
    methods: Methods,
    data: DataOf,
    *,
    settings: Settings,
    trials: int = 8,
    seeds: int = 3,
    measure: str | None = None,
    share: float = 0.2,
    sampler: str = "sobol",
    trial_rounds: int | None = None,
    halving: int | None = None,
    extend: bool = True,
    search: Mapping[str, Mapping[str, tuple[float, float]]] | None = None,
    evaluate: Evaluate | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    callbacks: Sequence[Callback] = (),
) -> Tuned:
    """Tune the hyperparameters of methods on validation data, by the same rule for each.

        tuned = fs.tune({"fedavg": (problem, fs.FedAvg()), "fgda": (auc, fs.FGDA())}, data, trials=8, rounds=50)
        tuned.best["fedavg"]         # an algorithm; tuned.compare(5) runs all on the test data with five other seeds

    methods, data, settings, evaluate, out, resume, jobs, callbacks: as in :func:`fs.compare`.
    trials:       trials for each hyperparameter that is searched; its own settings and the defaults are extra.
    seeds:        seeds per trial, counted from ``seed``.
    measure:      the measure on validation data to rank by; the default is that of :func:`fs.compare`.
    share:        the fraction of each client's training rows used for validation.
    sampler:      "sobol", "latin", or Optuna's "tpe" or "gp".
    trial_rounds: shorter trials; the best three are then run at full length.
    halving:      successive halving by this factor.
    extend:       whether to search beyond an edge at which the best value lies.
    search:       ``{label: {option: (low, high)}}``, instead of the ranges that algorithms declare.
    """
    ranges: Any = {} if search is None else search  # checked with the other options
    chosen = TuneTable(
        trials=trials,
        seeds=seeds,
        measure=measure,
        share=share,
        sampler=sampler,
        rounds=trial_rounds,
        halving=halving,
        extend=extend,
        search=ranges,
    )
    built = _methods(methods, data, settings, evaluate, ())
    folder = folder_of(out, resume)
    if folder is not None:
        refuse_blocked(folder, *files_of(built))
    tuned = tune_methods(
        "method",
        built,
        chosen,
        settings.seed,
        folder=None if folder is None else folder / "trials",
        identity="" if folder is None else _identity(built, settings, chosen),
        jobs=jobs,
        callbacks=callbacks,
    )
    if folder is not None:
        tuned.write(folder)
    return tuned


def _methods(
    methods: Methods, data: DataOf, settings: Settings, evaluate: Evaluate | None, baselines: Sequence[str]
) -> dict[str, Method]:
    wants = "a dict of label: (problem, algorithm), e.g. {'fedavg': (fs.erm(net), fs.FedAvg(lr=0.1))}"
    if not isinstance(methods, Mapping) or not methods:
        raise invalid("methods", type(methods).__name__ if methods else methods, wants)
    built: dict[str, Method] = {}
    for label, pair in methods.items():
        problem, algorithm = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
        built_by = callable(problem) and not isinstance(problem, nn.Module | type)
        if not isinstance(label, str) or not (isinstance(problem, Problem) or built_by):
            raise invalid("methods", f"{label!r}: {pair!r}", wants)
        if not isinstance(algorithm, Algorithm):
            raise invalid(f"algorithm of {label!r}", repr(algorithm), "an Algorithm, e.g. fs.FedAvg(lr=0.1)")
        built[label] = ObjectMethod(label, problem, algorithm, data, settings, evaluate)
    check_labels("method", built)
    if not isinstance(data, FederatedData) and not callable(data):
        raise invalid("data", type(data).__name__, "FederatedData, or a function that returns them for a seed")
    first = next(iter(built.values()))
    baselines = (baselines,) if isinstance(baselines, str) else baselines
    fits = isinstance(baselines, Sequence) and all(sites in SITES and sites not in built for sites in baselines)
    if not fits or len(set(baselines)) < len(baselines):
        raise invalid("baselines", baselines, "'local', 'pooled' or both, once each, and not the label of a method")
    for sites in baselines:
        assert isinstance(first, ObjectMethod)
        built[sites] = ObjectMethod(sites, first.problem, first.own, data, settings, evaluate, sites)
    return built


def _identity(methods: Mapping[str, Method], settings: Settings, table: TuneTable) -> str:
    """Return what the results of a search depend on, to compare a resumed one with."""
    parts = {}
    for label, method in methods.items():
        assert isinstance(method, ObjectMethod)
        problem, data, algorithm, own = method.parts(settings.seed)
        parts[label] = settings_of(problem, data, algorithm, own, method.evaluate)
        seeds = range(settings.seed, settings.seed + table.seeds)
        parts[label] |= {"digests": [method.digest(seed) for seed in seeds]}
    return json.dumps({"methods": parts, "tune": table.to_table()}, sort_keys=True, default=str)

"""A record of the numbers that every algorithm and every example gives: tests/record.json, one line per case.

It was written with version 0.1.0. Since then these were recorded again, because a defect was fixed:

    examples/digits, examples/agnostic, examples/damaml   the hold-out is stratified: other rows are held out
    examples/adaptive, agnostic, auc, digits, fair and federation   the Dirichlet partition rounds without bias: other
                           rows for every client; before, the last client got a row of nearly every class
    fgda with faults       a client that missed a synchronisation is lost for the rest of the round, and then rejoins at
                           the server's point; before, it went on from its own stale point

The output bias starts where the model has it (``prior = false``), as in 0.1.0.

To record some of them again, which is right only where the numbers are meant to change:

    PYTHONPATH=tests FEDSTRATA_DATA=... python tests/record.py "fgda with faults" ...

The cases use the public interface and are written out, so that they outlive a change of the internals. Where an option
gets another name, change it here and keep the label.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedstrata as fs
from fedstrata import problems
from fedstrata.algorithms import ALGORITHMS
from fedstrata.experiments.config import read
from fedstrata.experiments.runs import run_config
from fedstrata.problems.runner import Runner
from support import example_for, sized_data, smooth_example

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "record.json"
COUNTS = ("round", "steps", "samples", "bytes_up", "bytes_down")

Example = tuple[fs.Problem, fs.FederatedData]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its solution, and the counts in the last row of its history."""

    x: torch.Tensor
    y: torch.Tensor | None
    counts: dict[str, int]

    @staticmethod
    def of(run: fs.Run) -> Outcome:
        for vector in (run.x, run.y):
            assert vector is None or vector.dtype == torch.float64
        return Outcome(run.x, run.y, {name: run.history[-1][name] for name in COUNTS})

    def row(self) -> dict[str, Any]:
        """Return what the record holds."""
        return {**self.counts, "x": summary(self.x), "y": None if self.y is None else summary(self.y)}


# --- small problems --------------------------------------------------------------------------------------------------


def linear(outputs: int) -> nn.Module:
    """Build a linear model of four features that starts at a fixed point."""
    model = nn.Linear(4, outputs, dtype=torch.float64)
    with torch.no_grad():
        for k, weights in enumerate(model.parameters()):
            weights.copy_(torch.linspace(-0.3, 0.4 - 0.2 * k, weights.numel(), dtype=weights.dtype).view_as(weights))
    return model


def data() -> fs.FederatedData:
    return smooth_example()[1]


def binary() -> fs.FederatedData:
    return sized_data([6, 12, 4, 18, 8], features=4, classes=2)


PROBLEMS: dict[str, Callable[[], Example]] = {
    "auc": cache(lambda: (fs.auc(linear(1), scale_dual=True), binary())),
    "fair classes": cache(lambda: (fs.fair(linear(3), over="classes", classes=3, regularise=0.4, prior=False), data())),
    "fair clients": cache(lambda: (fs.fair(linear(3), over="clients", clients=7, regularise=0.4, prior=False), data())),
    "maml": cache(lambda: (fs.maml(linear(3), inner_lr=fs.RoundDecay(0.2, 0.5), prior=False), data())),
    "robust": cache(lambda: (fs.robust(linear(3), prior=False), data())),
    "global robust": cache(lambda: (fs.robust(linear(3), inner_mean="global", prior=False), data())),
    "risk averse": cache(lambda: (fs.risk_averse(linear(3), prior=False), data())),
}
"""Problems of models: they ask the clients for something before the first round, or change from round to round."""


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Three rounds of an algorithm, in float64.

    problem:  one of ``PROBLEMS``; by default the conformance tests' example for the algorithm, with ``levels`` levels.
    settings: what else ``fs.train`` is told.
    """

    name: str
    options: Options = field(default_factory=dict)
    settings: Options = field(default_factory=dict)
    levels: int | None = None
    problem: str | None = None

    def __call__(self) -> Outcome:
        if self.problem is None:
            problem, data = example_for(ALGORITHMS[self.name], torch.float64, self.levels)
        else:
            problem, data = PROBLEMS[self.problem]()
        how = {"rounds": 3, "batch_size": 4, "chunk": 2, "seed": 0, "eval_every": 3, **self.settings}
        return Outcome.of(fs.train(problem, data, fs.algorithm(self.name, self.options), **how))


SECOND = "fednest, composition"
"""FedNest solves saddles and compositions."""

DEFAULTS: dict[str, tuple[str | None, float, str, bool]] = {
    "adafgda": ("eta", 1.0, "interval", False),
    "adamfcgd": ("eta", 1.0, "interval", False),
    "afl": ("lr", 0.1, "none", False),
    "cdma": ("lr", 0.1, "interval", True),
    "coda": (None, 0.0, "interval", False),
    "codasca": ("lr", 0.1, "interval", False),
    "comfedl": ("lr", 0.1, "epochs", True),
    "drfa": ("lr", 0.1, "interval", True),
    "fedadagrad": ("lr", 0.1, "epochs", True),
    "fedadam": ("lr", 0.1, "epochs", True),
    "fedams": ("lr", 0.01, "epochs", True),
    "fedavg": ("lr", 0.1, "epochs", True),
    "fedlalr": ("lr", 0.002, "epochs", True),
    "fednest": ("alpha", 0.1, "interval", False),
    SECOND: ("alpha", 0.1, "interval", False),
    "fedprox": ("lr", 0.1, "epochs", True),
    "fedyogi": ("lr", 0.1, "epochs", True),
    "fgda": ("eta", 1.0, "interval", False),
    "lafedopt": ("lr", 0.01, "epochs", True),
    "local_adaalter": ("lr", 0.5, "epochs", True),
    "local_amsgrad": ("lr", 0.001, "epochs", True),
    "local_moml": ("lr", 0.1, "epochs", True),
    "local_scgd": ("beta", 0.1, "epochs", True),
    "local_scgdam": ("eta", 0.3, "interval", True),
    "local_scgdm": ("beta", 0.1, "epochs", True),
    "local_sgda": ("lr", 0.1, "epochs", True),
    "local_sgda_plus": ("lr", 0.1, "none", False),
    "local_sgdam": ("lr", 0.1, "interval", True),
    "local_sgdam_plus": ("lr", 0.1, "none", False),
    "local_sgdm_rl": ("lr", 0.1, "epochs", True),
    "local_smcgdam": ("eta", 0.3, "interval", True),
    "mfcgd": ("eta", 1.0, "interval", False),
    "qfedavg": ("lr", 0.1, "epochs", True),
    "sagda": ("lr", 0.1, "interval", True),
    "scaffold": ("lr", 0.1, "epochs", True),
}
"""For every algorithm: its first rate that may be a schedule, and its default; what its steps may be besides a number
("epochs": epochs or an interval, "interval": an interval only); and whether a part of the clients is enough."""

VARIANTS: dict[str, tuple[str, Options]] = {
    "fedavg, one and a half epochs": ("fedavg", {"steps": fs.Epochs(1.5)}),
    "fedavg, quick interval": ("fedavg", {"steps": fs.Interval(1, 1.5)}),
    "fedavg, others": ("fedavg", {"server_lr": 0.7, "weight_decay": 0.1}),
    "fedprox, others": ("fedprox", {"mu": 0.5, "server_lr": 0.7, "weight_decay": 0.1}),
    "fedadam, others": (
        "fedadam",
        {"server_lr": 0.05, "beta1": 0.5, "beta2": 0.9, "tau": 0.01, "weight_decay": 0.1},
    ),
    "fedyogi, others": (
        "fedyogi",
        {"server_lr": 0.05, "beta1": 0.5, "beta2": 0.9, "tau": 0.01, "weight_decay": 0.1},
    ),
    "fedadagrad, others": ("fedadagrad", {"server_lr": 0.05, "beta1": 0.5, "tau": 0.01, "weight_decay": 0.1}),
    "fedams, option 2": ("fedams", {"option": 2}),
    "fedams, short memory": ("fedams", {"beta2": 0.1, "eps": 1e-8, "server_lr": 0.01}),
    "fedams, short memory, no maximum": ("fedams", {"beta2": 0.1, "eps": 1e-8, "server_lr": 0.01, "maximum": False}),
    "fedams, others": (
        "fedams",
        {"server_lr": 0.3, "beta1": 0.5, "beta2": 0.9, "eps": 1e-5, "weight_decay": 0.1},
    ),
    "fedlalr, max": ("fedlalr", {"aggregate": "max"}),
    "fedlalr, restart": ("fedlalr", {"restart": True}),
    "fedlalr, restart, max": ("fedlalr", {"restart": True, "aggregate": "max"}),
    "fedlalr, others": ("fedlalr", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    "lafedopt, local": ("lafedopt", {"correction": "local"}),
    "lafedopt, none, adam": ("lafedopt", {"correction": "none", "server": "adam"}),
    "lafedopt, adagrad": ("lafedopt", {"optimizer": "adagrad"}),
    "lafedopt, yogi": ("lafedopt", {"optimizer": "yogi"}),
    "lafedopt, adam, others": (
        "lafedopt",
        {"server": "adam", "server_lr": 0.1, "server_beta1": 0.5, "server_beta2": 0.9, "tau": 0.01, "v0": 0.01},
    ),
    "lafedopt, others": ("lafedopt", {"beta1": 0.5, "beta2": 0.9, "eps": 0.01, "server_lr": 0.7, "weight_decay": 0.1}),
    "local_amsgrad, others": ("local_amsgrad", {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}),
    "local_adaalter, others": ("local_adaalter", {"b0": 0.5, "eps": 0.3, "weight_decay": 0.1}),
    "scaffold, option I": ("scaffold", {"option": "I"}),
    "scaffold, others": ("scaffold", {"server_lr": 0.7, "weight_decay": 0.1}),
    "qfedavg, q = 0": ("qfedavg", {"q": 0.0}),
    "qfedavg, others": ("qfedavg", {"q": 2.0, "weight_decay": 0.1}),
    "afl, last iterate": ("afl", {"average": False, "dual_lr": 0.5}),
    "drfa, others": ("drfa", {"dual_lr": 0.5, "weight_decay": 0.1}),
    "local_moml, others": ("local_moml", {"beta": 0.5, "first_batches": 2}),
    "local_scgd, others": ("local_scgd", {"eta": 0.7, "gamma": 0.6}),
    "local_scgdm, others": ("local_scgdm", {"eta": 0.7, "gamma": 0.6, "alpha": 0.5}),
    "mfcgd, product": ("mfcgd", {"jacobian": "product"}),
    "mfcgd, average": ("mfcgd", {"average": True}),
    "mfcgd, projected": ("mfcgd", {"jacobian": "exact", "c_g": 3.0, "c_f": 0.5}),
    "mfcgd, others": ("mfcgd", {"gamma": 0.05, "alpha": 0.3, "beta": 0.6, "varrho": 0.8, "first_batches": 2}),
    "adamfcgd, product": ("adamfcgd", {"jacobian": "product"}),
    "adamfcgd, belief": ("adamfcgd", {"matrix": "belief"}),
    "adamfcgd, norm": ("adamfcgd", {"matrix": "norm"}),
    "adamfcgd, amsgrad": ("adamfcgd", {"matrix": "amsgrad"}),
    "adamfcgd, accumulator": ("adamfcgd", {"first_matrix": "accumulator"}),
    "adamfcgd, identity": ("adamfcgd", {"first_matrix": "identity"}),
    "adamfcgd, average": ("adamfcgd", {"average": True}),
    "adamfcgd, projected": ("adamfcgd", {"jacobian": "exact", "c_g": 3.0, "c_f": 0.5}),
    "adamfcgd, others": (
        "adamfcgd",
        {"gamma": 0.02, "alpha": 0.3, "beta": 0.6, "varrho": 0.8, "theta": 0.5, "rho": 0.2, "first_batches": 2},
    ),
    "fednest, 3 inner rounds": ("fednest", {"inner_rounds": 3}),
    "fednest, 4 inner rounds": ("fednest", {"inner_rounds": 4}),
    "fednest, others": ("fednest", {"beta": 0.2}),
    f"{SECOND}, 3 inner rounds": (SECOND, {"inner_rounds": 3}),
    f"{SECOND}, 4 inner rounds": (SECOND, {"inner_rounds": 4}),
    f"{SECOND}, others": (SECOND, {"beta": 0.2}),
    "local_sgda, others": ("local_sgda", {"dual_lr": 0.05, "weight_decay": 0.1}),
    "local_sgda_plus, snapshot every step": ("local_sgda_plus", {"steps": 3, "snapshot_every": 1}),
    "local_sgda_plus, snapshot every round": ("local_sgda_plus", {"steps": 3, "snapshot_every": 3}),
    "local_sgda_plus, others": (
        "local_sgda_plus",
        {"steps": 2, "dual_lr": 0.05, "weight_decay": 0.1},
    ),
    "local_sgdam, own momentum": ("local_sgdam", {"average_momentum": False}),
    "local_sgdam, others": ("local_sgdam", {"dual_lr": 0.05, "alpha": 0.7, "beta": 0.3, "weight_decay": 0.1}),
    "local_sgdam_plus, snapshot every step": ("local_sgdam_plus", {"steps": 3, "snapshot_every": 1}),
    "local_sgdam_plus, snapshot every round": ("local_sgdam_plus", {"steps": 3, "snapshot_every": 3}),
    "local_sgdam_plus, others": (
        "local_sgdam_plus",
        {"steps": 2, "dual_lr": 0.05, "alpha": 0.7, "beta": 0.3, "weight_decay": 0.1},
    ),
    "coda, stages": ("coda", {"steps": 2, "stage_steps": 4, "factor": 1.5}),
    "coda, stages, last iterate": ("coda", {"steps": 2, "stage_steps": 4, "factor": 1.5, "average": False}),
    "coda, others": ("coda", {"lr": 0.05, "steps": 2, "stage_steps": 3, "factor": 2.0, "gamma": 0.5}),
    "codasca, no control": ("codasca", {"control": False}),
    "codasca, stages": ("codasca", {"stage_rounds": 2}),
    "codasca, others": (
        "codasca",
        {"stage_rounds": 1, "factor": 2.0, "gamma": 0.5, "clip": 0.05, "server_lr": 0.7, "weight_decay": 0.1},
    ),
    "codasca, no clipping": ("codasca", {"clip": 0.0}),
    "sagda, no control": ("sagda", {"control": False}),
    "sagda, others": (
        "sagda",
        {"dual_lr": 0.05, "server_lr": 0.7, "server_dual_lr": 0.8, "weight_decay": 0.1},
    ),
    "fgda, single": ("fgda", {"synchronisation": "single"}),
    "fgda, single, interval": ("fgda", {"synchronisation": "single", "steps": fs.Interval(2, 2.0)}),
    "fgda, others": ("fgda", {"gamma": 0.05, "lam": 0.02, "alpha": 0.3, "beta": 0.7, "first_batches": 2}),
    "adafgda, belief": ("adafgda", {"matrix": "belief"}),
    "adafgda, norm": ("adafgda", {"matrix": "norm"}),
    "adafgda, amsgrad": ("adafgda", {"matrix": "amsgrad"}),
    "adafgda, single": ("adafgda", {"synchronisation": "single"}),
    "adafgda, single, norm": ("adafgda", {"synchronisation": "single", "matrix": "norm"}),
    "adafgda, single, identity": ("adafgda", {"synchronisation": "single", "first_matrix": "identity"}),
    "adafgda, single, interval": ("adafgda", {"synchronisation": "single", "steps": fs.Interval(2, 2.0)}),
    "adafgda, identity": ("adafgda", {"first_matrix": "identity"}),
    "adafgda, accumulator": ("adafgda", {"first_matrix": "accumulator"}),
    "adafgda, others": (
        "adafgda",
        {"gamma": 0.02, "lam": 0.03, "alpha": 0.3, "beta": 0.7, "theta": 0.5, "rho": 0.2, "first_batches": 2},
    ),
    "cdma, ada": ("cdma", {"ada": True}),
    "cdma, ada, others": ("cdma", {"ada": True, "dual_lr": 0.05, "weight": 0.5, "exponent": 0.5, "weight_decay": 0.1}),
    "local_smcgdam, others": (
        "local_smcgdam",
        {"gamma_x": 0.5, "gamma_y": 0.2, "rho_x": 1.0, "rho_y": 2.0, "first_batches": 3, "weight_decay": 0.1},
    ),
    "local_scgdam, others": (
        "local_scgdam",
        {"gamma_x": 0.5, "gamma_y": 0.2, "rho_x": 1.0, "rho_y": 2.0, "first_batches": 3, "weight_decay": 0.1},
    ),
    "local_smcgdam, alpha": ("local_smcgdam", {"alpha": 6.0}),
    "local_scgdam, alpha": ("local_scgdam", {"alpha": 2.0}),
    "local_sgdm_rl, others": ("local_sgdm_rl", {"momentum": 0.5, "slope": 1.0, "share": 0.5, "weight_decay": 0.1}),
    **{
        f"{name}, theorem": (name, {"eta": fs.CubeRoot(1.0, 2.0), "weights": "theorem"})
        for name in ("adafgda", "adamfcgd", "fgda", "mfcgd")
    },
    **{
        f"{name}, single, theorem": (
            name,
            {"eta": fs.CubeRoot(1.0, 2.0), "weights": "theorem", "synchronisation": "single"},
        )
        for name in ("adafgda", "fgda")
    },
}

FAULTS = fs.Faults(quorum=1, retries=1, inject=fs.Inject(drop=0.3, nan=0.1, garbage=0.1, scale=0.1, factor=2.0, seed=3))
SAMPLES: Options = {"weighting": "samples"}

OTHERS: dict[str, Case] = {
    "comfedl, two levels": Case("comfedl", levels=2),
    "local_smcgdam, three levels": Case("local_smcgdam", levels=3),
    "comfedl on robust": Case("comfedl", {"normalise": True}, {"participation": 3}, problem="robust"),
    "comfedl on robust, not normalised": Case("comfedl", {"normalise": False}, {"participation": 3}, problem="robust"),
    "comfedl on maml": Case("comfedl", {}, {"participation": 3}, problem="maml"),
    **{
        f"{name} on {problem}": Case(name, {}, SAMPLES, problem=problem)
        for name in ("mfcgd", "adamfcgd", "local_moml", "local_scgd", "local_scgdm")
        for problem in ("robust", "maml")
    },
    **{
        f"{name} on global robust": Case(name, {}, SAMPLES, problem="global robust")
        for name in ("fednest", "local_scgdam", "local_smcgdam")
    },
    "local_smcgdam on risk averse": Case("local_smcgdam", {}, SAMPLES, problem="risk averse"),
    "coda on auc, stages": Case("coda", {"steps": 2, "stage_steps": 4, "factor": 1.5}, SAMPLES, problem="auc"),
    "coda on auc, few batches": Case(
        "coda", {"steps": 2, "stage_steps": 2, "factor": 1.5, "estimate_batches": 2}, problem="auc"
    ),
    "codasca on auc, stages": Case("codasca", {"lr": 0.05, "steps": 2, "stage_rounds": 2}, problem="auc"),
    "local_sgda on auc": Case("local_sgda", {}, {"participation": 2, **SAMPLES}, problem="auc"),
    "local_sgda on fair classes": Case("local_sgda", {}, {"participation": 2}, problem="fair classes"),
    "local_sgdam on fair clients": Case("local_sgdam", problem="fair clients"),
    "fedlalr, max, one client": Case("fedlalr", {"aggregate": "max"}, {"participation": 1}),
    "scaffold, 4 clients by samples": Case("scaffold", {}, {"participation": 4, "rounds": 8, **SAMPLES}),
    "scaffold, cube root": Case(
        "scaffold", {"lr": fs.CubeRoot(0.3, 2.0), "steps": 3}, {"participation": 3, "rounds": 12, **SAMPLES}
    ),
    **{
        f"fedavg, {sampling} sampling": Case("fedavg", {}, {"sampling": sampling})
        for sampling in ("epochs", "stratified", "balanced")
    },
    "fedavg, full batches": Case("fedavg", {}, {"batch_size": None}),
    "scaffold through clip": Case("scaffold", {}, {"channel": fs.Channel(clip=0.01), **SAMPLES}),
    "scaffold through bound": Case("scaffold", {}, {"channel": fs.Channel(bound=0.02), **SAMPLES}),
    "scaffold through top_k": Case("scaffold", {}, {"channel": fs.Channel(compress="top_k", top=0.3), **SAMPLES}),
    "scaffold through quantise": Case("scaffold", {}, {"channel": fs.Channel(compress="quantise"), **SAMPLES}),
    "scaffold through median": Case("scaffold", {}, {"channel": fs.Channel(reduce="median"), **SAMPLES}),
    "scaffold through noise": Case("scaffold", {}, {"channel": fs.Channel(clip=0.1, noise=0.5)}),
    "fedlalr, max, through top_k": Case(
        "fedlalr", {"aggregate": "max"}, {"channel": fs.Channel(compress="top_k", top=0.9)}
    ),
    "fedavg through noise": Case("fedavg", {}, {"participation": 3, "channel": fs.Channel(clip=0.1, noise=1.0)}),
    **{f"{name} with faults": Case(name, {}, {"faults": FAULTS}) for name in ("scaffold", "fgda", "afl", "fednest")},
    "scaffold with faults, 3 clients": Case("scaffold", {}, {"participation": 3, "faults": FAULTS, **SAMPLES}),
    "fedavg through trimmed mean, with faults": Case(
        "fedavg", {}, {"channel": fs.Channel(reduce="trimmed_mean", trim=0.3), "faults": FAULTS}
    ),
}


def case(name: str, options: Options, settings: Options | None = None) -> Case:
    return Case(name.split(",")[0], options, settings or {}, 1 if name == SECOND else None)


def usual_cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of every algorithm, as far as it supports them."""
    for name, (rate, value, work, partial_participation) in DEFAULTS.items():
        yield name, case(name, {})
        yield f"{name}, by samples", case(name, {}, SAMPLES)
        if partial_participation:
            yield f"{name}, 3 clients", case(name, {}, {"participation": 3})
        if work in ("interval", "epochs"):
            yield f"{name}, interval", case(name, {"steps": fs.Interval(2, 2.0)})
        if work == "epochs":
            yield f"{name}, epochs", case(name, {"steps": fs.Epochs(1)})
        if rate is not None:
            yield f"{name}, decay", case(name, {rate: fs.RoundDecay(value, 0.5)})


def all_cases() -> dict[str, Case]:
    """Return every case by its label."""
    labelled = [*usual_cases(), *((label, case(*variant)) for label, variant in VARIANTS.items()), *OTHERS.items()]
    assert len(dict(labelled)) == len(labelled)
    return dict(labelled)


CASES: dict[str, Case] = all_cases()


# --- examples --------------------------------------------------------------------------------------------------------

FREE = ("digits", "breast_cancer", "sinusoid")
FEWER = ("mnist_lenet", "shakespeare")
"""Examples with so much work that two clients a round are enough."""


@contextmanager
def in_float64() -> Iterator[None]:
    """Let models, and the data with them, be float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def needs_data(path: Path) -> bool:
    """Whether an example reads its data from the data directory."""
    config = read(path)
    return not config.brings_data and config.data.name not in FREE


def options_of_problem(path: Path) -> list[str]:
    """Return the options of an example's problem."""
    return problems.PROBLEMS[read(path).problem.name].options


def run_example(path: Path) -> Outcome:
    """Run two rounds of an example in float64."""
    settings = ["train.rounds=2", "train.threads=1", "train.eval_every=2"]
    settings += ["train.participation=2"] if path.stem in FEWER else []
    settings += ["problem.prior=false"] if "prior" in options_of_problem(path) else []
    with in_float64():
        return Outcome.of(run_config(read(path, settings), None, False, []))


PATHS: dict[str, Path] = {f"examples/{path.stem}": path for path in sorted((ROOT / "examples").glob("*.toml"))}
EXAMPLES: dict[str, Callable[[], Outcome]] = {label: partial(run_example, path) for label, path in PATHS.items()}


# --- the record ------------------------------------------------------------------------------------------------------


def summary(x: torch.Tensor) -> list[float] | dict[str, Any]:
    """Return a vector as the record holds it: whole, or if it is long some entries, projections and the norm."""
    values = x.detach().numpy()
    size = len(values)
    if size <= 400:
        return [float(v) for v in values]
    places = np.linspace(0, size - 1, 64).round().astype(int)
    directions = np.random.default_rng(0).normal(size=(8, size))
    return {
        "size": size,
        "entries": values[places].tolist(),
        "projections": (directions @ values).tolist(),
        "norm": float(np.linalg.norm(values)),
    }


def read_record() -> dict[str, dict[str, Any]]:
    return json.loads(FILE.read_text())


def write_record(*labels: str) -> None:
    """Run these cases, or those that have no record, and write the record: one line per case."""
    known = read_record() if FILE.exists() else {}
    todo = {label for label in {**CASES, **EXAMPLES} if label in labels or label not in known}
    if "FEDSTRATA_DATA" not in os.environ and any(label in PATHS and needs_data(PATHS[label]) for label in todo):
        raise SystemExit("Set FEDSTRATA_DATA: some of these examples read their data from that directory.")
    lines = []
    for label, run in {**CASES, **EXAMPLES}.items():
        torch.manual_seed(0)
        row = run().row() if label in todo else known[label]
        lines.append(f"{json.dumps(label)}: {json.dumps(row)}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    Runner.tracing = False  # the tests compute without graphs too
    torch.set_num_threads(1)
    write_record(*sys.argv[1:])

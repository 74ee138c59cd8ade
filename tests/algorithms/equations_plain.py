"""Equations of the methods without levels and dual: averaging, adaptive servers, adaptive clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fedstrata as fs
from algorithms.equations import Case, Method, Options, Row, Rows, Vectors
from algorithms.paper import Paper
from plain_worlds import PLAIN
from reference.fedams import fedams
from reference.fedavg import fedavg
from reference.fedlalr import fedlalr
from reference.fedopt import fedadagrad, fedadam, fedyogi
from reference.fedprox import fedprox
from reference.lafedopt import lafedopt
from reference.local_adaalter import local_adaalter
from reference.local_amsgrad import local_amsgrad
from reference.qfedavg import qfedavg
from reference.scaffold import scaffold
from worlds import N, Vector, World

Reference = Callable[..., dict[str, Any]]

RENAMED = {"optimizer": "client_optimizer"}
STATE = {"b": "b2", "m_k": "m", "v_k": "v"}
"""Options that have another name in the references."""


def by_rounds(function: Reference, names: Mapping[str, str], paper: Paper) -> Vectors:
    """Call a reference once per round, so that the server's rate may change; ``names`` are the names of its state."""
    function, x = paper.tweak("function", function), paper.world.x0
    state = {} if paper.tweak("forgets", False) else paper.given(**names)
    for r, cohort in paper.rounds():
        arguments = {RENAMED.get(key, key): value for key, value in paper.options.items() if key != "steps"} | state
        arguments |= {"weights": paper.weights, "lr": lambda _, t, r=r: paper.rate("lr")(r, t)}
        if "server_lr" in arguments:
            arguments["server_lr"] = paper.server_rate("server_lr")(r)
        if function in (scaffold, qfedavg):
            arguments["lr"] = paper.server_rate("lr")(r)
        if function is scaffold:
            arguments |= {"clients": N, "anchor_gradient": lambda k, _, x, r=r: gradient(paper, k, r, 0, x, stream=1)}
        if function is qfedavg:  # its sums know no weights; a client that is there n_k times weighs n_k
            weights = arguments.pop("weights")
            cohort = [k for k in cohort for _ in range(weights[k])]
            arguments["loss"] = lambda k, x: paper.world.loss(paper.batch(k, 0, 0, times=None), x)
        functions = lambda k, _, t, x, r=r: gradient(paper, k, r, t, x), lambda k, *_, r=r: paper.steps_of(k, r)
        state = paper.call(function, x, [cohort], *functions, **arguments)
        x = state.pop("x")
    return {"x": x, **paper.found(state, **names)}


def gradient(paper: Paper, k: int, r: int, t: int, x: Vector, stream: int = 0) -> Vector:
    return paper.world.gradient(paper.batch(k, r, t, stream=stream), x)


def met_before(*names: str) -> Callable[[World, Case, Vectors, np.random.Generator], Rows]:
    """Rows of the clients that took part before; client 1 never did."""

    def keep(world: World, case: Case, server: Vectors, rng: np.random.Generator) -> Rows:
        met = [k for k in range(N) if k != 1]
        rows = {name: {k: 0.5 * rng.normal(size=len(world.x0)) for k in met} for name in names}
        return rows | {"v": {k: np.abs(row) + 1e-3 for k, row in rows["v"].items()}} if "v" in rows else rows

    return keep


# --- methods ---------------------------------------------------------------------------------------------------------


LOCAL: Options = {"lr": 0.06, "steps": 3, "weight_decay": 0.0}
SERVER: Options = {**LOCAL, "server_lr": 0.7}
MOMENTS: Options = {"beta1": 0.8, "beta2": 0.9}
AT_THE_START = {"eps": Case(options={"eps": 10.0})}
"""eps is only where vhat starts; it must be larger than the gradients, or vhat forgets where it began."""


def plain(name: str, build: Any, reference: Reference, options: Options, state: str = "", **more: Any) -> Method:
    """``state`` names what the server has besides x, and what clients keep ("c_k")."""
    names = {key: STATE.get(key, key) for key in state.split()}
    keep = met_before(*(key[:-2] for key in names if key.endswith("_k")))
    call = partial(by_rounds, reference, names)
    return Method(name, "plain", PLAIN, build, call, options, keep, "quadratic", weighted=True, **more)


FEDLALR: Options = {**LOCAL, **MOMENTS, "eps": 0.01}
FEDAMS: Options = {**SERVER, **MOMENTS, "eps": 0.2}
NO_MOMENTS: Options = {**SERVER, "eps": 0.1}
LAFEDOPT: Options = {**NO_MOMENTS, **MOMENTS}
SERVER_ADAM: Options = {"server": "adam", "server_beta1": 0.7, "server_beta2": 0.85, "tau": 0.04, "v0": 0.1}
AVERAGING = [
    plain("fedavg", fs.FedAvg, fedavg, SERVER),
    plain("fedprox", fs.FedProx, fedprox, {**SERVER, "mu": 0.9}),
    *(plain(f"scaffold {v}", fs.Scaffold, scaffold, {**SERVER, "option": v}, "c c_k") for v in ("I", "II")),
    plain("fedadam", fs.FedAdam, fedadam, {**SERVER, **MOMENTS, "tau": 0.05}, "m v"),
    plain("fedyogi", fs.FedYogi, fedyogi, {**SERVER, **MOMENTS, "tau": 0.05}, "m v"),
    plain("fedadagrad", fs.FedAdagrad, fedadagrad, {**SERVER, "beta1": 0.8, "tau": 0.05}, "m v"),
    plain("qfedavg", fs.QFedAvg, qfedavg, {**LOCAL, "q": 0.7}),
    plain("qfedavg, large q", fs.QFedAvg, qfedavg, {**LOCAL, "q": 2.5}),
]
ADAPTIVE = [
    plain("fedlalr", fs.FedLALR, fedlalr, FEDLALR, "vhat m", wrong_in=AT_THE_START),
    plain("fedlalr, max", fs.FedLALR, fedlalr, {**FEDLALR, "aggregate": "max"}, "vhat m", wrong_in=AT_THE_START),
    *(
        plain(name, fs.FedLALR, fedlalr, {**FEDLALR, "restart": True, **more}, "vhat", wrong_in=AT_THE_START)
        for name, more in (("fedlalr, restart", {}), ("fedlalr, restart, max", {"aggregate": "max"}))
    ),
    *(
        plain(f"fedams {v}{', no maximum' * (not top)}", fs.FedAMS, fedams, {**FEDAMS, "option": v, "maximum": top},
              "m v vhat", wrong_in={"option": None})
        for v in (1, 2)
        for top in (True, False)
    ),
    *(
        plain(f"lafedopt {optimizer} {correction}", fs.LaFedOPT, lafedopt,
              {**options, "optimizer": optimizer, "correction": correction})
        for optimizer, options in (("adagrad", NO_MOMENTS), ("adam", LAFEDOPT), ("yogi", LAFEDOPT))
        for correction in ("joint", "local", "none")
    ),
    plain("lafedopt, v0", fs.LaFedOPT, lafedopt, {**LAFEDOPT, "v0": 0.3}),
    plain("lafedopt, server adam", fs.LaFedOPT, lafedopt, {**LAFEDOPT, **SERVER_ADAM}, "m v"),
    plain("local_amsgrad", fs.LocalAMSGrad, local_amsgrad, {**LOCAL, **MOMENTS, "eps": 0.02}, "vhat m_k v_k",
          wrong_in=AT_THE_START),
    plain("local_adaalter", fs.LocalAdaAlter, local_adaalter, {**LOCAL, "eps": 0.4, "b0": 0.7}, "b",
          wrong_in={"b0": Case()}),
]  # fmt: skip
METHODS = {method.name: method for method in (*AVERAGING, *ADAPTIVE)}


# --- rows ------------------------------------------------------------------------------------------------------------


def case(**fields: Any) -> Case:
    """From a random server, in the first round; what is no field of a case is a hyperparameter."""
    options = {key: value for key, value in fields.items() if key not in Case.__dataclass_fields__}
    return replace(Case(given=True, chunk=3, options=options), **{k: v for k, v in fields.items() if k not in options})


CUBE_ROOT = fs.CubeRoot(0.2, 3.0)
USUAL = {
    "minibatches": case(),
    "full batches": case(batch_size=None, weight_decay=0.1),
    "one client at a time": case(chunk=1, weight_decay=0.05),
    "partial participation": case(participation=3, weight_decay=0.2),
    "weighted by samples": case(weighting="samples"),
    "weighted, partial": case(weighting="samples", participation=2, batch_size=None),
    "two epochs": case(steps=fs.Epochs(2), sampling="epochs", batch_size=4, chunk=5, weight_decay=0.1),
    "two epochs, weighted, partial": case(
        steps=fs.Epochs(2), sampling="epochs", participation=4, weighting="samples", chunk=2
    ),
    "round decay": case(lr=fs.RoundDecay(0.07, 0.6), server_lr=fs.StepDecay(0.08, at=(1,), factor=0.3)),
    "cube root": case(lr=CUBE_ROOT, participation=3),
    "cube root, unequal steps": case(lr=CUBE_ROOT, steps=fs.Epochs(1.5), sampling="epochs", participation=3, chunk=2),
}
OF_AVERAGING = {
    "all clients together": case(chunk=N, steps=20),
    "a part of an epoch": case(steps=fs.Epochs(0.6), sampling="epochs", chunk=4),
    "an epoch and a half, uniform draws": case(steps=fs.Epochs(1.5), batch_size=5),
    "stratified": case(sampling="stratified", batch_size=4),
    "step decay": case(lr=fs.StepDecay(0.08, at=(0.5,), factor=0.3)),
    "cube root on the server": case(server_lr=CUBE_ROOT),
}
GROWING = {
    "interval": case(steps=fs.Interval(2, 2.0)),
    "interval, rounded up": case(steps=fs.Interval(2, 3.0, rounding="ceil"), participation=3, weight_decay=0.1),
    "interval, rounded down": case(steps=fs.Interval(3, 1.5), batch_size=None, weighting="samples"),
    "interval, cube root": case(steps=fs.Interval(2, 2.0), lr=CUBE_ROOT),
}
IN_SOFTMAX = ["minibatches", "partial participation", "weighted by samples", "two epochs", "interval, cube root"]
OWN_STARTS = ["minibatches", "weighted, partial", "interval, rounded up"]


def fitted(method: Method, case: Case) -> Case:
    """The case without options that the method does not have."""
    return replace(case, options={k: v for k, v in case.options.items() if k in method.options})


def right_rows() -> Iterator[Row]:
    for method in AVERAGING:
        for label, here in {**USUAL, **OF_AVERAGING}.items():
            if method.build is not fs.Scaffold or here.weighting == "uniform":  # weighted SCAFFOLD has no paper
                for world in PLAIN:
                    yield method.row(label, fitted(method, here), world)
    for method in ADAPTIVE:
        for label, here in {**USUAL, **GROWING}.items():
            for world in PLAIN if label in IN_SOFTMAX else ["quadratic"]:
                yield method.row(label, fitted(method, here), world)
        for label in OWN_STARTS:
            here = fitted(method, {**USUAL, **GROWING}[label])
            yield method.row(f"own start, {label}", replace(here, given=False), "softmax")


def wrong_rows() -> Iterator[Row]:
    usual, minibatches = USUAL["partial participation"], USUAL["minibatches"]
    for method in METHODS.values():
        yield from method.usual_mistakes(fitted(method, usual))
        yield method.wrong("interval", fitted(method, usual), options={"steps": fs.Interval(3, 2.0)})

    def option(name: str, key: str, *values: Any) -> Iterator[Row]:
        for value in values:
            yield METHODS[name].wrong(f"{key} {value}", usual, options={key: value})

    yield from option("scaffold II", "option", "I")
    yield METHODS["fedadam"].wrong("fedyogi", usual, tweaks={"function": fedyogi})
    yield from option("fedlalr", "aggregate", "max")
    yield from option("fedlalr, max", "aggregate", "mean")
    yield from option("fedlalr, restart", "aggregate", "max")
    for name in ("fedlalr, restart", "fedlalr, restart, max"):
        yield METHODS[name].wrong("restart forgotten", minibatches, options={"restart": False})
    for version in (1, 2):
        yield from option(f"fedams {version}", "option", 3 - version)
        yield from option(f"fedams {version}", "maximum", False)
    yield from option("lafedopt adam joint", "optimizer", "yogi")
    yield from option("lafedopt adagrad none", "optimizer", "adam")
    for optimizer in ("adagrad", "adam", "yogi"):
        yield from option(f"lafedopt {optimizer} joint", "correction", "local", "none")
        yield from option(f"lafedopt {optimizer} local", "correction", "none")
    yield METHODS["lafedopt, server adam"].wrong("tau, own start", options={"tau": 0.0404})
    yield METHODS["local_amsgrad"].wrong("moments forgotten", minibatches, tweaks={"forgets": True})

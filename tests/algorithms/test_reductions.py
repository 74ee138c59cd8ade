"""Where one algorithm is another: special values of hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

import fedstrata as fs
from algorithms.examples import DUAL, RATE, apart, example, vectors
from cases import product, table
from fedstrata.algorithms.matrices import MATRICES

pytestmark = pytest.mark.untraced

ADAPTIVE = [matrix for matrix in MATRICES if matrix != "identity"]
HUGE = 1e300
SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": {"batch_size": 4},
    "full batches": {"batch_size": None},
    "weighted": {"batch_size": 3, "weighting": "samples"},
    "epochs": {"batch_size": 4, "sampling": "epochs"},
    "partial": {"batch_size": 3, "participation": 3},
    "partial, weighted": {"batch_size": 4, "participation": 3, "weighting": "samples"},
}


@dataclass(frozen=True)
class Same:
    """``ours`` is ``theirs`` on an example, up to ``within``; ``others`` are at least so far away.

    later: how far they are apart after one round more, where they are one for the first rounds only.
    only:  the settings in which it holds, where it does not in all.
    moves: how far x must go at least.
    """

    example: str
    ours: fs.Algorithm
    theirs: fs.Algorithm
    others: tuple[tuple[fs.Algorithm, float], ...] = ()
    keys: str = "x y"
    rounds: int = 3
    within: float = 1e-12
    later: float | None = None
    only: tuple[str, ...] = tuple(SETTINGS)
    moves: float = 0.01


FEDAVG = fs.FedAvg(lr=0.2, steps=4)
LOCAL: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 4}
SGDA = fs.LocalSGDA(**LOCAL)
STORM: dict[str, Any] = {"eta": 0.8, "steps": 3, "alpha": 0.4, "beta": 0.6}
FGDA = fs.FGDA(gamma=RATE, lam=DUAL, **STORM)
HALF: dict[str, Any] = {"lr": 2 * RATE, "dual_lr": 2 * DUAL, "alpha": 0.5, "beta": 2.0}
"""beta alpha = 1: a momentum is the last gradient; the rates are alpha lr."""
SCGD: dict[str, Any] = {"beta": RATE, "eta": 0.5, "gamma": 0.9, "steps": 3}
MFCGD: dict[str, Any] = {"gamma": RATE, "steps": 4, "alpha": 0.3, "beta": 0.7}
CUBE = fs.CubeRoot(0.3, 2.0)
ALL_DATA = ("full batches",)
MOMENTA: dict[str, Any] = {"eta": 0.5, "gamma_x": 0.5, "gamma_y": 0.7, "rho_x": 1.2, "rho_y": 0.9, "weight_decay": 0.1}
FORGETFUL = fs.LocalSCGDAM(alpha=2.0, **MOMENTA), fs.LocalSMCGDAM(alpha=4.0, **MOMENTA)
NEXT_TO_ONE = math.nextafter(1.0, 0.0)

SAME: dict[str, Same] = {
    "q-FedAvg with q = 0": Same("softmax", fs.QFedAvg(q=0.0, lr=0.2, steps=4), FEDAVG),
    "FedProx with mu = 0": Same(
        "softmax", fs.FedProx(mu=0.0, lr=0.2, steps=4, server_lr=0.5), replace(FEDAVG, server_lr=0.5)
    ),
    "FedAdam without adaptivity": Same(
        "softmax", fs.FedAdam(beta1=0.0, beta2=0.0, tau=1e9, server_lr=1e9, lr=0.2, steps=4), FEDAVG, within=1e-8
    ),
    **{
        f"the first round of SCAFFOLD {option}": Same(
            "softmax", fs.Scaffold(lr=0.2, steps=4, option=option), FEDAVG, rounds=1, later=1e-5
        )
        for option in ("I", "II")
    },
    "Local-SCGD without memory": Same(
        "bent", fs.LocalSCGD(beta=RATE, gamma=1.0, steps=3), fs.ComFedL(lr=RATE, steps=3)
    ),
    "Local-SCGDM without momentum": Same(
        "bent",
        fs.LocalSCGDM(alpha=2.0, **SCGD),
        fs.LocalSCGD(**SCGD),
        others=((fs.LocalSCGDM(alpha=1.0, **SCGD), 1e-4),),
        keys="x u",
    ),
    # Without noise every estimate is exact, and q steps with the last one on the server are q local steps.
    "MFCGD on all data": Same(
        "bent", fs.MFCGD(varrho=0.1, **MFCGD), fs.ComFedL(lr=RATE, steps=4), within=1e-11, only=ALL_DATA
    ),
    "MFCGD with products on all data": Same(
        "bent", fs.MFCGD(jacobian="product", **MFCGD), fs.ComFedL(lr=RATE, steps=4), within=1e-11, only=ALL_DATA
    ),
    "MFCGD by the theorem on all data": Same(
        "bent",
        fs.MFCGD(gamma=1.0, eta=CUBE, steps=4, weights="theorem"),
        fs.ComFedL(lr=CUBE, steps=4),
        within=1e-11,
        only=ALL_DATA,
    ),
    # theta next to 1 leaves A = rho I; with rho = 1 that is the identity from the start.
    **{
        f"AdaMFCGD that learns nothing, {matrix}, {first}": Same(
            "bent",
            fs.AdaMFCGD(gamma=0.1, theta=NEXT_TO_ONE, rho=rho, matrix=matrix, first_matrix=first, steps=3),
            fs.MFCGD(gamma=0.1 / rho, steps=3),
            within=1e-6,
            only=("minibatches",),
            moves=0.05,
        )
        for matrix in ADAPTIVE
        for first, rho in (("accumulator", 0.25), ("identity", 1.0))
    },
    # u is one matrix on all batches, so w = u^T v in both forms, if beta = varrho.
    **{
        f"{kind.__name__} with products, one Jacobian": Same(
            "one Jacobian",
            kind(gamma=0.05, steps=3, alpha=0.3, beta=0.6, varrho=0.6, jacobian="product"),
            kind(gamma=0.05, steps=3, alpha=0.3, beta=0.6, varrho=0.6, jacobian="exact"),
            others=((kind(gamma=0.05, steps=3, alpha=0.3, beta=0.6, varrho=0.2, jacobian="exact"), 1e-4),),
            within=1e-11,
            only=("minibatches",),
        )
        for kind in (fs.MFCGD, fs.AdaMFCGD)
    },
    "MFCGD with balls that are never reached": Same(
        "bent",
        fs.MFCGD(steps=2, c_g=1e9, c_f=1e9),
        fs.MFCGD(steps=2),
        others=((fs.MFCGD(steps=2, c_g=1e9, c_f=1e-3), 1e-3),),
        rounds=2,
        within=1e-13,
        only=("minibatches",),
    ),
    **{
        f"AdaFGDA without matrices, {kind}": Same(
            "ball",
            fs.AdaFGDA(gamma=RATE, lam=DUAL, matrix="identity", synchronisation=kind, **STORM),
            replace(FGDA, synchronisation=kind),
            others=((fs.AdaFGDA(gamma=RATE, lam=DUAL, synchronisation=kind, **STORM), 1e-2),),
            within=0.0,
        )
        for kind in ("two_phase", "single")
    },
    # A / rho and B / rho are the identity, up to 1e-12.
    **{
        f"AdaFGDA with a huge rho, {matrix}, {first}": Same(
            "ball",
            fs.AdaFGDA(gamma=RATE * 1e12, lam=DUAL * 1e12, rho=1e12, matrix=matrix, first_matrix=first, **STORM),
            FGDA,
            within=1e-10,
            only=("minibatches",),
        )
        for matrix in ADAPTIVE
        for first in ("average", "accumulator")
    },
    "SAGDA without control variates": Same("ball", fs.SAGDA(control=False, **LOCAL), SGDA),
    "the first round of SAGDA": Same("ball", fs.SAGDA(**LOCAL), SGDA, rounds=1, later=1e-3),
    # Not clipped, not held back, not decayed: one rate for x and y, and c the mean of the clients' c_k.
    "CODASCA without its terms": Same(
        "ball",
        fs.CODASCA(lr=RATE, steps=4, clip=0.0, weight_decay=0.0, gamma=HUGE),
        fs.SAGDA(lr=RATE, dual_lr=RATE, steps=4),
    ),
    "CoDA in one long stage without a centre": Same(
        "ball", fs.CoDA(lr=RATE, steps=4, stage_steps=1000, gamma=HUGE), fs.LocalSGDA(lr=RATE, dual_lr=RATE, steps=4)
    ),
    # Its average is its only point; the estimate of y is left out without a best y.
    "CoDA in stages of one step": Same(
        "ball",
        fs.CoDA(lr=RATE, steps=4, stage_steps=1, factor=1.0, average=True),
        fs.CoDA(lr=RATE, steps=4, stage_steps=1, factor=1.0, average=False),
        only=ALL_DATA,
    ),
    "a snapshot at every step": Same(
        "free",
        fs.LocalSGDAPlus(snapshot_every=1, **LOCAL),
        SGDA,
        others=tuple((fs.LocalSGDAPlus(snapshot_every=every, **LOCAL), 1e-4) for every in (4, 8, 0)),
        within=0.0,
    ),
    "a snapshot after steps^2 steps": Same(
        "free",
        fs.LocalSGDAPlus(snapshot_every=0, **LOCAL),
        fs.LocalSGDAPlus(snapshot_every=16, **LOCAL),
        others=((fs.LocalSGDAPlus(snapshot_every=8, **LOCAL), 1e-4),),
        within=0.0,
    ),
    "one step from a snapshot": Same(
        "ball",
        fs.LocalSGDAPlus(snapshot_every=1, **{**LOCAL, "steps": 1}),
        replace(SGDA, steps=1),
        rounds=4,
        within=0.0,
    ),
    # All clients step alike, to one point, and average their gradients there (the dual is free, so its mean is too).
    # With momenta of their own, the step has gradients from before the averaging.
    "averaged momenta of one gradient and one step": Same(
        "free",
        fs.LocalSGDAM(steps=1, **HALF),
        replace(SGDA, steps=1),
        others=((fs.LocalSGDAM(steps=1, average_momentum=False, **HALF), 1e-3),),
        only=("full batches", "all data, weighted"),
    ),
    # x and y see the means of the estimates only.
    "one step with either synchronisation": Same(
        "ball",
        fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=0.3, beta=0.6, synchronisation="single"),
        fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=0.3, beta=0.6),
        rounds=4,
        only=("full batches", "all data, weighted"),
    ),
    # Estimates from all data are the clients' own gradients; the server's step is the mean of the clients' last ones.
    # The dual is free: otherwise the mean would be projected, not what it is a mean of.
    "FGDA that never averages its estimates, on all data": Same(
        "free",
        fs.FGDA(gamma=2 * RATE, lam=2 * DUAL, eta=0.5, steps=4, alpha=0.3, beta=0.6, synchronisation="single"),
        SGDA,
        others=((fs.FGDA(gamma=2 * RATE, lam=2 * DUAL, eta=0.5, steps=4, alpha=0.3, beta=0.6), 1e-4),),
        only=("full batches", "all data, weighted"),
    ),
    # alpha eta^2 = 1 there and alpha eta = 1 here: both take the fresh value. Weights above 1 are no less forgetful;
    # weights below 1, even equal ones, are not the same thing.
    **{
        f"estimators that forget, {name}": Same(name, *reversed(FORGETFUL), keys="x y h.1 p q")
        for name in ("5-3", "5-3, no dual", "5-1", "5-3, ball", "auc, 1")
    },
    "estimators with weights above 1": Same(
        "5-3",
        fs.LocalSMCGDAM(alpha=9.0, **MOMENTA),
        FORGETFUL[0],
        others=((fs.LocalSMCGDAM(alpha=2.0, **MOMENTA), 1e-3), (fs.LocalSCGDAM(alpha=1.0, **MOMENTA), 1e-3)),
        only=("minibatches",),
    ),
    "a moving average with a weight above 1": Same(
        "5-3", fs.LocalSCGDAM(alpha=5.0, **MOMENTA), FORGETFUL[0], within=0.0, only=("minibatches",)
    ),
}
DIFFERENT: dict[str, tuple[str, fs.Algorithm, fs.Algorithm, float]] = {
    "snapshots after 4 and 8 steps": (
        "free",
        fs.LocalSGDAPlus(snapshot_every=4, **LOCAL),
        fs.LocalSGDAPlus(snapshot_every=8, **LOCAL),
        1e-4,
    ),
    "estimators with equal weights": (
        "5-3",
        fs.LocalSMCGDAM(alpha=2.0, **MOMENTA),
        fs.LocalSCGDAM(alpha=1.0, **MOMENTA),
        1e-3,
    ),
    "several steps along averaged momenta": ("free", fs.LocalSGDAM(steps=4, **HALF), SGDA, 1e-3),
    "several steps with either synchronisation": (
        "ball",
        fs.FGDA(gamma=RATE, lam=DUAL, steps=3, alpha=0.3, beta=0.6, synchronisation="single"),
        fs.FGDA(gamma=RATE, lam=DUAL, steps=3, alpha=0.3, beta=0.6),
        1e-4,
    ),
}
SETTINGS["all data, weighted"] = {"batch_size": None, "weighting": "samples"}


def holds(name: str, setting: str) -> bool:
    same = SAME[name]
    algorithms = [same.ours, same.theirs, *(other for other, _ in same.others)]
    everyone = any(algorithm.full_participation for algorithm in algorithms)
    return setting in same.only and not (everyone and "participation" in SETTINGS[setting])


@pytest.mark.slow
@table(
    "name, setting",
    [(name, setting) for name in SAME for setting in SETTINGS if holds(name, setting)],
    key=lambda name, setting: [name.partition(",")[0], setting, *(name.split(", ")[1:] or [""])],
    name=lambda *row: row,
)
def test_two_algorithms_agree(name: str, setting: str) -> None:
    same, (problem, data) = SAME[name], example(SAME[name].example)
    run = SETTINGS[setting]
    theirs = vectors(same.theirs, problem, data, same.rounds, **run)
    assert apart(vectors(same.ours, problem, data, same.rounds, **run), theirs, same.keys) <= same.within
    assert (theirs["x"] - problem.x0).abs().max() > same.moves
    for other, least in same.others:
        assert apart(vectors(other, problem, data, same.rounds, **run), theirs, same.keys) > least, other
    if same.later is not None:
        ours, theirs = (vectors(a, problem, data, same.rounds + 1, **run) for a in (same.ours, same.theirs))
        assert apart(ours, theirs, same.keys) > same.later


@product("name, setting", DIFFERENT, [s for s in SETTINGS if "participation" not in SETTINGS[s]])
def test_two_algorithms_differ(name: str, setting: str) -> None:
    of, one, other, least = DIFFERENT[name]
    ends = [vectors(algorithm, *example(of), 4, **SETTINGS[setting]) for algorithm in (one, other)]
    assert apart(*ends) > least

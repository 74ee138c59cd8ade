"""Where an algorithm is gradient descent, and ascent: for one client, or where a round is one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import fedstrata as fs
from algorithms.examples import DUAL, EXAMPLES, RATE, alone, apart, descent, example, vectors
from cases import product

pytestmark = pytest.mark.untraced

HUGE = 1e300
HALF: dict[str, Any] = {"lr": 2 * RATE, "dual_lr": 2 * DUAL, "alpha": 0.5, "beta": 2.0}
"""beta alpha = 1: a momentum is the last gradient; the rates are alpha lr."""


@dataclass(frozen=True)
class Central:
    """An algorithm that is gradient descent with these rates for one client, or for all if a round is one step."""

    algorithm: fs.Algorithm
    examples: tuple[str, ...]
    rule: dict[str, Any]
    within: float = 1e-12


def central(algorithm: fs.Algorithm, *examples: str, within: float = 1e-12, **rule: Any) -> Central:
    return Central(algorithm, examples, {"weight_decay": getattr(algorithm, "weight_decay", 0.0), **rule}, within)


ONE_STEP: dict[str, Any] = {"lr": RATE, "dual_lr": DUAL, "steps": 1}
NO_TERMS: dict[str, Any] = {"lr": RATE, "steps": 1, "clip": 0.0, "weight_decay": 0.0, "gamma": HUGE}
MFCGD_STEP: dict[str, Any] = {"gamma": RATE, "steps": 1, "alpha": 0.3, "beta": 0.6}
LAST_GRADIENTS: dict[str, Any] = {"eta": 0.5, "gamma_x": 2 * RATE, "gamma_y": 2 * DUAL, "rho_x": 2.0, "rho_y": 2.0}
SADDLE = ("free", "ball")
LAYERED = ("5-3", "5-3-7", "4-6-2-5", "4-6-2-5, no dual", "5-3-7-1, simplex", "auc, 3", "risk averse")
NO_DUAL = ("5-3-7, no dual", "risk averse")
STEP: dict[str, Central] = {
    "fedavg": central(fs.FedAvg(lr=RATE, steps=1), "quadratic", "softmax", within=1e-13),
    "fedprox": central(fs.FedProx(lr=RATE, steps=1, mu=3.0), "quadratic", within=1e-13),
    "scaffold": central(fs.Scaffold(lr=RATE, steps=1), "quadratic", within=1e-13),
    "comfedl": central(fs.ComFedL(lr=RATE, steps=1), "bent", "bent twice"),
    "local_scgd": central(fs.LocalSCGD(beta=RATE, gamma=1.0, steps=1), "bent"),
    "local_scgdm": central(fs.LocalSCGDM(beta=RATE, gamma=1.0, alpha=1.0, steps=1), "bent"),
    "local_moml": central(fs.LocalMOML(lr=RATE, beta=1.0, steps=1), "bent"),
    "mfcgd": central(fs.MFCGD(varrho=0.2, **MFCGD_STEP), "bent"),
    "mfcgd, product": central(fs.MFCGD(jacobian="product", **MFCGD_STEP), "bent"),
    "fgda": central(fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=1.0, beta=1.0), *SADDLE),
    "fgda, any weights": central(fs.FGDA(gamma=2 * RATE, lam=2 * DUAL, eta=0.5, steps=1, alpha=0.3, beta=0.0), *SADDLE),
    "fgda, single": central(
        fs.FGDA(gamma=RATE, lam=DUAL, steps=1, alpha=0.2, beta=0.6, synchronisation="single"), *SADDLE
    ),
    "local_sgda": central(fs.LocalSGDA(**ONE_STEP), *SADDLE),
    "local_sgda_plus": central(fs.LocalSGDAPlus(**ONE_STEP), *SADDLE),
    "local_sgdam": central(fs.LocalSGDAM(steps=1, **HALF), *SADDLE),
    "sagda": central(fs.SAGDA(**ONE_STEP), *SADDLE),
    "cdma": central(fs.CDMA(**ONE_STEP), *SADDLE),
    "cdma, ada": central(fs.CDMA(ada=True, weight=0.4, **ONE_STEP), *SADDLE),
    "fednest": central(fs.FedNest(alpha=RATE, beta=DUAL, steps=1), *SADDLE, alternating=True),
    "coda": central(fs.CoDA(lr=RATE, steps=1, stage_steps=1000, gamma=HUGE), *SADDLE, dual_lr=RATE),
    "codasca": central(fs.CODASCA(**NO_TERMS), *SADDLE, dual_lr=RATE),
    "codasca, no control": central(fs.CODASCA(control=False, **NO_TERMS), *SADDLE, dual_lr=RATE),
}
"""One step a round."""
STEPS: dict[str, Central] = {
    "fednest, composition": central(fs.FedNest(alpha=RATE, beta=1.0, steps=1), "bent, global"),
    "fgda, 3 steps": central(fs.FGDA(gamma=RATE, lam=DUAL, steps=3, alpha=0.3, beta=0.6), *SADDLE),
    "local_sgda, 3 steps": central(fs.LocalSGDA(**{**ONE_STEP, "steps": 3}), *SADDLE),
    "local_sgdam, 4 steps": central(fs.LocalSGDAM(steps=4, **HALF), *SADDLE),
    "local_sgdam, own momenta": central(fs.LocalSGDAM(steps=4, average_momentum=False, **HALF), *SADDLE),
    "sagda, 3 steps": central(fs.SAGDA(**{**ONE_STEP, "steps": 3}), *SADDLE),
    "cdma, 3 steps": central(fs.CDMA(**{**ONE_STEP, "steps": 3}), *SADDLE),
    # With momenta of one gradient and all data, estimates are exact whatever their weight.
    **{
        f"local_smcgdam, alpha {alpha}": central(
            fs.LocalSMCGDAM(alpha=alpha, steps=3, **LAST_GRADIENTS), *LAYERED, within=1e-10
        )
        for alpha in (0.01, 1.3, 4.0)
    },
    "local_scgdam": central(fs.LocalSCGDAM(alpha=2.0, steps=3, **LAST_GRADIENTS), "5-3", within=1e-10),
    **{
        f"local_smcgdam, weight decay, {steps} steps": central(
            fs.LocalSMCGDAM(alpha=1.3, weight_decay=0.1, steps=steps, **LAST_GRADIENTS), *NO_DUAL
        )
        for steps in (1, 3)
    },
}
"""Several, or one of a method for which clients that differ are something else."""
CENTRAL = {**STEP, **STEPS}


@product(
    "name, where", CENTRAL, [*EXAMPLES, *SADDLE, *LAYERED, *NO_DUAL[:1]], where=lambda n, w: w in CENTRAL[n].examples
)
def test_one_client_does_gradient_descent(name: str, where: str) -> None:
    row, (problem, data) = CENTRAL[name], example(where)
    one = alone(data)
    found = vectors(row.algorithm, problem, one, 3)
    expected = descent(problem, one, 3 * row.algorithm.steps, **row.rule)
    assert apart(found, expected) < row.within
    assert (expected["x"] - problem.x0).abs().max() > 1e-2


@product("name, weighting", STEP, ["uniform", "samples"])
def test_one_step_of_all_clients_is_one_on_their_mean(name: str, weighting: str) -> None:
    """With weights by samples that is the mean over the pooled data. A dual is free: else its mean is not projected."""
    row, (problem, data) = STEP[name], example(STEP[name].examples[0])
    found = vectors(row.algorithm, problem, data, 4, weighting=weighting)
    assert apart(found, descent(problem, data, 4, weighting=weighting, **row.rule)) < row.within


def test_the_mean_weighted_by_samples_is_that_of_the_pooled_data() -> None:
    problem, data = example("softmax")
    pooled = fs.FederatedData.from_arrays([data.train.arrays])
    assert apart(descent(problem, data, 4, weighting="samples"), descent(problem, pooled, 4)) < 1e-13


@pytest.mark.parametrize("where", ["5-3-7", "4-6-2-5, no dual"])
def test_for_one_client_rounds_are_only_steps(where: str) -> None:
    """Nothing is lost between rounds: one of six steps, or six of one, with all data."""
    problem, data = example(where)
    ends = [
        vectors(
            fs.LocalSMCGDAM(alpha=1.3, steps=steps, **{**LAST_GRADIENTS, "rho_x": 1.2, "rho_y": 0.9}),
            problem,
            alone(data),
            6 // steps,
        )
        for steps in (6, 3, 1)
    ]
    assert max(apart(end, ends[0], " ".join(ends[0])) for end in ends) < 1e-12

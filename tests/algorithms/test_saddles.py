"""Quadratic saddles whose solution is known: which methods find it with local steps, and which miss it.

A batch has all the information, so there is no noise: what is left is the drift of clients that differ.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import fedstrata as fs
from cases import repeats
from fedstrata.problems import Quadratic
from support import play


def away(q: Quadratic, algorithm: fs.Algorithm, rounds: int) -> float:
    """The distance to the saddle after ``rounds`` rounds."""
    state, _ = play(algorithm, q.problem, q.data, rounds)
    assert q.dual is not None
    return float(torch.cat([state.x - q.solution, state.y - q.dual]).norm())


@pytest.mark.slow
def test_fgda_finds_the_saddle_that_it_misses_when_estimates_are_never_averaged() -> None:
    """Heterogeneous clients, ten local steps, no noise: the second phase of the synchronisation is what it takes."""
    q = fs.quadratic_saddle(clients=50, spread=10, coupling=1.0)
    algorithm = fs.FGDA(gamma=0.1, lam=0.1, eta=0.5, alpha=0.0, beta=0.0, steps=10)
    assert away(q, algorithm, 300) < 1e-12
    assert away(q, replace(algorithm, synchronisation="single"), 300) > 1e-3


@cache
def example(same: bool = False) -> Quadratic:
    """Clients that pull into different directions; their couplings, and so their Jacobians, differ or are the same."""
    return fs.quadratic_saddle(clients=6, dimension=4, spread=10, coupling=0.0 if same else 1.0)


ROUNDS = 80
LOCAL: dict[str, Any] = {"lr": 0.05, "dual_lr": 0.1, "steps": 5}
SCRIPT: dict[str, Any] = {"lr": 0.08, "steps": 5, "clip": 0.0, "weight_decay": 0.0, "stage_rounds": 10, "factor": 1.0}
STORM: dict[str, Any] = {"gamma": 0.05, "lam": 0.1, "steps": 5}
CORRECTED: dict[str, fs.Algorithm] = {
    "fgda, weights 0": fs.FGDA(alpha=0.0, beta=0.0, **STORM),
    "adafgda, weights 0": fs.AdaFGDA(alpha=0.0, beta=0.0, rho=1.0, **STORM),
    "sagda": fs.SAGDA(**LOCAL),
    "sagda, server rates": fs.SAGDA(server_lr=1.3, server_dual_lr=1.2, **LOCAL),
    "cdma": fs.CDMA(**LOCAL),
    "cdma, ada": fs.CDMA(ada=True, **LOCAL),
    "fednest": fs.FedNest(alpha=0.1, beta=0.5, steps=5),
    "codasca": fs.CODASCA(**SCRIPT),
}
DRIFTING: dict[str, fs.Algorithm] = {
    "fgda, weights 0.5": fs.FGDA(**STORM),
    "fgda, single": fs.FGDA(alpha=0.0, beta=0.0, synchronisation="single", **STORM),
    "adafgda, weights 0.5": fs.AdaFGDA(rho=1.0, **STORM),
    "local_sgda": fs.LocalSGDA(**LOCAL),
    "local_sgda_plus": fs.LocalSGDAPlus(snapshot_every=10, **LOCAL),
    "local_sgdam": fs.LocalSGDAM(**LOCAL),
    "local_sgdam, own momenta": fs.LocalSGDAM(average_momentum=False, **LOCAL),
    "local_sgdam_plus": fs.LocalSGDAMPlus(snapshot_every=10, **LOCAL),
    "fsgda": fs.SAGDA(control=False, **LOCAL),
    "coda, last iterates": fs.CoDA(lr=0.1, steps=5, stage_steps=200, factor=1.0, average=False),
    "codasca, no control": fs.CODASCA(control=False, **SCRIPT),
}


@pytest.mark.slow
@repeats("name", CORRECTED)
def test_corrected_methods_find_the_saddle(name: str) -> None:
    """With several local steps, whether the clients' Jacobians differ or not.

    FGDA is corrected as far as its estimates carry the past: with weights 0.
    """
    assert away(example(), CORRECTED[name], ROUNDS) < 1e-11
    assert away(example(same=True), CORRECTED[name], ROUNDS) < 1e-11


@pytest.mark.slow
@repeats("name", DRIFTING)
def test_the_others_miss_it_where_the_jacobians_differ(name: str) -> None:
    """And find it where only the targets do, because drifts cancel then (CoDA is held back to its centre)."""
    assert 3e-3 < away(example(), DRIFTING[name], ROUNDS) < 0.5
    assert away(example(same=True), DRIFTING[name], ROUNDS) < (1e-5 if name.startswith("coda,") else 1e-11)


ONE: dict[str, Any] = {"lr": 0.1, "dual_lr": 0.5, "steps": 1}


@repeats(
    "algorithm",
    [
        fs.FGDA(gamma=0.1, lam=0.5, steps=1),
        fs.FGDA(gamma=0.1, lam=0.5, steps=1, synchronisation="single"),
        fs.LocalSGDA(**ONE),
        fs.LocalSGDAPlus(**ONE),
        fs.LocalSGDAM(**ONE),
        fs.SAGDA(**ONE, control=False),
    ],
)
def test_with_one_step_there_is_no_drift(algorithm: fs.Algorithm) -> None:
    """But with momenta of their own there is: they were made before the averaging."""
    assert away(example(), algorithm, ROUNDS) < 1e-11
    assert away(example(), fs.LocalSGDAM(average_momentum=False, **ONE), ROUNDS) > 1e-2


@pytest.mark.slow
def test_the_drift_of_local_sgda_is_in_proportion_to_its_rates() -> None:
    found = [away(example(), fs.LocalSGDA(lr=0.05 / n, dual_lr=0.1 / n, steps=5), 25 * n) for n in (4, 8)]
    assert found[0] / found[1] == pytest.approx(2.0, rel=0.1)


@pytest.mark.slow
def test_the_drift_of_fgda_vanishes_with_its_weights() -> None:
    found = [away(example(), fs.FGDA(alpha=weight, beta=weight, **STORM), ROUNDS) for weight in (0.5, 0.1, 0.01)]
    assert found[0] > 2 * found[1] > 10 * found[2] > 1e-5


@pytest.mark.slow
def test_coda_comes_near_the_saddle_in_stages() -> None:
    """The rate falls, and with it the drift; a stage's average carries its beginning along, so it comes slowly."""
    algorithm = fs.CoDA(lr=0.1, steps=5, stage_steps=50, factor=2.0)
    ends = [away(example(), algorithm, rounds) for rounds in (10, 10 + 20, 10 + 20 + 40, 10 + 20 + 40 + 80)]
    assert all(later < earlier for earlier, later in pairwise(ends))
    assert ends[-1] < 0.2 * ends[0]

"""The default hyperparameters of every algorithm learn something, on every kind of problem that it is for."""

from __future__ import annotations

from typing import Any

import pytest

import fedstrata as fs
from cases import table
from fedstrata.algorithms import ALGORITHMS

DUAL = sorted(name for name, kind in ALGORITHMS.items() if kind.dual and not kind.mixture)
ORDINARY = sorted(n for n, kind in ALGORITHMS.items() if kind.solves(fs.quadratic().problem) and not kind.auxiliary)
LEARNED: list[tuple[str, str, dict[str, Any], int]] = [
    *(("erm", name, {}, 5) for name in ORDINARY),
    *(("robust", name, {}, 20) for name in ("comfedl", "mfcgd", "adamfcgd", "local_scgd", "local_scgdm", "local_moml")),
    *(("maml", name, {}, 20) for name in ("comfedl", "local_scgd", "local_scgdm", "local_moml")),
    *(("maml", name, {"jacobian": "product"}, 20) for name in ("mfcgd", "adamfcgd")),
    ("damaml", "comfedl", {}, 20),
    ("agnostic", "drfa", {}, 20),
    ("agnostic", "afl", {}, 60),
    *(("fair", name, {}, {"fednest": 60, "codasca": 30}.get(name, 20)) for name in DUAL),
    *(("robust, the mean inside", name, {}, 20) for name in ("local_smcgdam", "local_scgdam")),
    *(("maml, the mean inside", name, {}, 20) for name in ("local_scgdam", "local_smcgdam")),
    ("robust, the mean inside", "fednest", {}, 60),
    ("maml, the mean inside", "fednest", {}, 60),
    ("risk_averse", "local_smcgdam", {}, 20),
    ("erm", "local_sgdm_rl", {}, 20),
]
"""Problem, algorithm, options that are not the default, rounds."""


@pytest.fixture(scope="module")
def digits() -> fs.FederatedData:
    return fs.data.digits().split(fs.partition.dirichlet(0.5), clients=8, seed=0)


@pytest.mark.slow
@table("problem, name, options, rounds", LEARNED, key=lambda problem, *_: [problem], name=lambda p, n, *_: [n, "on", p])
def test_default_hyperparameters_learn(
    problem: str, name: str, options: dict[str, Any], rounds: int, digits: fs.FederatedData
) -> None:
    kind, _, inside = problem.partition(", ")
    more: dict[str, Any] = {"clients": digits.clients} if kind == "agnostic" else {}
    more |= {"classes": 10, "regularise": 5.0} if kind == "fair" else {}
    more |= {"inner_mean": "global"} if inside else {}
    more |= {"prior": False} if kind == "erm" else {}
    built = getattr(fs, kind)(fs.models.model("logreg", (1, 8, 8), 10), **more)
    if ALGORITHMS[name].auxiliary:
        assert digits.test is not None
        digits = digits.with_auxiliary(*(a[:150] for a in digits.test))
    run = fs.train(built, digits, ALGORITHMS[name](**options), rounds=rounds, batch_size=16, eval_every=rounds)
    first, last = run.history[0], run.history[-1]
    if kind == "erm":
        assert first["loss"] == pytest.approx(2.302585, abs=1e-4)  # log 10: the model starts at zero
    falls_to, accuracy = (0.8, 0.6) if name in ORDINARY else (0.85, 0.65)
    options_used = ", ".join(f"{k} = {v}" for k, v in {**vars(ALGORITHMS[name]()), **options}.items())
    hint = (
        f"{name} does not learn {problem} on digits with its default rates ({options_used}): change the defaults in "
        "src/fedstrata/algorithms, or its line in LEARNED of tests/algorithms/test_learning.py."
    )
    assert last["loss"] < falls_to * first["loss"], hint
    assert last["accuracy"] > accuracy, hint
    if name not in ORDINARY:
        assert last["accuracy_worst"] > 2 * first["accuracy_worst"] or last["accuracy_worst"] > 0.5, hint


def test_every_algorithm_is_shown_to_learn() -> None:
    missing = set(ALGORITHMS) - {name for _, name, *_ in LEARNED}
    assert not missing, f"Add to LEARNED of tests/algorithms/test_learning.py: {sorted(missing)}."

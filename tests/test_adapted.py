"""The mean of the clients' adapted models: against plain SGD, on which rows, at which rate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedstrata as fs
from fedstrata.experiments.config import parse
from fedstrata.training.metrics import adaptation
from fedstrata.training.metrics.evaluation import MEASURES, Evaluation

SIZES = (5, 9, 3)
LR = 0.4

Rows = tuple[torch.Tensor, ...]


def tiny(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def sites(sizes: tuple[int, ...], seed: int, classes: int = 3) -> fs.FederatedData:
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(size=(n, 2)), (np.arange(n) + k) % classes) for k, n in enumerate(sizes)]
    return fs.FederatedData.from_arrays(pairs, classes=classes)


def after_sgd(rows: Rows, steps: int, lr: float, outputs: int) -> dict[str, torch.Tensor]:
    """What a person would write: full-batch SGD on a module of one's own."""
    model = tiny(outputs)
    optimiser = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss_of(model(rows[0]), rows[1]).backward()
        optimiser.step()
    return {name: weights.detach() for name, weights in model.named_parameters()}


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.shape[1] == 1:
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.double())
    return nn.functional.cross_entropy(outputs, targets)


def mean_model(rows: list[Rows], steps: int, lr: float, outputs: int = 3) -> nn.Module:
    """The module whose weights are the mean over clients of the adapted ones; every client weighs the same."""
    own = [after_sgd(r, steps, lr, outputs) for r in rows]
    model = tiny(outputs)
    model.load_state_dict({name: torch.stack([w[name] for w in own]).mean(0) for name in own[0]})
    return model


@torch.no_grad()
def measured_by_hand(model: nn.Module, rows: Rows) -> dict[str, float]:
    outputs, targets = model(rows[0]), rows[1]
    measures = {"adapted_loss": float(loss_of(outputs, targets))}
    if outputs.shape[1] > 1:
        right = (outputs.argmax(1) == targets).double()
        measures["adapted_accuracy"] = float(right.mean())
    if int(targets.max()) < 2:
        scores = outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]
        measures["adapted_auc"] = float(roc_auc_score(targets, scores))
    return measures


def adapted_of(measures: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in measures.items() if k.startswith("adapted")}


def close(expected: dict[str, float]) -> dict[str, Any]:
    return {k: pytest.approx(v, abs=1e-12) for k, v in expected.items()}


def clients_rows(data: fs.FederatedData) -> list[Rows]:
    """What each client's steps draw from."""
    return [data.part(1).of_client(k) for k in range(data.clients)]


def everything(data: fs.FederatedData) -> Rows:
    return tuple(a[data.train.rows] for a in data.train.arrays)


# --- against plain SGD -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1024, 2], ids=["one piece", "pieces of two rows"])
@pytest.mark.parametrize("support", [False, True], ids=["no support", "support"])
@pytest.mark.parametrize("test", ["none", "held out", "pooled"])
def test_the_adapted_model_is_the_mean_of_those_of_plain_sgd(
    test: str, support: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "ROWS", piece)
    data = sites(SIZES, 1)
    data = replace(data, support=sites((4, 6, 5), 2).train if support else None)
    data = replace(data, client_test=sites((7, 2, 4), 3).train if test == "held out" else None)
    data = replace(data, test=sites((11,), 4).train.arrays if test == "pooled" else None)
    on = {"none": data.train, "held out": data.client_test, "pooled": None}[test]
    pooled = data.test if on is None else tuple(a[on.rows] for a in on.arrays)
    assert pooled is not None
    problem = fs.maml(tiny(), LR, steps=2, inner_mean="global", prior=False)
    measured = Evaluation()(problem, data, problem.x0, None)
    expected = measured_by_hand(mean_model(clients_rows(data), 2, LR), pooled)
    assert adapted_of(measured) == close(expected)
    plain = Evaluation()(fs.erm(tiny(), prior=False), data, problem.x0, None)
    assert measured == plain | close(expected), "everything else is that of the model before the steps"
    assert abs(measured["adapted_loss"] - measured["loss"]) > 1e-3


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_auc_of_the_adapted_model(outputs: int) -> None:
    """Of a vector that is longer than the model, and without a threshold."""
    data = sites((8, 12, 5), 1, classes=2)
    problem = fs.compositional_auc(tiny(outputs), 3, LR)
    measured = Evaluation()(problem, data, problem.x0, problem.y0)
    expected = measured_by_hand(mean_model(clients_rows(data), 3, LR, outputs), everything(data))
    expected = {k: v for k, v in expected.items() if "accuracy" not in k}
    assert adapted_of(measured) == close(expected)
    assert "accuracy" not in measured and measured["adapted_auc"] != measured["auc"]


def test_two_classes_that_are_classified_have_accuracy_and_auc() -> None:
    data = sites((8, 12, 5), 1, classes=2)
    problem = fs.maml(tiny(2), LR, inner_mean="global", prior=False)
    expected = measured_by_hand(mean_model(clients_rows(data), 1, LR, 2), everything(data))
    assert set(expected) == {
        *("adapted_loss", "adapted_accuracy", "adapted_auc"),
    }
    assert adapted_of(Evaluation()(problem, data, problem.x0, None)) == close(expected)
    assert set(expected) <= set(MEASURES)


def test_a_limit_on_the_rows_is_as_if_clients_had_no_others() -> None:
    data = sites((30, 25, 4), 4)
    problem = fs.maml(tiny(), LR, inner_mean="global", prior=False)
    limited = [adaptation.pieces(data.train, k, 6)[0] for k in range(3)]
    assert [len(rows[1]) for rows in limited] == [6, 6, 4]
    expected = measured_by_hand(mean_model(limited, 1, LR), everything(data))
    found = Evaluation(adapt_rows=6)(problem, data, problem.x0, None)
    assert adapted_of(found) == close(expected)
    unlimited = Evaluation()(problem, data, problem.x0, None)
    assert abs(unlimited["adapted_loss"] - found["adapted_loss"]) > 1e-6
    assert Evaluation(adapt_rows=30)(problem, data, problem.x0, None) == unlimited


def test_adapting_leaves_the_solution_alone() -> None:
    problem, data = fs.maml(tiny(), LR, inner_mean="global", prior=False), sites(SIZES, 1)
    before = problem.x0.clone()
    Evaluation()(problem, data, problem.x0, None)
    assert torch.equal(problem.x0, before) and not problem.x0.requires_grad


# --- which problems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "options", "shared"),
    [
        (lambda m: fs.maml(m, LR, prior=False), {}, False),
        (lambda m: fs.maml(m, LR, inner_mean="global", prior=False), {}, True),
        (lambda m: fs.damaml(m, LR, shift=1.0, prior=False), {}, False),
        (lambda m: fs.erm(m, prior=False), {}, None),
        (lambda m: fs.erm(m, prior=False), {"adapt_steps": 1, "adapt_lr": LR}, False),
        (lambda m: replace(fs.erm(m, prior=False), inner_mean="global"), {"adapt_steps": 1, "adapt_lr": LR}, False),
        (lambda m: fs.robust(m, shift=1.0, prior=False), {"adapt_steps": 1, "adapt_lr": LR}, False),
        (
            lambda m: fs.robust(m, shift=1.0, inner_mean="global", prior=False),
            {"adapt_steps": 1, "adapt_lr": LR},
            False,
        ),
        (lambda m: fs.robust(m, shift=1.0, inner_mean="global", prior=False), {}, None),
        (lambda m: fs.risk_averse(m, prior=False), {"adapt_steps": 1, "adapt_lr": LR}, False),
    ],
    ids=[
        *("maml", "global maml", "damaml", "erm", "erm that is adapted", "no levels", "robust", "global robust"),
        *("robust as it is", "risk_averse"),
    ],
)
def test_one_model_for_all_or_one_for_each(build: Any, options: dict[str, Any], shared: bool | None) -> None:
    problem, data = build(tiny()), sites(SIZES, 1)
    measured = Evaluation(**options)(problem, data, problem.x0, None)
    assert any(name.startswith("adapted") for name in measured) == (shared is True)
    assert any(name.startswith("personal") for name in measured) == (shared is False)
    found = Evaluation(**options).per_client(problem, data, problem.x0)
    assert ("personal_loss" in found) == (shared is False)
    if shared:
        assert adapted_of(measured) == close(measured_by_hand(mean_model(clients_rows(data), 1, LR), everything(data)))


def test_one_client_has_the_same_model_either_way() -> None:
    data = sites((9,), 1)
    local, shared = (fs.maml(tiny(), LR, steps=2, inner_mean=mean, prior=False) for mean in ("local", "global"))  # type: ignore[arg-type]
    personal = Evaluation()(local, data, local.x0, None)
    adapted = Evaluation()(shared, data, shared.x0, None)
    assert adapted["adapted_loss"] == pytest.approx(personal["personal_loss_mean"], abs=1e-13)
    assert adapted["adapted_accuracy"] == personal["personal_accuracy_mean"]


# --- who says so -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps", "lr"),
    [
        ({}, 2, LR),
        ({"adapt_steps": 5}, 5, LR),
        ({"adapt_lr": 0.05}, 2, 0.05),
        ({"adapt_steps": 1, "adapt_lr": 0.9}, 1, 0.9),
        ({"clients": "none"}, 2, LR),
        ({"clients": "train"}, 2, LR),
        ({"adapt_steps": 0}, 0, LR),
    ],
    ids=str,
)
def test_the_evaluation_wins_over_the_problem(options: dict[str, Any], steps: int, lr: float) -> None:
    problem, data = fs.maml(tiny(), LR, steps=2, inner_mean="global", prior=False), sites(SIZES, 1)
    measured = adapted_of(Evaluation(**options)(problem, data, problem.x0, None))
    expected = measured_by_hand(mean_model(clients_rows(data), steps, lr), everything(data))
    assert measured == (close(expected) if steps else {})


def test_half_of_an_adaptation_is_an_error() -> None:
    problem, data = fs.robust(tiny(), shift=1.0, inner_mean="global", prior=False), sites(SIZES, 1)
    for given in ({"adapt_steps": 2}, {"adapt_lr": 0.1}, {"adapt_rows": 5}):
        with pytest.raises(fs.InputError, match=f"needs adapt_steps and adapt_lr. Got only {next(iter(given))}"):
            Evaluation(**given)(problem, data, problem.x0, None)  # type: ignore[arg-type]


def test_a_file_may_ask_for_them() -> None:
    names = ("adapted_loss", "adapted_accuracy", "adapted_auc")
    assert parse({"plot": {"measures": names}, "tune": {"measure": "adapted_auc"}}, "here").plot.measures == names
    with pytest.raises(fs.InputError, match="Unknown measure 'adapted_spread'"):
        parse({"plot": {"measures": ["adapted_spread"]}}, "here")


# --- at the rate of the last round -----------------------------------------------------------------------------------


class Points(fs.Callback):
    """Remembers x after every round."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_round(self, round: int, state: fs.State) -> None:
        self.seen.append(state.x.clone())


def test_a_row_is_measured_at_the_rate_of_the_round_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds, the rate a tenth from the third on, and a hundredth in the last."""
    monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)
    data, points = sites((6, 6, 6), 1), Points()
    problem = fs.maml(tiny(), fs.StepDecay(2.0), inner_mean="global", prior=False)
    algorithm = fs.LocalSMCGDAM(gamma_x=1.0, steps=2)
    run = fs.train(problem, data, algorithm, rounds=4, eval_every=1, callbacks=[points])
    at = [problem.x0, *points.seen]
    rates = [2.0, 2.0, 2.0, 0.2, 0.02]
    for row, x, rate in zip(run.history, at, rates, strict=True):
        expected = Evaluation()(fs.maml(tiny(), rate, inner_mean="global", prior=False), data, x, None)
        assert adapted_of(row) == close(adapted_of(expected))
    assert run.problem.adapt == (1, pytest.approx(0.02, rel=1e-12))
    given = fs.train(problem, data, algorithm, rounds=4, evaluate=Evaluation(adapt_lr=0.7))
    expected = Evaluation()(fs.maml(tiny(), 0.7, inner_mean="global", prior=False), data, run.x, None)
    assert adapted_of(given.history[-1]) == close(adapted_of(expected)), "what the evaluation says stays"
    assert not any(name.startswith("personal") for name in run.summary["per_client"])


def test_personal_measures_follow_the_schedule_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)
    data = sites((6, 6), 1)
    problem = fs.maml(tiny(), fs.StepDecay(1.0, at=(1,)), prior=False)
    run = fs.train(problem, data, fs.ComFedL(lr=0.1, steps=1), rounds=2, eval_every=1)
    for row, rate in ((0, 1.0), (2, 0.1)):
        x = problem.x0 if row == 0 else run.x
        expected = Evaluation()(fs.maml(tiny(), rate, prior=False), data, x, None)
        assert run.history[row]["personal_loss_mean"] == pytest.approx(expected["personal_loss_mean"], abs=1e-12)
    assert run.summary["personal_loss_mean"] == pytest.approx(np.mean(run.summary["per_client"]["personal_loss"]))

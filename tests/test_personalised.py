"""Each client's adapted model: against plain SGD, on which rows, and every invalid setting."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.experiments.build import Experiment
from fedstrata.experiments.config import parse
from fedstrata.training.metrics import adaptation
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.metrics.measures import over_clients

SIZES = (5, 9, 3)


def tiny(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def sites(sizes: tuple[int, ...], seed: int, classes: int = 3) -> fs.FederatedData:
    rng = np.random.default_rng(seed)
    return fs.FederatedData.from_arrays(
        [(rng.normal(size=(n, 2)), rng.integers(0, classes, n)) for n in sizes], classes=classes
    ).to(torch.device("cpu"), torch.float64)


def after_sgd(rows: tuple[torch.Tensor, ...], steps: int, lr: float) -> nn.Module:
    """What a person would write: full-batch SGD on a module of one's own."""
    model = tiny()
    optimiser = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(rows[0]), rows[1]).backward()
        optimiser.step()
    return model


@torch.no_grad()
def measured_by_hand(model: nn.Module, rows: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    outputs = model(rows[0])
    right = (outputs.argmax(1) == rows[1]).double().mean()
    return float(nn.functional.cross_entropy(outputs, rows[1])), float(right)


@pytest.mark.parametrize("piece", [1024, 2], ids=["one piece", "pieces of two rows"])
@pytest.mark.parametrize("support", [False, True], ids=["no support", "support"])
@pytest.mark.parametrize("held", [False, True], ids=["no held-out part", "held-out part"])
def test_the_adapted_model_is_that_of_plain_sgd(
    held: bool, support: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptation, "ROWS", piece)
    data = sites(SIZES, 1)
    data = replace(data, support=sites((4, 6, 5), 2).train if support else None)
    data = replace(data, client_test=sites((7, 2, 4), 3).train if held else None)
    problem = fs.erm(tiny())
    evaluation = Evaluation(adapt_steps=3, adapt_lr=0.4, own_rows=1)
    on = data.client_test or data.train
    expected = np.array(
        [measured_by_hand(after_sgd(data.part(1).of_client(c), 3, 0.4), on.of_client(c)) for c in range(3)]
    )
    found = evaluation.per_client(problem, data, problem.x0)
    np.testing.assert_allclose(found["personal_loss"], expected[:, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found["personal_accuracy"], expected[:, 1], rtol=0, atol=1e-12)
    measured = evaluation(problem, data, problem.x0, None)
    plain = Evaluation(own_rows=1)(problem, data, problem.x0, None)
    personal = {
        "personal_loss_mean": expected[:, 0].mean(),
        "personal_loss_worst": expected[:, 0].max(),
        "personal_loss_spread": expected[:, 0].std(),
        "personal_accuracy_mean": expected[:, 1].mean(),
        "personal_accuracy_worst": expected[:, 1].min(),
        "personal_accuracy_spread": expected[:, 1].std(),
    }
    assert measured == plain | {k: pytest.approx(v, abs=1e-12) for k, v in personal.items()}


def test_personal_accuracy_is_higher_where_clients_disagree() -> None:
    """Half of the clients have the opposite labels, so no one model can be right for more than half of the samples."""
    rng = np.random.default_rng(0)
    clients = []
    for client in range(6):
        inputs = rng.normal(size=(80, 2)).astype(np.float32)
        clients.append((inputs, (inputs[:, 0] > 0).astype(np.int64) ^ (client % 2)))
    data = fs.FederatedData.from_arrays(clients).with_holdout(0.5)
    problem = fs.erm(nn.Linear(2, 2))
    evaluation = Evaluation("test", adapt_steps=10, adapt_lr=1.0, adapt_rows=20)
    run = fs.train(problem, data, fs.FedAvg(lr=0.1, steps=2), rounds=5, evaluate=evaluation)
    assert all(row["accuracy_mean"] < 0.6 for row in run.history)
    assert all(row["personal_accuracy_mean"] > 0.9 for row in run.history)
    assert run.summary["personal_accuracy_worst"] > 0.8
    assert run.summary["personal_accuracy_worst"] == min(run.summary["per_client"]["personal_accuracy"])
    assert run.summary["personal_loss_mean"] == pytest.approx(np.mean(run.summary["per_client"]["personal_loss"]))


# --- the rows --------------------------------------------------------------------------------------------------------


def numbered(sizes: tuple[int, ...]) -> fs.FederatedData:
    """Inputs that say which row they are; the first half of a client's rows is of class 0."""
    return fs.FederatedData.from_arrays(
        [(np.arange(n, dtype=float)[:, None], (np.arange(n) >= n // 2).astype(np.int64)) for n in sizes]
    ).to(torch.device("cpu"), torch.float64)


def test_a_client_adapts_on_a_shuffled_share_of_its_rows() -> None:
    data = numbered((40, 40, 8))
    drawn = [adaptation.pieces(data.train, c, 10) for c in range(3)]
    rows = [[int(i) for i in pieces[0][0]] for pieces in drawn]
    assert [len(pieces) for pieces in drawn] == [1, 1, 1]
    assert [len(set(r)) for r in rows] == [10, 10, 8]
    assert rows[2] == list(range(8))
    assert set(rows[0]) != set(rows[1])
    for pieces in drawn:
        assert 0 < pieces[0][1].sum() < len(pieces[0][1]), "rows of both classes"
    other = numbered((13, 40, 40))
    assert [int(i) for i in adaptation.pieces(other.train, 1, 10)[0][0]] == rows[1], "named by the client alone"


def test_a_limit_on_the_rows_is_as_if_the_client_had_no_others() -> None:
    data, problem = sites((30, 30), 4), fs.erm(tiny())
    evaluation = Evaluation(adapt_steps=2, adapt_lr=0.3, adapt_rows=6)
    found = evaluation.per_client(problem, data, problem.x0)["personal_loss"]
    again = evaluation.per_client(problem, data, problem.x0)["personal_loss"]
    expected = []
    for client in range(2):
        (rows,) = adaptation.pieces(data.train, client, 6)
        expected.append(measured_by_hand(after_sgd(rows, 2, 0.3), data.train.of_client(client))[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found, again)
    unlimited = replace(evaluation, adapt_rows=None).per_client(problem, data, problem.x0)["personal_loss"]
    assert not np.isclose(found, unlimited).any()
    whole = replace(evaluation, adapt_rows=30).per_client(problem, data, problem.x0)["personal_loss"]
    np.testing.assert_array_equal(whole, unlimited)


def test_many_rows_come_in_pieces() -> None:
    data = numbered((2500,))
    assert [len(targets) for _, targets in adaptation.pieces(data.train, 0, None)] == [1024, 1024, 452]
    assert [len(targets) for _, targets in adaptation.pieces(data.train, 0, 1100)] == [1024, 76]


# --- who says so -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "evaluation", "expected"),
    [
        (None, {}, None),
        (None, {"adapt_steps": 2, "adapt_lr": 0.1}, (2, 0.1)),
        (None, {"adapt_steps": 0}, None),
        (None, {"adapt_steps": 0, "adapt_rows": 5}, None),
        ((3, 0.5), {}, (3, 0.5)),
        ((3, 0.5), {"adapt_rows": 5}, (3, 0.5)),
        ((3, 0.5), {"adapt_steps": 7}, (7, 0.5)),
        ((3, 0.5), {"adapt_lr": 0.1}, (3, 0.1)),
        ((3, 0.5), {"adapt_steps": 7, "adapt_lr": 0.1}, (7, 0.1)),
        ((3, 0.5), {"adapt_steps": 0}, None),
        ((0, 0.5), {}, None),
        ((0, 0.5), {"adapt_steps": 1}, (1, 0.5)),
    ],
)
def test_the_evaluation_wins_over_the_problem(problem: Any, evaluation: dict[str, Any], expected: Any) -> None:
    asked = replace(fs.erm(tiny()), adapt=problem)
    assert Evaluation(**evaluation).adaptation(asked) == expected
    found = Evaluation(**evaluation).per_client(asked, sites(SIZES, 1), asked.x0)
    assert ("personal_loss" in found) == ("personal_accuracy" in found) == (expected is not None)


@pytest.mark.parametrize(
    "given", [{"adapt_steps": 2}, {"adapt_lr": 0.1}, {"adapt_rows": 5}], ids=lambda g: next(iter(g))
)
def test_half_of_an_adaptation_is_an_error(given: dict[str, Any]) -> None:
    problem = fs.erm(tiny())
    needs = f"problem erm .* needs adapt_steps and adapt_lr. Got only {next(iter(given))}"
    with pytest.raises(fs.InputError, match=needs):
        Evaluation(**given)(problem, sites(SIZES, 1), problem.x0, None)
    with pytest.raises(fs.InputError, match="Got only"):
        Evaluation("none", **given)(problem, sites(SIZES, 1), problem.x0, None)


def test_a_problem_without_a_model_cannot_be_adapted() -> None:
    q = fs.quadratic(clients=3)
    with pytest.raises(fs.InputError, match="quadratic has no model to adapt: leave out adapt_steps, adapt_lr"):
        Evaluation(adapt_steps=2, adapt_lr=0.1)(q.problem, q.data, q.problem.x0, None)
    assert Evaluation(adapt_steps=0)(q.problem, q.data, q.problem.x0, None).keys() == {"loss", "distance"}


@pytest.mark.parametrize(
    ("given", "wants"),
    [
        (
            {"adapt_steps": -1},
            "adapt_steps of the evaluation must be a whole number of at least 0, or left out",
        ),
        ({"adapt_steps": 1.5}, "adapt_steps of the evaluation must be a whole number"),
        ({"adapt_steps": True}, "adapt_steps of the evaluation must be a whole number"),
        ({"adapt_rows": 0}, "adapt_rows of the evaluation must be a whole number of at least 1, or left out. Got 0"),
        ({"adapt_lr": 0.0}, "adapt_lr of the evaluation must be a number above 0, or left out. Got 0.0"),
        ({"adapt_lr": -1.0}, "adapt_lr of the evaluation must be a number above 0, or left out"),
        ({"adapt_lr": float("nan")}, "adapt_lr of the evaluation must be a number above 0, or left out"),
        ({"adapt_lr": float("inf")}, "adapt_lr of the evaluation must be a number above 0, or left out"),
    ],
)
def test_wrong_numbers_are_refused(given: dict[str, Any], wants: str) -> None:
    with pytest.raises(fs.InputError, match=wants):
        Evaluation(**given)


# --- corners ---------------------------------------------------------------------------------------------------------


def test_clients_without_test_rows_have_no_personal_measures() -> None:
    data = sites(SIZES, 1)
    tests = [(a.numpy(), t.numpy()) for a, t in (data.train.of_client(c) for c in range(3))]
    tests[1] = (np.zeros((0, 2)), np.zeros(0, dtype=np.int64))
    pairs = [(a.numpy(), t.numpy()) for a, t in (data.train.of_client(c) for c in range(3))]
    holed = fs.FederatedData.from_arrays(pairs, client_tests=tests, classes=3)
    problem, evaluation = fs.erm(tiny()), Evaluation(adapt_steps=1, adapt_lr=0.1, own_rows=1)
    found = evaluation.per_client(problem, holed, problem.x0)["personal_loss"]
    assert np.isnan(found).tolist() == [False, True, False]
    assert evaluation(problem, holed, problem.x0, None)["personal_loss_mean"] == pytest.approx(np.nanmean(found))


def test_a_model_that_adapting_ruined_is_not_left_out_of_the_mean() -> None:
    problem = fs.erm(nn.Linear(1, 1, bias=False, dtype=torch.float64), "squared")
    data = fs.FederatedData.from_arrays([(np.array([[a]]), np.array([1.0])) for a in (1.0, 1e100)])
    data = data.to(torch.device("cpu"), torch.float64)
    evaluation = Evaluation(adapt_steps=2, adapt_lr=0.1, own_rows=1)
    x = torch.zeros(1, dtype=torch.float64)
    found = evaluation.per_client(problem, data, x)
    assert np.isnan(found["personal_loss"]).tolist() == [False, True]
    measured = evaluation(problem, data, x, None)
    assert all(np.isnan(measured[f"personal_loss_{kind}"]) for kind in ("mean", "worst", "spread"))
    assert measured["loss_mean"] == 1.0
    run = fs.train(replace(problem, x0=x), data, fs.FedAvg(lr=1e-300, steps=1), rounds=1, evaluate=evaluation)
    assert not any("personal" in name for name in run.history[-1])


def test_infinite_losses_and_spreads_do_not_warn() -> None:
    assert over_clients("loss", np.array([1.0, np.inf]))["loss_worst"] == np.inf
    assert over_clients("loss", np.array([1.0, 1e200]))["loss_spread"] == np.inf


def test_regression_has_personal_losses_only() -> None:
    problem = fs.erm(nn.Linear(1, 1, bias=False, dtype=torch.float64), "squared")
    data = fs.FederatedData.from_arrays([(np.array([[1.0], [2.0]]), np.array([0.0, 0.0]))])
    measured = Evaluation(adapt_steps=1, adapt_lr=0.1)(problem, data, torch.ones(1, dtype=torch.float64), None)
    assert measured["personal_loss_mean"] == pytest.approx(2.5 * (1 - 0.1 * 5) ** 2)
    assert not any("accuracy" in name for name in measured)


def test_a_vector_longer_than_the_model_is_adapted_where_the_model_reads_it() -> None:
    model = fs.erm(tiny())
    size = len(model.x0)
    longer = replace(
        model,
        x0=torch.cat([model.x0, torch.ones(2, dtype=torch.float64)]),
        predict=lambda x, inputs: model.predict(x[:size], inputs),  # type: ignore[misc]
        adapt=(2, 0.3),
    )
    data = sites(SIZES, 1)
    found = Evaluation().per_client(longer, data, longer.x0)
    expected = Evaluation(adapt_steps=2, adapt_lr=0.3).per_client(model, data, model.x0)
    np.testing.assert_array_equal(found["personal_loss"], expected["personal_loss"])
    own = adaptation.adapt(longer, longer.x0, adaptation.pieces(data.train, 0, None), 2, 0.3)
    assert torch.equal(own[size:], longer.x0[size:]) and not torch.equal(own[:size], longer.x0[:size])


def test_adapting_leaves_the_solution_alone() -> None:
    problem, data = fs.erm(tiny()), sites(SIZES, 1)
    before = problem.x0.clone()
    Evaluation(adapt_steps=3, adapt_lr=0.5)(problem, data, problem.x0, None)
    assert torch.equal(problem.x0, before) and not problem.x0.requires_grad and problem.x0.grad is None


# --- from a file -----------------------------------------------------------------------------------------------------


def test_the_keys_of_a_file() -> None:
    table = {"clients": "train", "adapt_steps": 2, "adapt_lr": 0.1, "adapt_rows": 30, "stationarity": True}
    config = parse({"evaluate": table}, "here")
    assert Experiment(config).evaluation == Evaluation("train", 2, 0.1, 30, True)
    assert parse(config.to_toml(), "again").evaluate == config.evaluate
    assert Experiment(parse({}, "here")).evaluation == Evaluation()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("adapt_steps", -1), ("adapt_steps", 1.5), ("adapt_lr", 0.0), ("adapt_lr", float("inf"))],
        *[("adapt_rows", 0), ("stationarity", 1)],
    ],
)
def test_wrong_keys_of_a_file(key: str, value: Any) -> None:
    with pytest.raises(fs.InputError, match=f"The key evaluate.{key} must be"):
        parse({"evaluate": {key: value}}, "here")


@pytest.mark.slow
def test_a_run_writes_personal_measures_and_stationarity(tmp_path: Any) -> None:
    problem, data = fs.erm(tiny()), sites(SIZES, 1)
    evaluation = Evaluation(adapt_steps=1, adapt_lr=0.1, stationarity=True)
    run = fs.train(problem, data, fs.FedAvg(lr=0.3, steps=1), rounds=20, evaluate=evaluation, out=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert len(summary["per_client"]["personal_loss"]) == len(summary["per_client"]["personal_accuracy"]) == 3
    assert run.history[-1]["gradient_norm"] < run.history[0]["gradient_norm"]
    assert run.history[-1]["objective"] == pytest.approx(run.history[-1]["loss_mean"])
    assert {"loss_spread", "personal_loss_spread", "personal_accuracy_worst"} <= run.history[0].keys()

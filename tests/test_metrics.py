"""What is measured: AUC against scikit-learn, means and worst over clients, and the objective of layered problems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import fedstrata as fs
from fedstrata.problems.projections import simplex as project_simplex
from fedstrata.training.metrics import evaluation as metrics
from fedstrata.training.metrics.evaluation import Evaluation, gradient_norm, objective
from fedstrata.training.metrics.measures import auc, pairs_of


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("decimals", [0, 1, 8], ids=["many ties", "some ties", "no ties"])
def test_auc_is_that_of_scikit_learn(seed: int, decimals: int) -> None:
    generator = np.random.default_rng(seed)
    targets = (generator.random(60) < generator.uniform(0.05, 0.95)).astype(np.int64)
    targets[:2] = 0, 1
    scores = np.round(generator.normal(size=60) + targets, decimals)
    assert auc(scores, targets) == pytest.approx(roc_auc_score(targets, scores), abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "targets", "expected"),
    [
        ([0, 1], [0, 1], 1.0),
        ([1, 0], [0, 1], 0.0),
        ([1, 1], [0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
        ([5, 5, 5, 5, 5], [0, 1, 0, 1, 1], 0.5),
    ],
)
def test_auc_by_hand(scores: list[float], targets: list[int], expected: float) -> None:
    assert auc(np.array(scores, dtype=float), np.array(targets)) == pytest.approx(expected)


@pytest.mark.parametrize("targets", [[0, 0], [1, 1], []], ids=["no positive", "no negative", "nothing"])
def test_auc_of_one_class_is_undefined(targets: list[int]) -> None:
    assert np.isnan(auc(np.arange(len(targets), dtype=float), np.array(targets, dtype=np.int64)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("decimals", [0, 1, 8], ids=["many ties", "some ties", "no ties"])
def test_the_auc_of_every_client_is_that_of_its_own_samples(decimals: int, dtype: Any) -> None:
    generator = np.random.default_rng(decimals)
    sizes = generator.integers(0, 30, 300)
    targets = generator.integers(0, 2, sizes.sum())
    scores = np.round(generator.normal(size=len(targets)) + targets, decimals).astype(dtype)
    scores[generator.random(len(scores)) < 0.01] = np.inf
    pairs = zip(*(np.split(a, np.cumsum(sizes)[:-1]) for a in (scores, targets)), strict=True)
    expected = [_auc_by_counting(s, t) for s, t in pairs]
    assert np.isnan(expected).any()
    np.testing.assert_allclose(pairs_of(scores, targets, sizes).areas, expected, rtol=0, atol=1e-12)


def _auc_by_counting(scores: np.ndarray, targets: np.ndarray) -> float:
    """How many of all pairs of samples are in the right order."""
    low, high = scores[targets == 0], scores[targets == 1, None]
    pairs = (high > low) + 0.5 * (high == low)
    if len(np.unique(targets)) < 2:
        return float("nan")
    finite = np.nan_to_num(scores, posinf=1e9)
    assert pairs.mean() == pytest.approx(roc_auc_score(targets, finite), abs=1e-12)
    return float(pairs.mean())


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_the_auc_of_clients_without_samples_is_undefined(sizes: list[int]) -> None:
    found = pairs_of(np.zeros(0), np.zeros(0, np.int64), np.array(sizes, np.int64)).areas
    np.testing.assert_array_equal(found, np.full(len(sizes), np.nan))


def test_scores_that_are_not_numbers_are_ties() -> None:
    scores, targets = np.array([np.nan, 1, np.nan, 0, np.nan]), np.array([1, 0, 0, 1, 1])
    assert pairs_of(scores, targets, np.array([3, 2])).areas.tolist()[0] == 0.75


# --- over clients: a model whose output is its input times a weight, so that every number can be done by hand -------


def one_logit(weight: float = 1.0) -> fs.Problem:
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(weight)
    return fs.erm(model, "binary_cross_entropy")


def logistic(logits: list[float], targets: list[int]) -> np.ndarray:
    signs = 2 * np.array(targets) - 1
    return np.log1p(np.exp(-signs * np.array(logits)))


CLIENTS: list[tuple[list[float], list[int]]] = [
    ([2.0, -1.0, 0.5], [1, 0, 0]),
    ([-1.0, -2.0], [1, 1]),
    ([3.0, 1.0, -1.0, 2.0], [1, 0, 1, 0]),
]


def pairs(clients: list[tuple[list[float], list[int]]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.array(x, dtype=float).reshape(-1, 1), np.array(t, dtype=np.int64)) for x, t in clients]


def test_measures_over_clients_by_hand() -> None:
    problem = one_logit()
    data = fs.FederatedData.from_arrays(pairs(CLIENTS))
    measured = Evaluation(own_rows=1)(problem, data, problem.x0, None)
    losses = [logistic(*c).mean() for c in CLIENTS]
    accuracies = [2 / 3, 0.0, 1 / 4]
    together = ([x for c in CLIENTS for x in c[0]], [t for c in CLIENTS for t in c[1]])
    expected = {
        "loss": logistic(*together).mean(),
        "accuracy": 3 / 9,
        "accuracy_worst_class": 1 / 4,
        "auc": roc_auc_score(together[1], together[0]),
        "loss_mean": np.mean(losses),
        "loss_worst": max(losses),
        "loss_spread": np.std(losses),
        "accuracy_mean": np.mean(accuracies),
        "accuracy_worst": 0.0,
        "accuracy_spread": np.std(accuracies),
        "auc_within": (2 + 2) / (2 + 4),
        "auc_mean": np.mean([1.0, 0.5]),  # the second client has one class only
        "auc_worst": 0.5,
    }
    assert measured == {k: pytest.approx(v, abs=1e-12) for k, v in expected.items()}


def test_clients_without_test_data_are_left_out() -> None:
    problem = one_logit()
    tests = [CLIENTS[0], ([], []), CLIENTS[1]]
    data = fs.FederatedData.from_arrays(pairs(CLIENTS), client_tests=pairs(tests))
    found = Evaluation(own_rows=1).per_client(problem, data, problem.x0)
    first, third = logistic(*CLIENTS[0]).mean(), logistic(*CLIENTS[1]).mean()
    np.testing.assert_allclose(found["loss"], [first, np.nan, third])
    np.testing.assert_allclose(found["accuracy"], [2 / 3, np.nan, 0])
    np.testing.assert_allclose(found["auc"], [1, np.nan, np.nan])
    measured = Evaluation(own_rows=1)(problem, data, problem.x0, None)
    assert measured["loss_mean"] == pytest.approx((first + third) / 2)
    assert measured["loss_worst"] == pytest.approx(max(first, third))
    assert measured["accuracy_worst"] == 0
    assert measured["auc_mean"] == 1


def test_which_data_are_measured() -> None:
    problem = one_logit()
    train, own, pooled = CLIENTS[:1], CLIENTS[1:2], CLIENTS[2]
    both: dict[str, Any] = {"client_tests": pairs(own), "test": pairs([pooled])[0]}
    data = fs.FederatedData.from_arrays(pairs(train), **both)

    def losses(data: fs.FederatedData, clients: Any) -> tuple[float, float | None]:
        measured = Evaluation(clients)(problem, data, problem.x0, None)
        return measured["loss"], measured.get("loss_mean")

    of = {
        name: pytest.approx(logistic(*c).mean())
        for name, c in (("train", train[0]), ("own", own[0]), ("pooled", pooled))
    }
    assert losses(data, "auto") == (of["pooled"], of["own"])
    assert losses(data, "test") == (of["pooled"], of["own"])
    assert losses(data, "train") == (of["pooled"], of["train"])
    assert losses(data, "none") == (of["pooled"], None)
    assert metrics.measured_on(problem, data, Evaluation()) == {"pooled": "test data", "clients": "held-out test data"}
    assert metrics.measured_on(problem, data, Evaluation("train")) == {
        "pooled": "test data",
        "clients": "training data",
    }
    assert metrics.measured_on(problem, data, Evaluation("none")) == {"pooled": "test data", "clients": "nothing"}
    bare = fs.FederatedData.from_arrays(pairs(train))
    assert losses(bare, "auto") == (of["train"], of["train"])
    with pytest.raises(fs.InputError, match="no held-out test data"):
        losses(bare, "test")
    with pytest.raises(fs.InputError, match="clients of the evaluation must be"):
        Evaluation("all")  # type: ignore[arg-type]


def test_several_classes_have_accuracy_and_no_auc() -> None:
    problem = fs.erm(nn.Linear(3, 3, bias=False, dtype=torch.float64))
    data = fs.FederatedData.from_arrays([(np.eye(3), np.array([0, 1, 2])), (np.eye(3), np.array([0, 0, 0]))])
    measured = Evaluation(own_rows=1)(problem, data, torch.eye(3, dtype=torch.float64).reshape(-1), None)
    assert (measured["accuracy"], measured["accuracy_worst"]) == (pytest.approx(4 / 6), pytest.approx(1 / 3))
    assert "auc" not in measured


def test_two_classes_and_three_logits_have_no_auc() -> None:
    problem = fs.erm(nn.Linear(2, 3, dtype=torch.float64))
    data = fs.FederatedData.from_arrays([(np.eye(2), np.array([0, 1])), (np.eye(2), np.array([1, 0]))])
    measured = Evaluation()(problem, data, problem.x0, None)
    assert "loss" in measured and not [name for name in measured if name.startswith("auc")]


def test_two_logits_score_by_their_difference() -> None:
    outputs = torch.tensor([[1.0, 3.0], [5.0, 4.0]])
    assert metrics.scores(outputs).tolist() == [2.0, -1.0]
    assert metrics.scores(outputs[:, :1]).tolist() == [1.0, 5.0]
    assert metrics.correct(outputs, torch.tensor([1, 1])).tolist() == [1.0, 0.0]
    assert metrics.correct(torch.tensor([0.1, -0.1]), torch.tensor([1, 1])).tolist() == [1.0, 0.0]


def test_many_rows_are_predicted_in_pieces() -> None:
    problem = one_logit(2.0)
    inputs = torch.arange(2500, dtype=torch.float64)[:, None]
    outputs, targets = metrics.predict(problem, problem.x0, (inputs, torch.zeros(2500)))
    assert torch.equal(outputs, 2 * inputs)
    assert len(targets) == 2500


def test_regression_has_a_loss_only() -> None:
    problem = fs.erm(nn.Linear(1, 1, bias=False, dtype=torch.float64), "squared")
    data = fs.FederatedData.from_arrays([(np.array([[1.0], [2.0]]), np.array([0.0, 0.0]))])
    measured = Evaluation(own_rows=1)(problem, data, torch.ones(1, dtype=torch.float64), None)
    expected = {name: pytest.approx(2.5) for name in ("loss", "loss_mean", "loss_worst")}
    assert measured == {**expected, "loss_spread": 0.0}


# --- the objective ---------------------------------------------------------------------------------------------------


VALUES = [[1.0, 3.0], [5.0], [0.0, 0.0, 6.0]]


def layered(inner_mean: str) -> tuple[fs.Problem, fs.FederatedData]:
    """g1 = mean(a) u, g2 = u + mean(a), f = y u^2 mean(a): everything a number."""
    data = fs.FederatedData.from_arrays([(np.array(v)[:, None], np.zeros((len(v), 1))) for v in VALUES])
    problem = fs.Problem(
        lambda u, y, batch: (y * u**2).sum() * batch[0].mean(),
        torch.tensor([2.0], dtype=torch.float64),
        levels=(lambda u, batch: u * batch[0].mean(), lambda u, batch: u + batch[0].mean()),
        y0=torch.tensor([0.5], dtype=torch.float64),
        inner_mean=inner_mean,  # type: ignore[arg-type]
    )
    return problem, data


def test_the_objective_with_the_clients_own_inner_values() -> None:
    problem, data = layered("local")
    means = [2.0, 5.0, 2.0]
    expected = np.mean([0.5 * (2 * a + a) ** 2 * a for a in means])
    assert objective(problem, data, problem.x0, problem.y0) == pytest.approx(expected)


def test_the_objective_with_the_mean_of_the_inner_values() -> None:
    problem, data = layered("global")
    means = [2.0, 5.0, 2.0]
    inner = np.mean([2 * a for a in means])
    inner = np.mean([inner + a for a in means])
    expected = np.mean([0.5 * inner**2 * a for a in means])
    assert objective(problem, data, problem.x0, problem.y0) == pytest.approx(expected)


def test_the_objective_of_levels_uses_the_support_set() -> None:
    problem, data = layered("local")
    query = fs.FederatedData.from_arrays([([[1.0]], [[0.0]])] * 3).train
    divided = fs.FederatedData(query, support=data.train)
    expected = np.mean([0.5 * (2 * a + a) ** 2 for a in (2.0, 5.0, 2.0)])
    moved = divided.to(torch.device("cpu"), torch.float64)
    assert objective(problem, moved, problem.x0, problem.y0) == pytest.approx(expected)


def test_the_objective_on_held_out_or_on_training_data() -> None:
    problem, data = layered("local")
    held = fs.FederatedData.from_arrays([([[1.0]], [[0.0]])] * 3).train
    both = fs.FederatedData(data.train, client_test=held).to(torch.device("cpu"), torch.float64)
    on_training = objective(problem, data, problem.x0, problem.y0)
    assert objective(problem, both, problem.x0, problem.y0) == pytest.approx(0.5 * (2 + 1) ** 2)
    assert objective(problem, both, problem.x0, problem.y0, training=True) == on_training


def test_a_problem_without_a_model_is_measured_by_its_objective() -> None:
    q = fs.quadratic(clients=3, dimension=2, samples=4)
    h, b = (a.reshape(3, 4, 2).numpy() for a in q.data.train.arrays)
    expected = np.mean(0.5 * (h * (q.problem.x0.numpy() - b) ** 2).sum(2))
    measured = Evaluation()(q.problem, q.data, q.problem.x0, None)
    assert measured.keys() == {"loss", "distance"}
    assert measured["loss"] == pytest.approx(expected)
    assert Evaluation().per_client(q.problem, q.data, q.problem.x0) == {}


# --- stationarity ----------------------------------------------------------------------------------------------------


def first(u: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.tanh(batch[0] @ u.reshape(3, 2)).mean(0) + u[:2] ** 2


def second(u: torch.Tensor, batch: Any) -> torch.Tensor:
    return torch.stack([(u.prod() * batch[0][:, 0]).sin().mean(), u[0] * batch[1].exp().mean(), (u**2).sum()])


def outer(u: torch.Tensor, batch: Any) -> torch.Tensor:
    """Not a mean over rows, so it must be taken on all of them at once."""
    return torch.log(torch.cosh(batch[0][:, 1] * u.sum() + batch[1])).mean() ** 2 + (u**3).sum()


def with_dual(u: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
    return outer(u, batch) * y[0].sin() + (y[1] * u).cos().sum()


def rough_data(support: bool) -> fs.FederatedData:
    rng = np.random.default_rng(3)

    def sites(sizes: list[int]) -> fs.FederatedData:
        return fs.FederatedData.from_arrays([(rng.normal(size=(n, 3)), rng.normal(size=n)) for n in sizes])

    data = sites([4, 7, 1])
    inner = sites([3, 2, 6]).train if support else None
    whole = fs.FederatedData(data.train, support=inner, client_test=sites([2, 2, 2]).train)
    return whole.to(torch.device("cpu"), torch.float64)


def composed(problem: fs.Problem, data: fs.FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
    """F(x), written out on the training data."""
    clients = range(data.clients)
    inner = [x for _ in clients]
    for level in problem.levels:
        inner = [level(inner[c], data.part(1).of_client(c)) for c in clients]
    if problem.inner_mean == "global":
        inner = [sum(inner) / len(inner)] * len(inner)  # type: ignore[list-item]
    values = []
    for c in clients:
        batch = data.part(0).of_client(c) if problem.outer_draws else ()
        batch = (*batch, torch.tensor(c)) if problem.mixture else batch
        values.append(problem.outer(inner[c], batch) if y is None else problem.outer(inner[c], y, batch))
    return torch.stack(values).mean()


def check_stationarity(problem: fs.Problem, data: fs.FederatedData) -> None:
    leaf = problem.x0.clone().requires_grad_()
    value = composed(problem, data, leaf, problem.y0)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert gradient.norm() > 1e-2
    found = gradient_norm(problem, data, problem.x0, problem.y0)
    assert found == pytest.approx(float(gradient.norm()), rel=1e-12, abs=1e-12)
    measured = Evaluation(stationarity=True)(problem, data, problem.x0, problem.y0)
    assert measured["gradient_norm"] == found
    assert measured["objective"] == pytest.approx(float(value.detach()), rel=1e-12)
    assert measured.keys() == {"loss", "objective", "gradient_norm"}


@pytest.mark.parametrize("support", [False, True], ids=["no support", "support"])
@pytest.mark.parametrize("inner_mean", ["local", "global"])
@pytest.mark.parametrize("dual", [False, True], ids=["no dual", "dual"])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_the_gradient_norm_is_that_of_the_composed_objective(
    levels: int, dual: bool, inner_mean: Any, support: bool
) -> None:
    problem = fs.Problem(
        with_dual if dual else outer,
        torch.tensor([0.3, -0.5, 0.8, 0.2, -0.1, 0.4], dtype=torch.float64),
        levels=(first, second)[:levels],
        y0=torch.tensor([0.7, -1.1], dtype=torch.float64) if dual else None,
        inner_mean=inner_mean,
    )
    check_stationarity(problem, rough_data(support))


@pytest.mark.parametrize("outer_draws", [True, False], ids=["outer draws", "outer draws nothing"])
@pytest.mark.parametrize("mixture", [True, False], ids=["mixture", "no mixture"])
@pytest.mark.parametrize("inner_mean", ["local", "global"])
def test_the_gradient_norm_of_outer_functions_without_data_and_of_mixtures(
    outer_draws: bool, mixture: bool, inner_mean: Any
) -> None:
    def f(u: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
        assert len(batch) == 2 * outer_draws + mixture
        weight = y[batch[-1]] if mixture else y[0]
        return weight * (batch[0][:, 0] * u.sum()).exp().mean() if outer_draws else weight * (u**3).sum()

    problem = fs.Problem(
        f,
        torch.tensor([0.3, -0.5, 0.8, 0.2, -0.1, 0.4], dtype=torch.float64),
        levels=(first,),
        y0=torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64),
        inner_mean=inner_mean,
        outer_draws=outer_draws,
        mixture=mixture,
        project_y=project_simplex if mixture else None,
    )
    check_stationarity(problem, rough_data(False))


def test_stationarity_of_a_model_beside_its_other_measures() -> None:
    problem = one_logit(0.5)
    data = fs.FederatedData.from_arrays(pairs(CLIENTS))
    measured = Evaluation(stationarity=True)(problem, data, problem.x0, None)
    slopes = []
    for inputs, targets in CLIENTS:
        a, t = np.array(inputs), np.array(targets)
        slopes.append(((1 / (1 + np.exp(-0.5 * a)) - t) * a).mean())
    assert measured["gradient_norm"] == pytest.approx(abs(np.mean(slopes)), rel=1e-12)
    assert measured["objective"] == pytest.approx(measured["loss_mean"], rel=1e-12)
    plain = Evaluation()(problem, data, problem.x0, None)
    assert {k: v for k, v in measured.items() if k not in ("objective", "gradient_norm")} == plain


def test_the_gradient_norm_vanishes_at_the_solution() -> None:
    q = fs.quadratic(clients=4)
    assert gradient_norm(q.problem, q.data, q.solution) < 1e-12 < gradient_norm(q.problem, q.data, q.problem.x0)


def test_a_loss_of_ones_own_may_have_the_name_of_ours() -> None:
    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    data = fs.data.digits().split(fs.partition.iid(), clients=2, seed=0)
    run = fs.train(fs.erm(fs.models.model("logreg", (1, 8, 8), 10), squared), data, fs.FedAvg(steps=1), rounds=1)
    assert "accuracy" in run.summary


def many_clients(clients: int) -> fs.FederatedData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, 3, 4, generator=generator)
    targets = torch.randint(0, 2, (clients, 3), generator=generator)
    return fs.FederatedData.from_arrays(list(zip(inputs, targets, strict=True)), classes=2)


def test_of_many_clients_some_are_measured_always_the_same() -> None:
    data, problem = many_clients(60), fs.erm(nn.Linear(4, 2))
    few = Evaluation(sample=20, own_rows=1)
    chosen = few.measured(data)
    assert len(chosen) == 20 and np.array_equal(chosen, few.measured(many_clients(60)))
    alone = data.only(chosen)
    assert few(problem, data, problem.x0, None) == Evaluation(own_rows=1)(problem, alone, problem.x0, None)
    about = few.about(problem, data, problem.x0, None)
    assert about["measured_clients"] == chosen.tolist() and len(about["per_client"]["loss"]) == 20
    assert about["measured_on"] == {
        "pooled": "training data of 20 of 60 clients",
        "clients": "training data of 20 of 60 clients",
        "auc": "17 of 20 sites measured",
    }
    everyone = Evaluation(sample=60, own_rows=1).about(problem, data, problem.x0, None)
    assert "measured_clients" not in everyone and len(everyone["per_client"]["loss"]) == 60
    assert everyone["per_client"]["loss"][chosen[3]] == pytest.approx(about["per_client"]["loss"][3])


def test_a_pooled_test_set_is_measured_whole() -> None:
    data = many_clients(60)
    data = fs.FederatedData.from_arrays(
        [data.train.of_client(k) for k in range(60)], test=(torch.randn(9, 4), torch.tensor([0, 1, 1] * 3)), classes=2
    )
    problem = fs.erm(nn.Linear(4, 2))
    few, every = (Evaluation(sample=n)(problem, data, problem.x0, None) for n in (20, 60))
    assert few["loss"] == every["loss"] and few["loss_mean"] != every["loss_mean"]
    on = metrics.measured_on(problem, data, Evaluation(sample=20))
    assert on == {"pooled": "test data", "clients": "training data of 20 of 60 clients"}


def test_the_objective_of_a_problem_without_a_model_covers_all_clients() -> None:
    quadratic = fs.quadratic(clients=12)
    values = [Evaluation(sample=n)(quadratic.problem, quadratic.data, quadratic.problem.x0, None) for n in (3, 12)]
    assert values[0] == values[1]

"""Fair learning over classes and over clients, and data that do not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.problems.projections import simplex
from fedstrata.training.metrics.evaluation import objective
from minimax import Duals, client_weights, mean_over_clients, numeric_slopes, prepared, slopes
from support import make_client, make_setting, sized_data

SIZES = {"equal": [12, 12, 12, 12], "unequal": [12, 5, 20, 1]}


def model(classes: int = 3) -> nn.Module:
    """Softmax regression from random weights, always the same."""
    linear = nn.Linear(4, classes, dtype=torch.float64)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in linear.parameters():
            weights.copy_(torch.randn(weights.shape, generator=rng, dtype=torch.float64))
    return linear


def skewed(sizes: list[int], classes: int = 3) -> fs.FederatedData:
    """Build clients with different class proportions; some lack a class."""
    rng = np.random.default_rng(5)
    pairs = []
    for k, n in enumerate(sizes):
        shares = rng.dirichlet(np.full(classes, 0.7))
        pairs.append((rng.normal(size=(n, 4)) + 0.3 * k, rng.choice(classes, size=n, p=shares)))
    return fs.FederatedData.from_arrays(pairs, classes=3, name="skewed")


def point(problem: fs.Problem, entries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x, and a random y on the simplex."""
    rng = np.random.default_rng(1)
    return problem.x0 + torch.from_numpy(rng.normal(size=len(problem.x0))), torch.from_numpy(
        rng.dirichlet(np.ones(entries))
    )


def class_losses(data: fs.FederatedData, x: torch.Tensor, weighting: str) -> np.ndarray:
    """The mean loss of each class, 0 where it has no sample; a sample's mass is its client's weight / size."""
    plain = fs.erm(model(), prior=False)
    assert plain.predict is not None and plain.losses is not None
    total, mass = np.zeros(3), np.zeros(3)
    for k, weight in enumerate(client_weights(data, weighting)):
        inputs, targets = data.train.of_client(k)
        losses = plain.losses(plain.predict(x, inputs), targets).numpy()
        for c in range(3):
            own = targets.numpy() == c
            total[c] += weight / len(targets) * losses[own].sum()
            mass[c] += weight / len(targets) * own.sum()
    return np.divide(total, mass, out=np.zeros(3), where=mass > 0)


# --- the worst class -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
@pytest.mark.parametrize("regularise", [0.0, 0.4])
def test_the_mean_over_clients_is_the_sum_of_the_class_losses(weighting: str, sizes: str, regularise: float) -> None:
    data = skewed(SIZES[sizes])
    problem = prepared(fs.fair(model(), classes=3, regularise=regularise, prior=False), data, weighting)
    x, y = point(problem, 3)
    expected = float(y.numpy() @ class_losses(data, x, weighting)) - 0.5 * regularise * float(y @ y)
    assert float(mean_over_clients(problem, data, x, y, weighting)) == pytest.approx(expected, abs=1e-12)
    if sizes == "equal" or weighting == "samples":
        plain = fs.erm(model(), prior=False)
        inputs, targets = data.train.arrays
        pooled = [float(plain.outer(x, (inputs[targets == c], targets[targets == c]))) for c in range(3)]
        np.testing.assert_allclose(class_losses(data, x, weighting), pooled, atol=1e-12)
    if weighting == "uniform":
        assert objective(problem, data, x, y) == pytest.approx(expected, abs=1e-12)
    run = fs.train(
        fs.fair(model(), classes=3, regularise=regularise, prior=False),
        data,
        fs.LocalSGDA(steps=1),
        rounds=1,
        weighting=weighting,  # type: ignore[arg-type]
    )
    assert float(mean_over_clients(run.problem, data, x, y, weighting)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
@pytest.mark.parametrize(("over", "regularise"), [("classes", 0.3), ("classes", 0.0), ("clients", 0.3)])
def test_gradients_are_those_of_finite_differences(over: Any, regularise: float, sampling: str) -> None:
    """For several clients at once, as training computes them, with weights of samples and without."""
    data = skewed(SIZES["unequal"])
    problem = fs.fair(model(), over, classes=3, clients=4, regularise=regularise, prior=False)
    problem = prepared(problem, data) if over == "classes" else problem
    entries = 3 if over == "classes" else 4
    client = make_client(make_setting(problem, data, batch_size=4, sampling=sampling), [0, 2, 1])
    batch = client.draw()
    x, y = point(problem, entries)
    found = client.f_grads(x.expand(3, -1), batch, y.expand(3, -1))
    for c in range(3):
        arrays = tuple(a[c] for a in batch.parts[0])
        numeric = numeric_slopes(lambda x, y, arrays=arrays: problem.outer(x, y, arrays), x, y)
        for ours, theirs in zip(found, numeric, strict=True):
            torch.testing.assert_close(ours[c], theirs, atol=1e-8, rtol=1e-7)


def test_the_gradient_in_y_is_the_losses_of_the_classes() -> None:
    data = skewed(SIZES["equal"])
    problem = prepared(fs.fair(model(), classes=3, regularise=0.4, prior=False), data)
    x, y = point(problem, 3)
    in_y = slopes(lambda y: mean_over_clients(problem, data, x, y), y)[0]
    np.testing.assert_allclose(in_y.numpy(), class_losses(data, x, "uniform") - 0.4 * y.numpy(), atol=1e-12)


def test_a_class_without_samples_has_weight_zero() -> None:
    data = skewed(SIZES["unequal"], classes=2)
    assert (data.classes, data.train.class_counts.shape) == (3, (4, 2))
    problem = prepared(fs.fair(model(), classes=3, regularise=0.2, prior=False), data)
    x, y = point(problem, 3)
    expected = y.numpy() @ class_losses(data, x, "uniform") - 0.1 * float(y @ y)
    assert class_losses(data, x, "uniform")[2] == 0
    assert float(mean_over_clients(problem, data, x, y)) == pytest.approx(expected, abs=1e-12)
    in_y = slopes(lambda y: mean_over_clients(problem, data, x, y), y)[0]
    assert float(in_y[2]) == pytest.approx(-0.2 * float(y[2]), abs=1e-15)
    duals = Duals()
    run = fs.train(
        fs.fair(model(), classes=3, prior=False), data, fs.LocalSGDA(steps=3), rounds=5, batch_size=3, callbacks=[duals]
    )
    assert run.x.isfinite().all()
    assert float(duals.seen[-1][2]) < 0.1


@pytest.mark.parametrize("over", ["classes", "clients"])
@pytest.mark.parametrize(
    "algorithm",
    [fs.LocalSGDA(dual_lr=3.0, steps=3), fs.FGDA(lam=3.0, steps=3), fs.SAGDA(steps=3)],
    ids=lambda a: a.name,
)
def test_the_dual_stays_on_the_simplex(over: Any, algorithm: fs.Algorithm) -> None:
    data, duals = skewed(SIZES["unequal"]), Duals()
    problem = fs.fair(model(), over, classes=3, clients=4, regularise=0.1, prior=False)
    assert problem.project_y is simplex
    assert problem.y0 is not None
    assert problem.y0.tolist() == [1 / len(problem.y0)] * (3 if over == "classes" else 4)
    run = fs.train(problem, data, algorithm, rounds=6, batch_size=4, callbacks=[duals])
    assert run.y is not None
    assert len(duals.seen) == 6
    for y in duals.seen:
        assert float(y.min()) >= 0
        assert float(y.sum()) == pytest.approx(1.0, abs=1e-12)
    assert (duals.seen[-1] - problem.y0).abs().max() > 0.05


@pytest.mark.parametrize(
    ("over", "algorithm"),
    [("classes", fs.LocalSGDA(lr=1e4)), ("clients", fs.AFL(lr=1e5, dual_lr=10.0)), ("clients", fs.DRFA(lr=1e5))],
    ids=["local_sgda", "afl", "drfa"],
)
def test_huge_losses_do_not_push_the_dual_off_the_simplex(over: Any, algorithm: fs.Algorithm) -> None:
    """In single precision a loss of 1e9 leaves no digit for the 1 that y sums to."""
    pairs = [(1e4 * x, t) for x, t in (skewed([8, 8, 8]).train.of_client(k) for k in range(3))]
    data, duals = fs.FederatedData.from_arrays(pairs, classes=3), Duals()
    problem = fs.fair(model().float(), over, classes=3, clients=3, prior=False)
    run = fs.train(problem, data, algorithm, rounds=10, callbacks=[duals])
    assert max(row["loss"] for row in run.history) > 1e8
    for y in duals.seen:
        assert float(y.min()) >= 0
        assert float(y.sum()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_the_worst_class_gets_better() -> None:
    """A rare class that ordinary learning ignores."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(4):
        targets = np.repeat([0, 1, 2], [48, 48, 4])
        pairs.append((rng.normal(size=(100, 4)) + 1.5 * np.eye(3, 4)[targets], targets))
    data = fs.FederatedData.from_arrays(pairs)
    ordinary = fs.train(fs.erm(model(), prior=False), data, fs.FedAvg(lr=0.3), rounds=30)
    fair = fs.train(fs.fair(model(), classes=3, prior=False), data, fs.LocalSGDA(lr=0.1, dual_lr=0.02), rounds=60)
    worst = [class_losses(data, run.x, "uniform").max() for run in (ordinary, fair)]
    assert worst[1] < 0.8 * worst[0]


def test_as_many_numbers_as_classes_go_up_before_the_first_round() -> None:
    data = skewed(SIZES["unequal"], classes=2)
    for problem, asked in (
        (fs.fair(model(), classes=3, prior=False), 3),
        (fs.fair(model(), "clients", clients=4, prior=False), 0),
    ):
        first = fs.train(problem, data, fs.LocalSGDA(steps=1), rounds=1, participation=2).history[0]
        assert (first["bytes_up"], first["bytes_down"], first["samples"]) == (4 * 8 * asked, 0, 0)


# --- the worst client ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [fs.DRFA(steps=2), fs.AFL(), fs.LocalSGDA(steps=2)], ids=lambda a: a.name)
def test_over_clients_it_is_agnostic_learning(algorithm: fs.Algorithm) -> None:
    data = skewed(SIZES["unequal"])
    problem, agnostic = fs.fair(model(), "clients", clients=4, prior=False), fs.agnostic(model(), 4, prior=False)
    assert (problem.name, problem.mixture, problem.kind) == ("fair", True, agnostic.kind)
    x, y = point(problem, 4)
    assert objective(problem, data, x, y) == objective(agnostic, data, x, y)
    ours, theirs = (fs.train(p, data, algorithm, rounds=4, batch_size=3) for p in (problem, agnostic))
    assert ours.y is not None and theirs.y is not None
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.y, theirs.y)
    assert ours.summary["problem"] == "fair"


@pytest.mark.slow
def test_over_clients_with_a_regulariser() -> None:
    data = skewed(SIZES["unequal"])
    problem = fs.fair(model(), "clients", clients=4, regularise=2.0, prior=False)
    plain = fs.agnostic(model(), 4, prior=False)
    x, y = point(problem, 4)
    expected = objective(plain, data, x, y) - float(y @ y)
    assert objective(problem, data, x, y) == pytest.approx(expected, abs=1e-12)
    losses = [float(fs.erm(model(), prior=False).outer(x, data.train.of_client(k))) for k in range(4)]
    assert expected == pytest.approx(float(y.numpy() @ losses) - float(y @ y), abs=1e-12)
    for algorithm in (fs.DRFA(), fs.AFL()):
        refused = rf"{algorithm.name} does not solve the problem 'fair' \(no inner level, a dual\)\."
        with pytest.raises(fs.InputError, match=refused + " Algorithms that do: .*local_sgda"):
            fs.train(problem, data, algorithm, rounds=1)
    run = fs.train(problem, data, fs.LocalSGDA(lr=0.1, dual_lr=0.02, steps=1), rounds=200)
    assert run.y is not None
    found = [float(fs.erm(model(), prior=False).outer(run.x, data.train.of_client(k))) for k in range(4)]
    best = simplex(torch.tensor(found, dtype=torch.float64) / 2)
    assert float(best.min()) > 0
    assert float(best.max() - best.min()) > 0.1
    torch.testing.assert_close(run.y, best, atol=0.02, rtol=0)


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"over": "class"}, r"The over of the fair problem must be 'classes' or 'clients'\. Got 'class'\."),
        ({"classes": None}, r"The classes of the fair problem must be a whole number of at least 1\. Got None\."),
        *(({"classes": bad}, "The classes of the fair problem must be a whole number") for bad in (0, 2.0, True, "3")),
        ({"over": "clients"}, r"The clients of the fair problem must be a whole number of at least 1\. Got None\."),
        ({"over": "clients", "clients": -1}, "The clients of the fair problem must be a whole number"),
        *(
            ({"regularise": bad}, r"The regularise of the fair problem must be a number of at least 0\. Got")
            for bad in (-0.1, math.inf, math.nan, True, "1")
        ),
        ({"loss": "hinge"}, "The loss of the fair problem must be 'cross_entropy', "),
    ],
    ids=str,
)
def test_a_bad_fair_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.fair(model(), **{"classes": 3, **options}, prior=False)


@pytest.mark.parametrize(
    ("problem", "data", "message"),
    [
        (
            fs.fair(model(), classes=2, prior=False),
            skewed([5, 5]),
            r"classes of the fair problem must be 3, the number of classes of the data\. Got 2\.",
        ),
        (
            fs.fair(model(), classes=3, prior=False),
            fs.FederatedData.from_arrays([(np.ones((3, 4)), np.ones(3))]),
            "classes of the fair problem must be 0",
        ),
        (
            fs.fair(model(), "clients", clients=3, prior=False),
            skewed([5, 5]),
            "clients of the problem must be 2, the number",
        ),
        (
            fs.fair(model(), "clients", clients=3, regularise=1.0, prior=False),
            skewed([5, 5]),
            "clients of the problem must be 2",
        ),
        (fs.fair(model(2), classes=3, prior=False), skewed([5, 5]), "labels of the data must be between 0 and 1"),
        (fs.fair(model(), classes=2, prior=False), sized_data([4, 4], features=3), "cannot take inputs of shape"),
    ],
    ids=["classes", "regression", "clients", "clients, regularised", "outputs", "inputs"],
)
def test_data_that_do_not_fit_are_refused(problem: fs.Problem, data: fs.FederatedData, message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.train(problem, data, fs.LocalSGDA(), rounds=1)


def test_nothing_can_be_computed_before_the_shares_are_known() -> None:
    problem = fs.fair(model(), classes=3, prior=False)
    with pytest.raises(fs.InputError, match=r"does not know the class frequencies yet: fs.train asks the clients"):
        objective(problem, skewed([5, 5]), problem.x0, problem.y0)


@pytest.mark.parametrize(("options", "entries"), [({}, 10), ({"over": "clients"}, 4), ({"regularise": 0.1}, 10)])
def test_a_configuration_file_takes_classes_and_clients_from_the_data(options: dict[str, Any], entries: int) -> None:
    tables: dict[str, Any] = {
        "data": {"name": "digits", "clients": 4},
        "model": {"name": "logreg"},
        "problem": {"name": "fair", **options},
        "algorithm": {"name": "local_sgda"},
    }
    experiment = build.Experiment(config.parse(tables, "here"))
    assert experiment.problem.y0 is not None and len(experiment.problem.y0) == entries
    assert experiment.problem.options["regularise"] == options.get("regularise", 0.0)
    experiment.problem.check(experiment.data)
    for known in ("classes", "clients"):
        tables["problem"] = {"name": "fair", known: 4}
        with pytest.raises(fs.InputError, match=f"Unknown option of the fair problem '{known}'"):
            build.Experiment(config.parse(tables, "here"))


@pytest.mark.parametrize("regularise", [0.0, 0.5])
def test_weighting_by_samples_is_refused_if_the_dual_weights_the_clients(regularise: float) -> None:
    data = sized_data([4, 9, 6])
    problem = fs.fair(nn.Linear(3, 2), "clients", clients=3, regularise=regularise, prior=False)
    with pytest.raises(fs.InputError, match=r"weighting must be 'uniform'.*an entry for each client"):
        fs.train(problem, data, fs.LocalSGDA(), rounds=1, weighting="samples")
    fs.train(problem, data, fs.LocalSGDA(), rounds=1)
    classes = fs.fair(nn.Linear(3, 2), "classes", classes=2, regularise=regularise, prior=False)
    fs.train(classes, data, fs.LocalSGDA(), rounds=1, weighting="samples")
    if not regularise:
        fs.train(problem, data, fs.DRFA(), rounds=1, weighting="samples")

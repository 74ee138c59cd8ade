"""Your own levels, of any lengths, and risk-averse learning against the semideviation in NumPy."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.training.metrics.evaluation import gradient_norm, objective
from minimax import numeric_slopes, slopes
from support import make_client, make_setting, softmax_problem

Rows = tuple[torch.Tensor, ...]


def points(sizes: list[int], seed: int = 0) -> fs.FederatedData:
    """Inputs of three numbers with a number as target; clients differ."""
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(size=(n, 3)) + rng.normal(size=3), rng.normal(size=n) + k) for k, n in enumerate(sizes)]
    return fs.FederatedData.from_arrays(pairs, name="points")


DATA = points([5, 9, 7])
WIDE = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 3)))
NARROW = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 5)))
X0 = torch.tensor([0.3, -0.5, 0.8], dtype=torch.float64)
Y0 = torch.tensor([0.2, -0.1, 0.4, 0.7], dtype=torch.float64)


def widen(x: torch.Tensor, batch: Rows) -> torch.Tensor:
    """Three numbers to five."""
    return WIDE @ (x + 0.3 * torch.tanh(x) * batch[0].mean(0))


def narrow(u: torch.Tensor, batch: Rows) -> torch.Tensor:
    """Five numbers to two."""
    return NARROW @ torch.sin(u) + batch[1].mean()


def error(u: torch.Tensor, batch: Rows) -> torch.Tensor:
    return ((u.sum() - batch[1]) ** 2).mean() + 0.1 * (u**2).sum()


def saddle(u: torch.Tensor, y: torch.Tensor, batch: Rows) -> torch.Tensor:
    """A dual of another length than everything else."""
    return y.sum() * (u[0] - batch[1].mean()) + y[1] * u[1] - 0.5 * y @ y


def chained(
    x: torch.Tensor, y: torch.Tensor | None, levels: list[Any], outer: Any, data: fs.FederatedData, mean: str
) -> torch.Tensor:
    """M_k[ f_k(G_k(x)) ], or with the mean of G inside, written out."""
    rows = [data.train.of_client(k) for k in range(data.clients)]
    inner = []
    for r in rows:
        u = x
        for level in levels:
            u = level(u, r)
        inner.append(u)
    if mean == "global":
        inner = [torch.stack(inner).mean(0)] * len(rows)
    dual = () if y is None else (y,)
    return torch.stack([outer(u, *dual, r) for u, r in zip(inner, rows, strict=True)]).mean()


@pytest.mark.parametrize("mean", ["global", "local"])
@pytest.mark.parametrize("dual", [True, False], ids=["dual", "no dual"])
@pytest.mark.parametrize("levels", [[widen], [widen, narrow]], ids=["one level", "two levels"])
def test_levels_of_any_lengths(levels: list[Any], dual: bool, mean: Any) -> None:
    outer, y0 = (saddle, Y0) if dual else (error, None)
    problem = fs.multilevel(levels, outer, X0, y0, inner_mean=mean)
    words = "1 inner level" if len(levels) == 1 else "2 inner levels"
    assert problem.kind == f"{words}, a {mean} inner mean, {'a dual' if dual else 'no dual'}"
    assert (problem.name, problem.outer_draws, problem.levels) == ("multilevel", True, tuple(levels))
    value = chained(X0, y0, levels, outer, DATA, mean)
    assert objective(problem, DATA, X0, y0) == pytest.approx(float(value), rel=1e-12)

    def f(x: torch.Tensor) -> torch.Tensor:
        return chained(x, y0, levels, outer, DATA, mean)

    (gradient,) = slopes(f, X0)
    torch.testing.assert_close(gradient, numeric_slopes(f, X0)[0], atol=1e-8, rtol=1e-7)
    assert gradient_norm(problem, DATA, X0, y0) == pytest.approx(float(gradient.norm()), rel=1e-12)


@pytest.mark.parametrize("dual", [True, False], ids=["dual", "no dual"])
def test_training_keeps_an_estimate_of_each_level_and_sends_them_all(dual: bool) -> None:
    """One client alone, all its data at once: its first step is along the exact gradient."""
    one = points([6])
    outer, y0 = (saddle, Y0) if dual else (error, None)
    problem = fs.multilevel([widen, narrow], outer, X0, y0, name="own")
    algorithm = fs.LocalSMCGDAM(eta=0.5, gamma_x=0.1, gamma_y=0.4, steps=1)
    run = fs.train(problem, one, algorithm, rounds=1)
    duals = () if y0 is None else (y0,)
    found = slopes(lambda x, *y: chained(x, y[0] if y else None, [widen, narrow], outer, one, "global"), X0, *duals)
    torch.testing.assert_close(run.x, X0 - 0.05 * found[0], atol=1e-12, rtol=0)
    if dual:
        torch.testing.assert_close(run.y, Y0 + 0.2 * found[1], atol=1e-12, rtol=0)
    numbers = 2 * 3 + (5 + 2) + (2 * 4 if dual else 0)
    assert run.history[-1]["bytes_up"] == run.history[-1]["bytes_down"] == 8 * numbers
    assert (run.summary["problem"], run.y is None) == ("own", not dual)


def test_the_dual_is_projected() -> None:
    box = fs.projections.box(low=0.0, high=0.25)
    problem = fs.multilevel([widen, narrow], saddle, X0, Y0.clamp(0, 0.25), box)
    run = fs.train(problem, DATA, fs.LocalSMCGDAM(gamma_x=0.01, gamma_y=0.5, steps=1), rounds=3)
    assert run.y is not None
    assert run.y.min() >= 0 and run.y.max() <= 0.25
    assert (run.y == 0).any() or (run.y == 0.25).any()


def test_an_outer_function_without_data_costs_no_samples() -> None:
    drawn = []
    for outer_draws in (True, False):

        def outer(u: torch.Tensor, batch: Rows, wanted: bool = outer_draws) -> torch.Tensor:
            assert bool(batch) == wanted
            return (u**2).sum()

        problem = fs.multilevel([widen, narrow], outer, X0, outer_draws=outer_draws)
        run = fs.train(problem, DATA, fs.LocalSMCGDAM(gamma_x=0.01, steps=1), rounds=1)
        drawn.append(run.history[-1]["samples"])
    assert drawn == [21 * 3 * 2, 21 * 2 * 2], "for the first estimates, and for the step"


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", [[], ()])
def test_no_levels_are_refused(levels: Any) -> None:
    with pytest.raises(fs.InputError, match="levels of the multilevel problem must be a list of at least one function"):
        fs.multilevel(levels, error, X0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [1]}, r"The levels of the problem multilevel must be a tuple of functions"),
        ({"x0": torch.ones(2, 2)}, r"The x0 of the problem multilevel must be a vector of floats"),
        ({"x0": [1.0, 2.0]}, r"The x0 of the problem multilevel must be a vector of floats"),
        ({"y0": torch.ones(2, dtype=torch.long)}, r"The y0 of the problem multilevel must be a vector of floats"),
        ({"project_y": torch.relu}, "has project_y but no dual: pass y0 too"),
        (
            {"inner_mean": "mean"},
            r"The inner_mean of the multilevel problem must be 'local' or 'global'",
        ),
    ],
    ids=["levels", "matrix", "list", "whole numbers", "projection", "mean"],
)
def test_a_bad_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.multilevel(**{"levels": [widen], "outer": error, "x0": X0, **options})


WRONG: list[tuple[str, list[Any], Any, torch.Tensor | None, str]] = [
    (
        "lengths that do not fit",
        [widen, widen],
        error,
        None,
        r"The level 2 of the problem multilevel fails, given u of 5 numbers, and a batch of shapes \(2, 3\), \(2,\): ",
    ),
    ("a first level for other inputs", [narrow], error, None, r"The level 1 of the problem multilevel fails, given x"),
    ("a level without a batch", [lambda u: u], error, None, r"The level 1 .* fails, .*takes 1 positional argument"),
    ("a batch of three", [lambda u, batch: batch[2]], error, None, r"The level 1 .* fails, .*out of range"),
    ("an outer function without the dual", [widen], error, Y0, r"The outer function .* fails, .*y of 4, and a batch"),
    ("an outer function with one too many", [widen], saddle, None, r"The outer function .* fails, given u of 5"),
    (
        "a level that is no mean",
        [lambda u, batch: batch[0] @ u],
        error,
        None,
        r"value of level 1 of the problem multilevel must be a vector of one length: a mean over the samples\. "
        r"Got '2 numbers for 2 samples, 3 for 3'",
    ),
    (
        "a vector outside",
        [widen],
        lambda u, batch: u,
        None,
        r"value of the outer function .* must be a single number, a tensor of shape \(\)\. Got 'shape \(5,\)'\.",
    ),
    ("a plain number outside", [widen], lambda u, batch: 1.0, None, r"value of the outer function .* Got 'float'\."),
    (
        "a matrix inside",
        [lambda u, batch: u[None] * batch[0]],
        lambda u, batch: u.sum(),
        None,
        r"The value of level 1 of the problem multilevel must be a vector \(1-d\)\. Got 'shape \(2, 3\)'\.",
    ),
]


@pytest.mark.parametrize(("levels", "outer", "y0", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_function_is_an_error_before_training(
    levels: list[Any], outer: Any, y0: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.train(fs.multilevel(levels, outer, X0, y0), DATA, fs.LocalSMCGDAM(), rounds=1)


# --- the example of the docstring ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_in_the_docstring_is_the_mean_plus_the_deviation() -> None:
    doc = (fs.multilevel.__doc__ or "").partition("Options:")[0]
    lines = [line for line in doc.splitlines() if line.startswith(" " * 4)]
    assert len(lines) == 4 and "fs.multilevel(" in doc
    slope = torch.tensor([2.0, -1.0, 1.5]).double()

    def losses(x: torch.Tensor, batch: Rows) -> torch.Tensor:
        return (batch[0] @ x - batch[1]) ** 2

    names: dict[str, Any] = {"torch": torch, "fs": fs, "losses": losses, "x0": slope}
    exec(textwrap.dedent("\n".join(lines)), names)
    problem, one = names["problem"], points([40])
    values = losses(slope, one.train.of_client(0)).numpy()
    expected = values.mean() + math.sqrt(values.var() + 1e-4)
    assert objective(problem, one, slope, None) == pytest.approx(expected, rel=1e-12)
    run = fs.train(problem, points([20, 20]), fs.LocalSMCGDAM(gamma_x=0.1, steps=5), rounds=10, batch_size=10)
    assert run.history[-1]["loss"] < 0.5 * run.history[0]["loss"]


# --- risk-averse learning --------------------------------------------------------------------------------------------


def classified(sizes: list[int], seed: int = 0) -> fs.FederatedData:
    rng = np.random.default_rng(seed)
    return fs.FederatedData.from_arrays(
        [(rng.normal(size=(n, 3)) + rng.normal(size=3), (np.arange(n) + k) % 2) for k, n in enumerate(sizes)]
    )


def network() -> nn.Module:
    flat = softmax_problem().flat
    assert flat is not None
    return flat.module


def moments(x: np.ndarray, rows: Rows, power: int) -> tuple[float, float]:
    """The mean loss of softmax regression and the mean of its excess to a power, in NumPy."""
    inputs, targets = (a.numpy() for a in rows)
    outputs = inputs @ x[:6].reshape(2, 3).T + x[6:]
    losses = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(len(targets)), targets]
    return losses.mean(), (np.maximum(losses - losses.mean(), 0) ** power).mean()


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("sizes", [[11], [11, 4, 7]], ids=["one client", "three clients"])
def test_the_objective_is_the_mean_semideviation(power: int, sizes: list[int]) -> None:
    data = classified(sizes)
    problem = fs.risk_averse(network(), weight=0.8, power=power, smoothing=0.05, prior=False)
    assert problem.kind == "2 inner levels, a global inner mean, no dual"
    assert (problem.name, problem.outer_draws, problem.takes_weights) == ("risk_averse", False, True)
    m, v = np.mean([moments(problem.x0.numpy(), data.train.of_client(k), power) for k in range(len(sizes))], axis=0)
    expected = m + 0.8 * (v if power == 1 else math.sqrt(v + 0.05**2))
    assert objective(problem, data, problem.x0, None) == pytest.approx(expected, rel=1e-12)
    assert v > 0.01


@pytest.mark.parametrize("power", [1, 2])
def test_the_gradient_is_that_of_finite_differences(power: int) -> None:
    data = classified([11, 4])
    problem = fs.risk_averse(network(), weight=0.8, power=power, prior=False)

    def f(x: torch.Tensor) -> torch.Tensor:
        return chained(x, None, list(problem.levels), problem.outer, data, "global")

    (ours,) = slopes(f, problem.x0)
    torch.testing.assert_close(ours, numeric_slopes(f, problem.x0)[0], atol=1e-7, rtol=1e-6)
    assert gradient_norm(problem, data, problem.x0) == pytest.approx(float(ours.norm()), rel=1e-10)
    (plain,) = slopes(lambda x: fs.erm(network(), prior=False).outer(x, data.train.of_client(0)), problem.x0)
    assert (ours - plain).norm() > 0.01


def test_its_layers_are_the_point_with_the_mean_and_two_numbers() -> None:
    problem = fs.risk_averse(network(), prior=False)
    client = make_client(make_setting(problem, classified([6, 6])), [0, 1])
    first = client.g(1, problem.x0.expand(2, -1), client.draw(1))
    assert first.shape == (2, 9) and torch.equal(first[:, :8], problem.x0.expand(2, -1))
    second = client.g(2, first, client.draw(2))
    assert second.shape == (2, 2)
    torch.testing.assert_close(second[:, 0], first[:, 8], atol=1e-14, rtol=0)
    assert problem.options == {
        **{"loss": "cross_entropy", "batchnorm": "refuse", "dropout": "on", "prior": False},
        **{"weight": 0.5, "power": 2, "smoothing": 0.01},
    }


def test_the_weights_of_samples_count_in_both_levels() -> None:
    problem = fs.risk_averse(network(), prior=False)
    inputs, targets = classified([6]).train.of_client(0)
    weights, rows = torch.tensor([2.0, 0, 1, 2, 1, 0]).double(), torch.tensor([0, 0, 2, 3, 3, 4])
    u = torch.cat([problem.x0, torch.tensor([0.5]).double()])
    for level, at in zip(problem.levels, (problem.x0, u), strict=True):
        ours, expected = level(at, (inputs, targets, weights)), level(at, (inputs[rows], targets[rows]))
        torch.testing.assert_close(ours, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("v", [-3.0, -1e-12, 0.0, 0.4])
def test_an_estimate_of_the_deviation_may_be_below_zero(power: int, v: float) -> None:
    problem = fs.risk_averse(network(), weight=0.5, power=power, smoothing=0.1, prior=False)
    u = torch.tensor([0.7, v], dtype=torch.float64)
    deviation = v if power == 1 else math.sqrt(max(v, 0) + 0.01)
    assert float(problem.outer(u, ())) == pytest.approx(0.7 + 0.5 * deviation, rel=1e-12)
    (slope,) = slopes(lambda u: problem.outer(u, ()), u)
    expected = 0.5 if power == 1 else 0.25 / deviation if v > 0 else 0.0
    assert slope.tolist() == pytest.approx([1.0, expected], rel=1e-12)


@pytest.mark.slow
def test_a_run_with_estimates_below_zero_stays_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)
    problem, seen = fs.risk_averse(network(), weight=2.0, smoothing=1e-3, prior=False), []

    class Watch(fs.Callback):
        def on_round(self, round: int, state: Any) -> None:
            seen.append(float(state.h[2][1]))

    algorithm = fs.LocalSMCGDAM(eta=0.3, gamma_x=3.0, alpha=0.5, steps=3)
    options: dict[str, Any] = {"rounds": 12, "batch_size": 1, "chunk": 3, "callbacks": [Watch()]}
    run = fs.train(problem, classified([8, 5, 8], seed=3), algorithm, **options)
    assert min(seen) < 0
    assert torch.isfinite(run.x).all()


@pytest.mark.slow
def test_it_learns_digits_with_lower_worst_losses() -> None:
    """The mean loss is that of plain learning; the highest loss, and the spread above the mean, are lower."""
    data = fs.data.digits().subset(400).split("iid", clients=4)
    module = fs.models.logreg((1, 8, 8), 10)
    inputs, targets = (a[data.train.rows] for a in data.train.arrays)
    evaluation = fs.Evaluation(stationarity=True, clients="none")
    means, spreads, worst = [], [], []
    for weight in (1e-6, 1.0):
        problem = fs.risk_averse(module, weight, prior=False)
        algorithm = fs.LocalSMCGDAM(gamma_x=1.5, steps=5)
        run = fs.train(problem, data, algorithm, rounds=20, evaluate=evaluation, eval_every=20)
        assert run.history[-1]["objective"] < 0.4 * run.history[0]["objective"]
        assert run.history[-1]["accuracy"] > 0.85
        assert problem.losses is not None and problem.predict is not None
        losses = problem.losses(problem.predict(run.x, inputs), targets).double()
        means.append(float(losses.mean()))
        spreads.append(float(((losses - losses.mean()).relu() ** 2).mean().sqrt()))
        worst.append(float(losses.max()))
    assert means[1] == pytest.approx(means[0], rel=0.1)
    assert spreads[1] < 0.7 * spreads[0] and worst[1] < 0.7 * worst[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"power": bad}, r"The power of the risk_averse problem must be 1 or 2\. Got")
            for bad in (0, 3, True, 1.5, "2", None)
        ),
        *(
            ({"weight": bad}, r"The weight of the risk_averse problem must be a number above 0\. Got")
            for bad in (0, -0.5, math.nan, True, "1")
        ),
        *(
            ({"smoothing": bad}, r"The smoothing of the risk_averse problem must be a number above 0\. Got")
            for bad in (0.0, -1, math.inf)
        ),
        ({"loss": "hinge"}, "The loss of the risk_averse problem must be 'cross_entropy', "),
        ({"batchnorm": "keep"}, "The batchnorm of the risk_averse problem must be"),
    ],
    ids=str,
)
def test_a_bad_risk_averse_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.risk_averse(network(), **options, prior=False)


def test_a_file_can_name_it() -> None:
    tables = {
        "data": {"name": "digits", "clients": 3},
        "model": {"name": "logreg"},
        "problem": {"name": "risk_averse", "weight": 0.2, "power": 1},
        "algorithm": {"name": "local_smcgdam"},
    }
    problem = build.Experiment(config.parse(tables, "here")).problem
    assert (problem.options["weight"], problem.options["power"], len(problem.x0)) == (0.2, 1, 650)
    with pytest.raises(fs.InputError, match=r"Unknown problem 'multilevel'"):
        build.Experiment(config.parse({**tables, "problem": {"name": "multilevel"}}, "here"))

"""AUC without pairs: it equals the loss over all pairs; one fraction of positives for all clients; odd classes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.training.metrics.catalogue import TIMES
from fedstrata.training.metrics.evaluation import MEASURES, objective
from minimax import client_weights, mean_over_clients, numeric_slopes, prepared, slopes
from support import make_client, make_clients, make_setting

EQUAL = [(9, 3), (6, 6), (11, 1), (12, 0)]
UNEQUAL = [(9, 3), (2, 4), (17, 1), (5, 0), (0, 3)]


def binary(counts: list[tuple[int, int]], seed: int = 0, dtype: type = np.float64) -> fs.FederatedData:
    """Build clients with these numbers of negatives and positives; positives lie higher, and clients differ."""
    rng = np.random.default_rng(seed)
    pairs = []
    for negatives, positives in counts:
        targets = rng.permutation(np.repeat([0, 1], [negatives, positives]))
        inputs = rng.normal(size=(len(targets), 3)) + 0.6 * targets[:, None] + 0.4 * rng.normal(size=3)
        pairs.append((inputs.astype(dtype), targets))
    return fs.FederatedData.from_arrays(pairs, classes=2, name="binary")


def model(outputs: int = 1, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A linear model with random weights that score positives higher."""
    linear = nn.Linear(3, outputs, dtype=dtype)
    weights = np.abs(np.random.default_rng(7).normal(size=(2, 4))) * [[-scale], [scale]]
    weights = weights[2 - outputs :] if outputs <= 2 else np.ones((outputs, 4))
    linear.load_state_dict(
        {"weight": torch.from_numpy(weights[:, 1:]).to(dtype), "bias": torch.from_numpy(weights[:, 0]).to(dtype)}
    )
    return linear


def scores_of(problem: fs.Problem, data: fs.FederatedData, score: str = "sigmoid") -> list[torch.Tensor]:
    """The score of each client's samples at the problem's first weights."""
    assert problem.predict is not None
    logits = [problem.predict(problem.x0, data.train.of_client(k)[0])[:, 0] for k in range(data.clients)]
    return [z.sigmoid() if score == "sigmoid" else z for z in logits]


def mean_distribution(
    problem: fs.Problem, data: fs.FederatedData, weighting: str, score: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All scores, labels and masses; a sample's mass is its client's weight divided by the client's size."""
    labels = torch.cat([data.train.of_client(k)[1] for k in range(data.clients)])
    masses = np.repeat(np.array(client_weights(data, weighting)) / data.sizes, data.sizes)
    return torch.cat(scores_of(problem, data, score)), labels, torch.from_numpy(masses)


def at(problem: fs.Problem, a: Any, b: Any) -> torch.Tensor:
    """The problem's first weights with these a and b."""
    return torch.cat([problem.x0[:-2], torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in (a, b)])])


def share_of(problem: fs.Problem) -> float:
    """The p of a problem: half of the curvature of F in b, at a negative."""
    batch = torch.zeros(1, 3, dtype=problem.x0.dtype), torch.zeros(1, dtype=torch.long)
    values = []
    for b in (-1.0, 0.0, 1.0):
        x = torch.zeros_like(problem.x0)
        x[-1] = b
        values.append(float(problem.outer(x, torch.zeros_like(problem.x0[:1]), batch)))
    return (values[0] - 2 * values[1] + values[2]) / 2


# --- the identity ----------------------------------------------------------------------------------------------------

DISTRIBUTIONS = pytest.mark.parametrize(
    ("counts", "weighting"),
    [(EQUAL, "uniform"), (EQUAL, "samples"), (UNEQUAL, "uniform"), (UNEQUAL, "samples")],
    ids=["equal", "equal, by samples", "unequal", "unequal, by samples"],
)
SCORES = pytest.mark.parametrize("score", ["sigmoid", "none"])


@DISTRIBUTIONS
@SCORES
@pytest.mark.parametrize("scale_dual", [False, True], ids=["alpha", "scaled"])
def test_the_square_form_is_the_loss_of_all_pairs(
    counts: list[tuple[int, int]], weighting: str, score: Any, scale_dual: bool
) -> None:
    data = binary(counts)
    problem = prepared(fs.auc(model(), score=score, scale_dual=scale_dual), data, weighting)
    s, t, mass = mean_distribution(problem, data, weighting, score)
    plus, minus = t == 1, t == 0
    p = float(mass[plus].sum())
    losses = (1 - s[plus][:, None] + s[minus][None, :]) ** 2
    expected = mass[plus] @ losses @ mass[minus] / (p * (1 - p))
    if counts is EQUAL:
        assert float(expected) == pytest.approx(float(losses.mean()), rel=1e-12)
    a, b = (float(mass[c] @ s[c] / mass[c].sum()) for c in (plus, minus))
    unit = math.sqrt(p * (1 - p)) if scale_dual else 1.0

    def value(a: Any, b: Any, alpha: Any) -> torch.Tensor:
        y = torch.as_tensor(alpha, dtype=torch.float64).reshape(1) * unit
        return mean_over_clients(problem, data, at(problem, a, b), y, weighting)

    best = value(a, b, b - a)
    assert 1 + float(best) / (p * (1 - p)) == pytest.approx(float(expected), abs=1e-10)
    for slope in slopes(value, *(torch.tensor(v, dtype=torch.float64) for v in (a, b, b - a))):
        assert float(slope.abs()) < 1e-12
    for size in (1e-3, 0.1, 2.0):
        for sign in (-1, 1):
            step = sign * size
            assert value(a + step, b, b - a) > best
            assert value(a, b + step, b - a) > best
            assert value(a + step, b - step, b - a) > best
            assert value(a, b, b - a + step) < best


@DISTRIBUTIONS
@pytest.mark.parametrize(("margin", "apart"), [(0.05, True), (2, False), (3.5, False)])
def test_the_margin_form_is_variances_and_a_hinge(
    counts: list[tuple[int, int]], weighting: str, margin: float, apart: bool
) -> None:
    data = binary(counts)
    problem = prepared(fs.auc(model(), form="margin", margin=margin, score="none"), data, weighting)
    s, t, mass = mean_distribution(problem, data, weighting, "none")
    p = float(mass[t == 1].sum())
    means, variances = [], []
    for c in (1, 0):
        shares = mass[t == c] / mass[t == c].sum()
        means.append(float(shares @ s[t == c]))
        variances.append(float(shares @ (s[t == c] - means[-1]) ** 2))
    a, b = means
    assert (margin + b - a < 0) == apart
    alpha = max(0.0, margin + b - a)

    def value(a: float, b: float, alpha: float) -> float:
        y = torch.tensor([alpha], dtype=torch.float64)
        assert torch.equal(problem.projected(y), y), "alpha is at least 0"
        return float(mean_over_clients(problem, data, at(problem, a, b), y, weighting))

    best = value(a, b, alpha)
    assert best / (p * (1 - p)) == pytest.approx(sum(variances) + max(0.0, margin + b - a) ** 2, abs=1e-10)
    for size in (1e-3, 0.1, 2.0):
        assert min(value(a + size, b, alpha), value(a - size, b, alpha)) > best
        assert min(value(a, b + size, alpha), value(a, b - size, alpha)) > best
        assert max(value(a, b, other) for other in (alpha + size, max(0.0, alpha - size))) <= best


@SCORES
def test_the_alphas_of_the_two_forms_are_one_apart_at_margin_one(score: Any) -> None:
    data = binary(EQUAL)
    square, margin, wide = (
        prepared(fs.auc(model(), form=form, margin=m, score=score), data)
        for form, m in (("square", 1.0), ("margin", 1.0), ("margin", 2.5))
    )
    for k in range(data.clients):
        batch = data.train.of_client(k)
        alphas = [float(p.best_y(p.x0, batch)) for p in (square, margin, wide) if p.best_y is not None]
        assert [alpha - alphas[0] for alpha in alphas] == pytest.approx([0.0, 1.0, 2.5], abs=1e-12)
    assert square.project_y is None
    assert margin.projected(torch.tensor([-0.2, 0.3])).tolist() == pytest.approx([0.0, 0.3])


# --- one p for all clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["square", "margin"])
@SCORES
def test_the_mean_over_clients_of_equal_sizes_is_the_pooled_objective(form: Any, score: Any) -> None:
    data = binary(EQUAL)
    pooled = fs.FederatedData.from_arrays([data.train.arrays], classes=2)
    p = sum(positives for _, positives in EQUAL) / sum(sum(c) for c in EQUAL)
    given = fs.auc(model(), form=form, score=score, p=p)
    asked = fs.auc(model(), form=form, score=score)
    problems = [prepared(asked, data), fs.train(asked, data, fs.LocalSGDA(), rounds=1).problem, prepared(asked, pooled)]
    rng = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = torch.randn(6, generator=rng).double(), torch.rand(1, generator=rng).double()
        whole = float(given.outer(x, y, pooled.train.of_client(0)))
        assert objective(problems[2], pooled, x, y) == pytest.approx(whole, abs=1e-12)
        for problem in problems[:2]:
            assert objective(problem, data, x, y) == pytest.approx(whole, abs=1e-12)
            assert float(mean_over_clients(problem, data, x, y, "samples")) == pytest.approx(whole, abs=1e-12)


@pytest.mark.parametrize("counts", [EQUAL, UNEQUAL, [(5, 0), (0, 1)]], ids=str)
def test_p_is_the_fraction_of_positives_under_the_weighting_of_the_run(counts: list[tuple[int, int]]) -> None:
    data, table = binary(counts), np.array(counts)
    shares = {
        "uniform": (table[:, 1] / table.sum(1)).mean(),
        "samples": table[:, 1].sum() / table.sum(),
    }
    for weighting, share in shares.items():
        problem = prepared(fs.auc(model()), data, weighting)
        assert problem.query is None
        assert share_of(problem) == pytest.approx(share, abs=1e-15)
        run = fs.train(fs.auc(model()), data, fs.LocalSGDA(steps=1), rounds=1, weighting=weighting)  # type: ignore[arg-type]
        assert share_of(run.problem) == pytest.approx(share, abs=1e-15)
    assert share_of(fs.auc(model(), p=0.3)) == pytest.approx(0.3, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_two_numbers_per_client_go_up_before_the_first_round(dtype: torch.dtype) -> None:
    data, size = binary(UNEQUAL), torch.finfo(dtype).bits // 8
    used = []
    for p in (None, 0.3):
        problem = fs.auc(model(dtype=dtype), p=p)
        assert (problem.query is None) == (p is not None)
        run = fs.train(problem, data, fs.LocalSGDA(steps=1), rounds=1, participation=2, batch_size=4)
        used.append([[row[k] for k in ("bytes_up", "bytes_down", "samples", "steps")] for row in run.history])
    asked, given = used
    round_ = 2 * size * (4 + 2 + 1)
    assert given == [[0, 0, 0, 0], [round_, round_, 8, 1]]
    assert asked == [[2 * size * 5, 0, 0, 0], [2 * size * 5 + round_, round_, 8, 1]]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["square", "margin"])
@pytest.mark.parametrize("scale_dual", [False, True], ids=["alpha", "scaled"])
@pytest.mark.parametrize("outputs", [1, 2])
@SCORES
def test_gradients_are_those_of_finite_differences(form: Any, scale_dual: bool, outputs: int, score: Any) -> None:
    """For several clients at once, as training computes them; with weights and without."""
    data = binary(UNEQUAL)
    network = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, outputs)).double()
    rng = torch.Generator().manual_seed(3)
    for sampling in ("uniform", "balanced"):
        problem = prepared(fs.auc(network, form, score=score, scale_dual=scale_dual), data)
        client = make_client(make_setting(problem, data, batch_size=4, sampling=sampling), [0, 2, 4])
        batch = replace(client.draw(), traced=False)
        assert len(batch.parts[0]) == (3 if sampling == "balanced" else 2)
        x = torch.randn(3, len(problem.x0), generator=rng, dtype=torch.float64)
        y = torch.rand(3, 1, generator=rng, dtype=torch.float64)
        found = client.f_grads(x, batch, y)
        values = client.loss(x, batch, y)
        for c in range(3):
            arrays = tuple(a[c] for a in batch.parts[0])

            def f(x: torch.Tensor, y: torch.Tensor, arrays: Any = arrays, problem: fs.Problem = problem) -> Any:
                return problem.outer(x, y, arrays)

            assert float(values[c]) == pytest.approx(float(f(x[c], y[c])), abs=1e-12)
            for ours, numeric in zip(found, numeric_slopes(f, x[c], y[c]), strict=True):
                torch.testing.assert_close(ours[c], numeric, atol=1e-8, rtol=1e-7)


def test_one_logit_and_the_difference_of_two_are_the_same() -> None:
    data = binary(EQUAL)
    two = model(2)
    one = nn.Linear(3, 1, dtype=torch.float64)
    state = two.state_dict()
    one.load_state_dict({name: (value[1] - value[0])[None] for name, value in state.items()})
    y = torch.tensor([0.4], dtype=torch.float64)
    values = []
    for problem in (prepared(fs.auc(two), data), prepared(fs.auc(one), data)):
        values.append(objective(problem, data, at(problem, 0.7, 0.2), y))
    assert values[0] == pytest.approx(values[1], rel=1e-12)


@pytest.mark.parametrize("form", ["square", "margin"])
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_scale_dual_is_a_change_of_variable(form: Any, p: float) -> None:
    """A step along the gradient in y moves alpha by the gradient in alpha, divided by p(1-p)."""
    plain, scaled = (fs.auc(model(), form, p=p, scale_dual=flag) for flag in (False, True))
    batch = binary(UNEQUAL).train.of_client(0)
    x, y = at(plain, 0.6, 0.1), torch.tensor([0.3], dtype=torch.float64)
    unit, lr = math.sqrt(p * (1 - p)), 0.7
    alpha = y / unit
    assert float(scaled.outer(x, y, batch)) == pytest.approx(float(plain.outer(x, alpha, batch)), abs=1e-12)
    in_x, in_alpha = slopes(lambda x, y: plain.outer(x, y, batch), x, alpha)
    also_in_x, in_y = slopes(lambda x, y: scaled.outer(x, y, batch), x, y)
    torch.testing.assert_close(also_in_x, in_x, atol=1e-12, rtol=0)
    moved = (y + lr * in_y) / unit - alpha
    torch.testing.assert_close(moved, lr * in_alpha / (p * (1 - p)), atol=1e-12, rtol=1e-12)
    assert plain.best_y is not None and scaled.best_y is not None
    torch.testing.assert_close(scaled.best_y(x, batch), unit * plain.best_y(x, batch), atol=1e-12, rtol=0)


# --- the best alpha --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "margin"), [("square", 1.0), ("margin", 1.0), ("margin", 0.2)])
@pytest.mark.parametrize("scale_dual", [False, True], ids=["alpha", "scaled"])
def test_best_y_is_the_best_and_its_mean_is_that_of_the_mean(form: Any, margin: float, scale_dual: bool) -> None:
    data = binary(UNEQUAL)
    problem = prepared(fs.auc(model(2), form, margin, scale_dual=scale_dual), data)
    assert problem.best_y is not None
    x = at(problem, 0.6, 0.1)
    rng = torch.Generator().manual_seed(1)
    inputs, targets = (a[:32] for a in data.train.arrays)
    weights = torch.rand(32, generator=rng, dtype=torch.float64) + 0.5
    for arrays in ((inputs, targets), (inputs, targets, weights)):

        def slope(y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return slopes(lambda y: problem.outer(x, y, batch), y)[0]

        batches = [tuple(a[i : i + 8] for a in arrays) for i in range(0, 32, 8)]
        found = torch.stack([problem.best_y(x, batch) for batch in batches])
        assert found.shape == (4, 1)
        assert float(found.std()) > 0.01
        for y, batch in zip(found, batches, strict=True):
            assert float(slope(y, batch).abs()) < 1e-12
            assert float(slope(y + 1, batch)) < -0.1
        torch.testing.assert_close(problem.best_y(x, arrays), found.mean(0), atol=1e-12, rtol=0)
        assert float(slope(found.mean(0), arrays).abs()) < 1e-12


def test_clients_find_the_best_alpha_together() -> None:
    """Also with clients of one class, whose own best alpha is far off."""
    data = binary(EQUAL)
    problem = prepared(fs.auc(model()), data)
    clients = make_clients(make_setting(problem, data), chunk=3)
    found = clients.mean(lambda client, x: client.best_y(x, client.draw()), problem.x0)
    (slope,) = slopes(lambda y: mean_over_clients(problem, data, problem.x0, y), found)
    assert float(slope.abs()) < 1e-12


# --- classes that are missing, scores that are flat ------------------------------------------------------------------

ALGORITHMS = [
    fs.LocalSGDA(steps=2),
    fs.FGDA(steps=2),
    fs.CoDA(steps=2, stage_steps=2, factor=1.0),
    fs.CODASCA(steps=2, stage_rounds=2),
]
FORMS: list[dict[str, Any]] = [
    {"form": "square", "scale_dual": False},
    {"form": "margin", "scale_dual": True, "score": "none"},
    {"form": "square", "scale_dual": True},
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize(
    ("counts", "batch_size", "scale"),
    [
        ([(9, 3), (6, 6), (11, 1)], 1, 1.0),
        ([(6, 0), (0, 4), (5, 5)], None, 1.0),
        ([(9, 3), (6, 6)], 4, 1e4),
    ],
    ids=["single-class batches", "single-class clients", "saturated"],
)
def test_odd_classes_and_flat_scores_are_legal(
    algorithm: fs.Algorithm, counts: list[tuple[int, int]], batch_size: int | None, scale: float
) -> None:
    data = binary(counts, dtype=np.float32)
    for options in FORMS[:2]:
        problem = fs.auc(model(scale=scale, dtype=torch.float32), **options)
        run = fs.train(problem, data, algorithm, rounds=3, batch_size=batch_size)
        assert run.y is not None
        assert run.x.isfinite().all()
        assert run.y.isfinite().all()
        assert all(math.isfinite(value) for row in run.history for value in row.values())
        assert "auc" in run.history[-1]
        assert options["form"] == "square" or float(run.y) >= 0


@pytest.mark.parametrize("options", FORMS, ids=str)
@pytest.mark.parametrize("label", [0, 1])
def test_values_and_gradients_of_one_class_are_finite(options: dict[str, Any], label: int) -> None:
    data = binary([(5, 0), (3, 0)] if label == 0 else [(0, 5), (0, 3)])
    for scale in (1.0, 1e4):
        problem = fs.auc(model(scale=scale), p=0.3, **options)
        batch, y = data.train.of_client(0), torch.tensor([0.5], dtype=torch.float64)
        assert problem.best_y is not None
        found = [problem.outer(problem.x0, y, batch), problem.best_y(problem.x0, batch)]
        found += slopes(lambda x, y, f=problem.outer, b=batch: f(x, y, b), problem.x0, y)
        assert all(bool(v.isfinite().all()) for v in found)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_on_all_clients_is_refused(label: int) -> None:
    data = binary([(5, 0), (3, 0)] if label == 0 else [(0, 5), (0, 3)], dtype=np.float32)
    wanted = rf"classes of the auc problem must be both 0 and 1\. Got 'class {label} only, on all clients'"
    with pytest.raises(fs.InputError, match=wanted):
        fs.train(fs.auc(model(dtype=torch.float32)), data, fs.LocalSGDA(), rounds=1)


# --- balanced sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["square", "margin"])
@pytest.mark.parametrize("batch_size", [2, 5])
def test_balanced_batches_are_unbiased(form: Any, batch_size: int) -> None:
    """The class of each sample is fixed and its row uniform in the class: replace it by all rows of the class."""
    data = binary(UNEQUAL)
    problem = prepared(fs.auc(model(), form), data)
    client = make_client(make_setting(problem, data, batch_size=batch_size, sampling="balanced"), list(range(5)))
    _, labels, weights = client.draw().parts[0]
    x, y = at(problem, 0.6, 0.1), torch.tensor([0.4], dtype=torch.float64)
    for k in range(5):
        inputs, targets = data.train.of_client(k)
        slots = [targets == c for c in labels[k]]
        rows = sum(int(slot.sum()) for slot in slots)
        every = (
            torch.cat([inputs[slot] for slot in slots]),
            torch.cat([targets[slot] for slot in slots]),
            torch.cat([inputs.new_full((int(s.sum()),), 1 / int(s.sum())) for s in slots]) * rows / batch_size,
        )
        each = torch.cat([weights[k, j].expand(int(slot.sum())) for j, slot in enumerate(slots)])
        expected = every[0], every[1], every[2] * each
        assert float(problem.outer(x, y, expected)) == pytest.approx(
            float(problem.outer(x, y, (inputs, targets))), abs=1e-12
        )
        ours, whole = (slopes(lambda x, y, b=b: problem.outer(x, y, b), x, y) for b in (expected, (inputs, targets)))
        torch.testing.assert_close(ours, whole, atol=1e-12, rtol=0)


def test_training_with_balanced_batches() -> None:
    data = binary([(57, 3), (40, 2), (8, 0)])
    options: dict[str, Any] = {"rounds": 15, "batch_size": 6, "sampling": "balanced"}
    run = fs.train(fs.auc(model(scale=0.1), scale_dual=True), data, fs.LocalSGDA(steps=5), **options)
    assert run.history[-1]["auc"] > max(0.75, run.history[0]["auc"])
    assert share_of(run.problem) == pytest.approx((3 / 60 + 2 / 42) / 3, abs=1e-15)


# --- measures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
@SCORES
def test_measures_are_of_the_logits_and_the_run_has_a_model(outputs: int, score: Any) -> None:
    data = binary(UNEQUAL)
    problem = fs.auc(model(outputs), score=score)
    assert (problem.name, problem.kind, problem.takes_weights) == ("auc", "no inner level, a dual", True)
    assert torch.equal(problem.x0[-2:], torch.zeros(2).double())
    run = fs.train(problem, data, fs.LocalSGDA(steps=3), rounds=2)
    assert len(run.x) == 4 * outputs + 2
    module = run.model()
    assert isinstance(module, nn.Linear)
    assert not torch.equal(module.weight, model(outputs).weight)  # type: ignore[arg-type]
    inputs, targets = data.train.arrays
    with torch.no_grad():
        out = module(inputs)
    logits = (out[:, 0] if outputs == 1 else out[:, 1] - out[:, 0]).numpy()
    measured = run.history[-1]
    assert measured["auc"] == pytest.approx(roc_auc_score(targets, logits), abs=1e-12)
    assert measured["loss"] == pytest.approx(log_loss(targets, 1 / (1 + np.exp(-logits))), abs=1e-9)
    assert "accuracy" not in measured, "no threshold is learned"
    assert {"auc_within", "loss_worst"} <= measured.keys()
    assert measured.keys() - {"round", "steps", "samples", "bytes_up", "bytes_down", *TIMES} <= set(MEASURES)


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "hinge"}, r"The form of the auc problem must be 'square' or 'margin'\. Got 'hinge'\."),
        ({"form": None}, r"The form of the auc problem must be"),
        ({"margin": 2.0}, r"The margin of the auc problem applies only with form = 'margin'\."),
        *(
            ({"form": "margin", "margin": bad}, r"The margin of the auc problem must be a number above 0\. Got")
            for bad in (0, -1.0, math.inf, math.nan, True, "1")
        ),
        *(
            (
                {"p": bad},
                r"The p of the auc problem must be a number above 0 and below 1, or left",
            )
            for bad in (-0.1, 1.1, math.nan, True, "0.5")
        ),
        ({"score": "softmax"}, r"The score of the auc problem must be 'sigmoid' or 'none'\. Got 'softmax'\."),
        ({"scale_dual": 1}, r"The scale_dual of the auc problem must be true or false\. Got 1\."),
        ({"batchnorm": "keep"}, r"The batchnorm of the auc problem must be"),
    ],
    ids=str,
)
def test_a_bad_auc_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.auc(model(), **options)


RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(6, 3))


@pytest.mark.parametrize(
    ("outputs", "inputs", "targets", "classes", "message"),
    [
        (1, INPUTS, np.arange(6) % 3, None, r"needs two classes, 0 and 1\. Got 3 \(arrays\)"),
        (3, INPUTS, np.arange(6) % 3, None, "needs two classes, 0 and 1"),
        (1, INPUTS, RNG.normal(size=6), None, "targets of the auc problem must be one integer per sample, 0 or 1"),
        (1, INPUTS, np.zeros(6, dtype=int), None, "needs two classes, 0 and 1"),
        (
            3,
            INPUTS,
            np.arange(6) % 2,
            None,
            r"output of the model Linear must be one logit per sample, or two, for auc",
        ),
        (1, INPUTS[:, :2], np.arange(6) % 2, None, "cannot take inputs of shape"),
        (1, INPUTS, np.arange(6) % 2 * 2 - 1, None, "labels of the auc problem must be 0 and 1. Got '-1 to 1"),
        (1, INPUTS, np.arange(6) % 3, 2, "labels of the auc problem must be 0 and 1. Got '0 to 2"),
    ],
    ids=["three classes", "three of both", "regression", "one class", "three outputs", "inputs", "-1 and 1", "label 2"],
)
@pytest.mark.parametrize("p", [None, 0.5])
def test_data_that_do_not_fit_are_refused(
    outputs: int, inputs: Any, targets: Any, classes: int | None, message: str, p: float | None
) -> None:
    data = fs.FederatedData.from_arrays([(inputs, targets)] * 2, name="arrays")
    data = data if classes is None else replace(data, classes=classes)  # as a node may count too few
    with pytest.raises(fs.InputError, match=message):
        fs.train(fs.auc(model(outputs), p=p), data, fs.LocalSGDA(), rounds=1)


def test_nothing_can_be_computed_before_p_is_known() -> None:
    problem, data = fs.auc(model()), binary(EQUAL)
    assert problem.best_y is None
    with pytest.raises(
        fs.InputError, match=r"does not know the fraction of positives yet: fs.train asks the clients; otherwise"
    ):
        objective(problem, data, problem.x0, problem.y0)


def test_a_configuration_file_gives_the_model_one_output() -> None:
    tables = {
        "data": {"name": "digits", "imbalance": 0.2, "clients": 3},
        "model": {"name": "logreg"},
        "problem": {"name": "auc", "form": "margin", "margin": 0.5},
        "algorithm": {"name": "coda"},
    }
    experiment = build.Experiment(config.parse(tables, "here"))
    assert len(experiment.problem.x0) == 64 + 1 + 2
    assert experiment.problem.options["margin"] == 0.5
    with pytest.raises(fs.InputError, match="Unknown option of the auc problem 'model'"):
        build.Experiment(config.parse({**tables, "problem": {"name": "auc", "model": 1}}, "here"))

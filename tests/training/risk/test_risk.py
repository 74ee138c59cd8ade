"""Risks and decisions from counts of scores, against scikit-learn on the pooled scores and plain counting."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.special import expit
from sklearn.calibration import _SigmoidCalibration
from sklearn.isotonic import IsotonicRegression

import fedstrata as fs
from fedstrata.clients.channel import PLAIN
from fedstrata.clients.client import Client
from fedstrata.data.part import Part
from fedstrata.training.risk.calibration import Calibration, calibrate
from fedstrata.training.risk.score_counts import ScoreCounts, count_scores
from fedstrata.training.risk.thresholds import Share, choose_threshold
from fedstrata.training.settings import Settings
from fedstrata.training.train import make_clients

SIZES = (400, 150, 60)


def world(sizes: tuple[int, ...] = SIZES) -> tuple[fs.Problem, fs.FederatedData, torch.Tensor]:
    """A linear model of clients whose rows it does not predict well."""
    rng = np.random.default_rng(0)
    total = sum(sizes)
    inputs = torch.from_numpy(rng.normal(size=(total, 3)).astype(np.float32))
    logit = 0.7 * inputs.sum(1).numpy() - 1.5
    targets = torch.from_numpy((rng.random(total) < expit(logit)).astype(np.int64))
    ends = np.cumsum(sizes)
    owned = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    data = fs.FederatedData(Part.of((inputs, targets), owned), classes=2, name="world")
    problem = fs.erm(fs.models.model("logreg", (3,), outputs=1), "binary_cross_entropy")
    x = problem.x0.clone()
    x[:3], x[3] = 2.0, 1.0
    return problem, data, x


def told(minimum: int = 1, held_out: bool = False, data: fs.FederatedData | None = None) -> ScoreCounts:
    problem, all_data, x = world()
    clients = make_clients(problem, all_data if data is None else data, Settings(rounds=1, channel=PLAIN))
    clients.begin(-1)
    with torch.no_grad():
        monkey = pytest.MonkeyPatch()
        monkey.setattr(Client, "minimum", minimum)
        try:
            return count_scores(clients, x, held_out)
        finally:
            monkey.undo()


def pooled_scores() -> tuple[np.ndarray, np.ndarray]:
    problem, data, x = world()
    inputs, targets = data.train.arrays
    return problem.predict(x, inputs).double().numpy()[:, 0], targets.numpy()


def test_counts_are_those_of_the_pooled_rows() -> None:
    counts, (scores, targets) = told(), pooled_scores()
    assert counts.counts.shape[0] == len(SIZES)
    assert counts.counts.sum((1, 2)).tolist() == list(SIZES)
    edges = [-np.inf, *counts.edges, np.inf]
    for c in (0, 1):
        np.testing.assert_array_equal(
            counts.together[c], np.histogram(-scores[targets == c], -np.array(edges[::-1]))[0][::-1]
        )


def test_no_count_below_the_minimum_is_told() -> None:
    counts = told(minimum=10).counts
    assert ((counts == 0) | (counts >= 10)).all()


def test_platt_equals_that_of_scikit_learn() -> None:
    scores, targets = pooled_scores()
    curve = _SigmoidCalibration().fit(scores, targets)
    ours, theirs = calibrate(told(), "platt")(scores), curve.predict(scores)
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    assert abs(ours.mean() - targets.mean()) < 2e-3


def test_isotonic_equals_that_of_scikit_learn() -> None:
    scores, targets = pooled_scores()
    fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scores, targets)
    ours, theirs = calibrate(told(), "isotonic")(scores), fitted.predict(scores)
    brier = [float(((risks - targets) ** 2).mean()) for risks in (ours, theirs)]
    assert abs(brier[0] - brier[1]) < 1e-3


def test_without_calibration_a_score_is_a_logit() -> None:
    np.testing.assert_allclose(calibrate(told(), "none")(np.array([-1.0, 0.0])), expit([-1.0, 0.0]))


@pytest.mark.parametrize("method", ["none", "platt", "isotonic"])
def test_a_calibration_survives_json(method: str) -> None:
    one = calibrate(told(), method)
    assert Calibration.from_table(json.loads(json.dumps(one.to_table())), "here") == one


@pytest.mark.parametrize(
    "table", [3, {}, {"method": "oracle"}, {"method": "isotonic"}, {"method": "platt", "slope": float("nan")},
              {"method": "isotonic", "scores": [1.0], "risks": []}, {"method": "platt", "scores": [1], "risks": ["a"]}]
)  # fmt: skip
def test_a_damaged_calibration_is_refused(table: object) -> None:
    with pytest.raises(fs.InputError, match="The calibration"):
        Calibration.from_table(table, "here")


@pytest.mark.parametrize(
    ("goal", "wanted"), [("sensitivity", 0.9), ("specificity", 0.8), ("ppv", 0.5), ("alerts", 20.0)]
)
def test_a_threshold_reaches_its_goal(goal: str, wanted: float) -> None:
    scores, targets = pooled_scores()
    threshold = choose_threshold(told(), goal, wanted)
    alerts = scores > threshold.score
    now = threshold.together
    assert now.sensitivity.value == pytest.approx(alerts[targets == 1].mean())
    assert now.specificity.value == pytest.approx((~alerts)[targets == 0].mean())
    assert now.ppv.value == pytest.approx(targets[alerts].mean())
    rate = now.alert_rate.value
    assert rate == pytest.approx(alerts.mean())
    reached = {"sensitivity": now.sensitivity.value, "specificity": now.specificity.value, "ppv": now.ppv.value}
    assert 100 * rate <= wanted if goal == "alerts" else reached[goal] >= wanted
    rows = threshold.rows(["a", "b", "c"])
    assert [row["site"] for row in rows] == ["together", "a", "b", "c"]
    assert sum(row["rows"] for row in rows[1:]) == rows[0]["rows"] == sum(SIZES)


def test_a_goal_that_cannot_be_reached_says_what_can() -> None:
    with pytest.raises(fs.InputError, match=r"No threshold reaches ppv 1.1; the highest ppv here is"):
        choose_threshold(told(), "ppv", 1.1)


def test_intervals_of_shares() -> None:
    low, high = Share(9, 10).bounds  # Wilson 1927
    assert (low, high) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert Share(0, 0).value is None


def test_one_class_is_an_error() -> None:
    data = world()[1].only(np.array([0]))
    rows = data.train.rows[data.train.arrays[1][data.train.rows] == 0]
    only = fs.FederatedData(Part.of(data.train.arrays, [rows.numpy()]), classes=2, name="one")
    with pytest.raises(fs.InputError, match="needs rows of both classes"):
        calibrate(told(data=only), "platt")

"""Targets that are class numbers, as integers or floats, and targets that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.data import intake
from fedstrata.data.batch import Arrays
from fedstrata.experiments import config
from fedstrata.experiments.build import build_data, build_model
from fedstrata.training.metrics.catalogue import TIMES

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
Y = (X[:, 0] + 0.3 * RNG.normal(size=60) > 0).astype(float)
"""Binary labels as a CSV file has them: 0.0 and 1.0."""


def sites(targets: Any, **options: Any) -> fs.FederatedData:
    return fs.FederatedData.from_arrays([(X[k::3], targets[k::3]) for k in range(3)], test=(X, targets), **options)


def linear(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, outputs, dtype=torch.float64)


def trained(problem: fs.Problem, data: fs.FederatedData, algorithm: fs.Algorithm | None = None) -> dict[str, Any]:
    return fs.train(problem, data, algorithm or fs.FedAvg(lr=0.3), rounds=5, batch_size=8).history[-1]


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss of torch, which takes floats."""
    return F.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")


@pytest.mark.parametrize(
    ("loss", "outputs"), [("binary_cross_entropy", 1), ("cross_entropy", 2), (own_loss, 1)], ids=["one", "two", "own"]
)
def test_float_labels_have_accuracy_and_auc(loss: Any, outputs: int) -> None:
    assert sites(Y).classes == 2
    row = trained(fs.erm(linear(outputs), loss), sites(Y))
    assert row["accuracy"] > 0.6 and row["auc"] > 0.8 and row["auc_worst"] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "cross_entropy"])
def test_float_labels_give_the_numbers_of_integers(loss: str) -> None:
    problem = fs.erm(linear(1 if loss.startswith("binary") else 2), loss)
    one, two = (trained(problem, sites(targets)) for targets in (Y, Y.astype(int)))
    assert {k: v for k, v in one.items() if k not in TIMES} == {k: v for k, v in two.items() if k not in TIMES}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "algorithm"),
    [
        (lambda: fs.auc(linear(1)), fs.FGDA(steps=3)),
        (lambda: fs.compositional_auc(linear(2), levels=1), fs.LocalSCGDAM(steps=3)),
        (lambda: fs.fair(linear(2), classes=2), fs.LocalSGDA(steps=3)),
    ],
    ids=["auc", "compositional_auc", "fair"],
)
def test_problems_of_classes_take_float_labels(problem: Any, algorithm: fs.Algorithm) -> None:
    one, two = (trained(problem(), sites(targets), algorithm) for targets in (Y, Y.astype(int)))
    assert one["auc"] == two["auc"] and one["loss"] == two["loss"]


@pytest.mark.parametrize("sampling", ["stratified", "balanced"])
def test_float_labels_can_be_sampled_by_class(sampling: Any) -> None:
    runs = [
        fs.train(fs.erm(linear(2)), sites(t), fs.FedAvg(), rounds=2, batch_size=8, sampling=sampling)
        for t in (Y, Y.astype(int))
    ]
    assert torch.equal(runs[0].x, runs[1].x)


def test_float_labels_can_be_split_by_class() -> None:
    by_float, by_int = (
        fs.Dataset.from_arrays(X, t).split("dominant", clients=4, holdout=0.2) for t in (Y, Y.astype(int))
    )
    assert by_float.classes == 2 and torch.equal(by_float.train.rows, by_int.train.rows)
    with_server = fs.Dataset.from_arrays(X, Y).split("iid", clients=2, auxiliary=3)
    assert with_server.auxiliary is not None and with_server.auxiliary.class_counts.tolist() == [[3, 0], [0, 3]]


# --- regression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [np.arange(60) % 5 * 1.0, Y / 2, Y - 1, np.stack([Y, Y], 1), 0 * Y, 0 * Y + 1])
def test_other_floats_are_regression(targets: np.ndarray) -> None:
    assert sites(targets).classes == 0
    assert fs.Dataset.from_arrays(X, targets).classes == 0


def test_regression_on_zeros_and_ones_stays_regression() -> None:
    row = trained(fs.erm(linear(1), "squared"), sites(Y))
    assert row["loss"] < 0.25 and "accuracy" not in row
    row = trained(fs.erm(linear(1), "squared"), sites(Y, classes=0))
    assert row["loss"] < 0.25 and not {"accuracy", "auc"} & set(row)


def test_soft_labels_are_not_classes() -> None:
    assert sites(0.1 + 0.8 * Y).classes == 0
    assert "auc" not in trained(fs.erm(linear(1), "binary_cross_entropy"), sites(0.1 + 0.8 * Y))


@pytest.mark.parametrize("loss", ["squared", "binary_cross_entropy", "cross_entropy"])
def test_a_model_of_a_file_has_the_outputs_of_its_loss(tmp_path: Path, loss: str) -> None:
    for k in range(2):
        np.savez(tmp_path / f"{k}.npz", inputs=X[k::2], targets=Y[k::2])
    tables = {"data": {"folder": str(tmp_path)}, "problem": {"name": "erm", "loss": loss}, "model": {"name": "logreg"}}
    parsed = config.parse(tables, "here")
    model = build_model(parsed, build_data(parsed))
    assert model(torch.ones(2, 3)).shape == (2, 2 if loss == "cross_entropy" else 1)


# --- declared classes ------------------------------------------------------------------------------------------------


def test_declared_classes_may_be_whole_floats() -> None:
    targets = np.arange(60) % 3 * 1.0
    with pytest.raises(
        fs.InputError, match=r"targets of cross_entropy must be one class number .* with classes= given for the data"
    ):
        trained(fs.erm(linear(3)), sites(targets))
    data = sites(targets, classes=3)
    assert data.classes == 3 and data.train.arrays[1].dtype == torch.int64
    assert data.test is not None and data.test[1].dtype == torch.int64
    assert "accuracy" in trained(fs.erm(linear(3)), data)
    whole = fs.Dataset.from_arrays(X, targets, test=(X, targets), classes=3)
    assert whole.classes == 3 and whole.targets.dtype == whole.test_targets.dtype == torch.int64
    assert fs.FederatedData.from_datasets([list(zip(X, targets, strict=True))], classes=3).classes == 3


@pytest.mark.parametrize(
    "targets",
    [Y + 0.5, Y - 1, Y + 2, Y.astype(int) - 1, Y.astype(np.int16) + 2, Y.astype(np.uint8) + 2],
    ids=["halves", "below", "above", "integers below", "integers above", "bytes above"],
)
def test_numbers_that_are_not_the_declared_classes_are_refused(targets: np.ndarray) -> None:
    for build in (sites, lambda t, classes: fs.Dataset.from_arrays(X, t, classes=classes)):
        with pytest.raises(
            fs.InputError, match=r"The targets of .* must be whole numbers from 0 to 1, because classes=2"
        ):
            build(targets, classes=2)


@pytest.mark.parametrize("classes", [-3, 2.0, True, "2"])
def test_a_number_of_classes_that_is_none_is_refused(classes: Any) -> None:
    message = r"The classes of the data.* must be a whole number of at least 0, where 0 means regression\. Got "
    for build in (sites, lambda t, classes: fs.Dataset.from_arrays(X, t, classes=classes)):
        with pytest.raises(fs.InputError, match=message):
            build(Y, classes=classes)


def test_integers_may_be_below_zero_unless_classes_are_declared() -> None:
    targets = Y.astype(int) * 2 - 1
    assert sites(targets).classes == fs.Dataset.from_arrays(X, targets).classes == 2
    assert sites(targets, classes=0).classes == 0


def test_rows_of_a_data_set_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[str] = []
    original = intake.checked

    def counted(arrays: Any, what: str, *rest: Any, **options: Any) -> Arrays:
        checks.append(what)
        return original(arrays, what, *rest, **options)

    monkeypatch.setattr(intake, "checked", counted)
    whole = fs.Dataset.from_arrays(X, np.arange(60) % 3, test=(X, np.arange(60) % 3), name="mine")
    whole.subset(50).imbalance(0.2).split("iid", clients=2, holdout=0.2)
    assert checks == ["the data set mine", "the test part of mine"]


def test_a_folder_with_float_labels(tmp_path: Path) -> None:
    targets = np.arange(60) % 3 * 1.0
    np.savez(tmp_path / "a.npz", inputs=X, targets=targets, test_inputs=X, test_targets=targets)
    assert fs.FederatedData.from_folder(tmp_path).classes == 0
    assert fs.FederatedData.from_folder(tmp_path, classes=3).classes == 3
    np.savez(tmp_path / "a.npz", inputs=X, targets=Y)
    assert fs.FederatedData.from_folder(tmp_path).classes == 2

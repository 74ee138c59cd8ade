"""A scikit-learn classifier that is trained in a simulated federation: ``fit``, ``predict_proba`` and so on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedstrata.algorithms.algorithm import ALGORITHMS, algorithm
from fedstrata.core.errors import InputError
from fedstrata.core.options import options_of
from fedstrata.data.federated import FederatedData
from fedstrata.data.part import Part
from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.preparation import Plan, Preparation
from fedstrata.data.tables.schema import Schema
from fedstrata.models import zoo
from fedstrata.problems.auc import auc
from fedstrata.problems.erm import erm
from fedstrata.problems.problem import Problem
from fedstrata.training.settings import Settings
from fedstrata.training.train import train


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier trained across sites without pooling their rows: ``fit(X, y, sites=hospital)``.

    Columns are standardised by statistics that the sites tell, and missing values filled by the mean.

    algorithm: the name of a federated algorithm; ``options`` are its hyperparameters.
    problem:   "erm" (cross-entropy), or with two classes "auc" (ranking).
    model:     the name of a model, e.g. "logreg" or "mlp"; ``model_options`` are its options.
    rounds, batch_size: how long to train, and samples per site and step.
    minimum:   the smallest number of rows that a site tells statistics of.
    random_state: the seed.
    """

    def __init__(
        self,
        algorithm: str = "fedavg",
        options: Mapping[str, Any] | None = None,
        *,
        problem: str = "erm",
        model: str = "logreg",
        model_options: Mapping[str, Any] | None = None,
        rounds: int = 100,
        batch_size: int = 32,
        minimum: int = 1,
        random_state: int = 0,
    ) -> None:
        self.algorithm = algorithm
        self.options = options
        self.problem = problem
        self.model = model
        self.model_options = model_options
        self.rounds = rounds
        self.batch_size = batch_size
        self.minimum = minimum
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sites: Any = None) -> FederatedClassifier:  # noqa: N803
        """Train on rows X with classes y; ``sites`` names the site of each row, by default a single one."""
        X, y = validate_data(self, X, y, ensure_all_finite="allow-nan", dtype=np.float64)  # noqa: N806
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"Classifier needs two classes; y has one class, {self.classes_[0]!r}.")
        names, owner = np.unique(self._sites(sites, len(X)), return_inverse=True)
        columns = [Column(name=f"x{i}", missing="mean") for i in range(X.shape[1])]
        target = Target(name="y", kind="category", classes=[str(c) for c in range(len(self.classes_))])
        plan = Plan(Schema(target=target, columns=columns), Preparation(minimum=self.minimum))
        arrays = torch.from_numpy(np.array(X, order="C")), torch.from_numpy(labels.astype(np.int64))
        owned = [np.flatnonzero(owner == k) for k in range(len(names))]
        data = FederatedData(Part.of(arrays, owned), classes=len(self.classes_), name="X", plan=plan)
        built = self._problem(data)
        chosen = algorithm(self.algorithm, self._options())
        settings = Settings(rounds=self.rounds, batch_size=self.batch_size, seed=self.random_state, threads=1)
        run = train(built, data, chosen, settings=settings.replace(eval_every=self.rounds))
        self.sites_, self.history_, self.summary_ = names, run.history, run.summary
        self.predictor_ = run.predictor()
        return self

    def _sites(self, sites: Any, rows: int) -> np.ndarray:
        if sites is None:
            return np.zeros(rows, np.int64)
        owners: np.ndarray = column_or_1d(sites)
        if len(owners) != rows:
            raise ValueError(f"sites must name the site of each row: {rows} entries. Got {len(owners)}.")
        return owners

    def _options(self) -> dict[str, Any]:
        """Return the hyperparameters, with a learning rate that suits standardised columns."""
        declared = options_of(ALGORITHMS.find(self.algorithm))
        usual = {"lr": 0.3, "steps": 5} if self.problem == "erm" else {"steps": 5}
        return {k: v for k, v in usual.items() if k in declared} | dict(self.options or {})

    def _problem(self, data: FederatedData) -> Problem:
        two = len(self.classes_) == 2
        options = dict(self.model_options or {})
        net = zoo.model(self.model, data.shape, 1 if two else len(self.classes_), seed=self.random_state, **options)
        if self.problem == "auc" and two:
            return auc(net, score="none")
        if self.problem != "erm":
            raise InputError(f"The problem must be 'erm', or with two classes 'auc'. Got {self.problem!r}.")
        return erm(net, "binary_cross_entropy" if two else "cross_entropy")

    def decision_function(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the score of each row, or with more than two classes a score for each class."""
        outputs = self._outputs(X)
        scores: np.ndarray = outputs[:, 0] if outputs.shape[1] == 1 else outputs
        return scores

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the probability of each class: calibrated, if the model only ranks."""
        outputs = self._outputs(X)
        if outputs.shape[1] > 1:
            shifted = np.exp(outputs - outputs.max(1, keepdims=True))
            return np.asarray(shifted / shifted.sum(1, keepdims=True))
        calibration = self.predictor_.calibration
        if calibration is None:
            raise InputError("The scores of this model are not probabilities: they could not be calibrated.")
        risks = calibration(outputs[:, 0])
        return np.stack([1 - risks, risks], axis=1)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most probable class of each row."""
        check_is_fitted(self)
        return np.asarray(self.classes_[self.predict_proba(X).argmax(1)])

    @torch.no_grad()
    def _outputs(self, X: Any) -> np.ndarray:  # noqa: N803
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, ensure_all_finite="allow-nan", dtype=np.float64)  # noqa: N806
        module = self.predictor_.module
        prepared = module.prepare(torch.from_numpy(np.array(X, order="C"))).to(module.dtype)
        return np.asarray(self.predictor_.model(prepared).double().numpy())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

"""The evaluation of a model: loss, accuracy and AUC, pooled, over clients and after adapting to each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch

from fedstrata.core import rng
from fedstrata.core.errors import InputError
from fedstrata.core.options import Options, param
from fedstrata.data.federated import FederatedData, Part
from fedstrata.problems.adversarial import perturbed
from fedstrata.problems.erm import scores
from fedstrata.problems.problem import Arrays, Problem
from fedstrata.problems.projections import ball
from fedstrata.training.metrics.adaptation import Personal, adapted_point
from fedstrata.training.metrics.attack import worst_perturbation
from fedstrata.training.metrics.catalogue import MEASURES as MEASURES
from fedstrata.training.metrics.catalogue import PER_CLIENT
from fedstrata.training.metrics.measures import (
    Measures,
    classifies,
    correct,
    distances,
    has_auc,
    pairs_of,
    pooled_measures,
    predict,
)
from fedstrata.training.metrics.objective import gradient_norm as gradient_norm
from fedstrata.training.metrics.objective import objective as objective
from fedstrata.training.metrics.of_clients import OfClients, measured_alone

Evaluate = Callable[[Problem, FederatedData, torch.Tensor, torch.Tensor | None], Measures]
"""A function that measures a model: ``(problem, data, x, y) -> {name: number}``."""


@runtime_checkable
class Evaluator(Protocol):
    """Measures a model, and says in the summary of a run which data it used; a plain function only measures."""

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at ``x`` (and ``y``)."""

    def about(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> dict[str, Any]:
        """Return ``measured_on``, the data used, and ``per_client``, the measures of each client at x (and y)."""


class Evaluation(Options, owner="the evaluation"):
    """How to measure a model.

    Pooled measures are ``loss``, with classes ``accuracy`` and ``accuracy_worst_class``, and with two classes ``auc``.
    They use the pooled test set if there is one, else the clients' held-out data, else the training data. Measures over
    clients are ``loss_mean``, ``loss_worst``, ``loss_spread`` (standard deviation), ``accuracy_mean``,
    ``accuracy_worst``, ``accuracy_spread``, ``auc_within``, ``auc_mean`` and ``auc_worst``. For a problem without a
    model, ``loss`` is its objective, on the clients' held-out data if all have some, else on the training data.

    A few rows say little about a client. One with fewer than ``own_rows`` rows cannot have the worst accuracy, and one
    with fewer of either class has no AUC of its own, so it is not in ``auc_mean`` and ``auc_worst``; ``per_client`` of
    a summary has None for it. A loss counts in any case, since objectives are about it. ``auc_within`` uses all clients
    with both classes: of all pairs of a positive and a negative of the same client, it is the share in the right order,
    with ties counted half.

    With more than ``sample`` clients, that many of them are measured, chosen at random but always the same; ``loss`` of
    a problem without a model, ``objective`` and ``gradient_norm`` use all clients.

    If the model is adapted, ``personal_loss`` and ``personal_accuracy`` (``_mean``, ``_worst``, ``_spread``) are
    measured on the same data with each client's own model: full-batch steps x <- x - lr grad(mean loss) on the rows
    that the client's inner level draws from (its support rows, if any). They are NaN if an adapted model is not finite.
    With a global inner mean, the adapted models are averaged into one (uniformly, whatever the weighting of the run),
    measured on the pooled data: ``adapted_loss``, ``adapted_accuracy`` and ``adapted_auc``.

    Under attack, ``attacked_loss``, ``attacked_accuracy`` and ``attacked_auc`` are measured on the pooled data, with
    the worst perturbation found on them. If the solution is known, ``distance`` is that of (x, y) from it and
    ``distance_dual`` that of y.
    """

    words: ClassVar[str] = "an Evaluation, e.g. fs.Evaluation(clients='none')"
    clients: Literal["auto", "test", "train", "none"] = param(
        "auto",
        "data to measure each client on; auto is the held-out parts if there are any, else the training data",
    )
    adapt_steps: int | None = param(
        None,
        "gradient steps that adapt the model to each client for the personal measures; by default the problem's",
        least=0,
    )
    adapt_lr: float | None = param(None, "learning rate of the adaptation; by default the problem's", above=0)
    adapt_rows: int | None = param(None, "largest number of rows that a client adapts on; by default all", least=1)
    stationarity: bool = param(False, "also measure objective and gradient_norm on all training data")
    attack_radius: float | None = param(
        None,
        "also measure under the worst shared perturbation of this norm; by default the problem's",
        above=0,
    )
    attack_steps: int = param(10, "gradient steps to find the worst perturbation", least=0)
    own_rows: int = param(
        5,
        "smallest number of rows with which a client can have the worst accuracy, and of each class for its own AUC",
        least=1,
    )
    sample: int = param(
        1000,
        "largest number of clients to measure; with more, that many are chosen at random, always the same",
        least=1,
    )

    def __call__(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures at ``x`` (and ``y``)."""
        measures: Measures = {}
        self.adaptation(problem)
        if problem.predict is None or problem.losses is None:
            measures["loss"] = objective(problem, data, x, y)
        else:
            measures |= self._of_model(problem, data.only(self.measured(data)) if self.samples(data) else data, x, y)
        if problem.known is not None:
            measures |= distances(problem.known, x, y)
        if self.stationarity:
            measures["objective"] = objective(problem, data, x, y, training=True)
            measures["gradient_norm"] = gradient_norm(problem, data, x, y)
        return measures

    def _of_model(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> Measures:
        """Return the measures of the model, pooled and over clients."""
        arrays, part = pooled(data), self.part(data)
        outputs = predict(problem, x, arrays)
        measures = pooled_measures(problem, data.classes, *outputs)
        measures |= self._attacked(problem, data.classes, x, y, arrays)
        measures |= self._adapted(problem, data, x, arrays)
        same = data.test is None and part is _pooled_part(data)
        clients = self._of_clients(problem, data, x, outputs if same else None)
        return measures if clients is None else measures | clients.over(self.own_rows)

    def samples(self, data: FederatedData) -> bool:
        """Whether only some of the clients are measured."""
        return data.clients > self.sample

    def measured(self, data: FederatedData) -> np.ndarray:
        """Return the numbers of the clients that are measured."""
        if not self.samples(data):
            return np.arange(data.clients)
        return rng.choose(rng.key_of("evaluation"), data.clients, self.sample)

    def about(self, problem: Problem, data: FederatedData, x: torch.Tensor, y: torch.Tensor | None) -> dict[str, Any]:
        """Return which data the measures use, and the measures of each client at ``x``.

        ``per_client`` also has the number of its pairs of a positive and a negative, on which ``auc_within`` rests. If
        only some clients are measured, ``measured_clients`` has their numbers.
        """
        chosen = self.measured(data)
        clients = self._of_clients(problem, data.only(chosen) if self.samples(data) else data, x)
        own = {} if clients is None else clients.own(self.own_rows)
        each: dict[str, list[Any]] = {n: [None if v != v else float(v) for v in values] for n, values in own.items()}
        on = measured_on(problem, data, self) | measured_alone(each)
        if clients is not None and clients.pairs is not None:
            each["pairs"] = [int(n) for n in clients.pairs.counts]
        who = {"measured_clients": chosen.tolist()} if self.samples(data) else {}
        return {"measured_on": on, "per_client": each, **who}

    def _attacked(
        self, problem: Problem, classes: int, x: torch.Tensor, y: torch.Tensor | None, arrays: Arrays
    ) -> Measures:
        """Return the pooled measures under the worst perturbation."""
        if not self.attacks(problem, arrays):
            return {}
        project = problem.projected if self.attack_radius is None else ball(self.attack_radius)
        inputs, targets = arrays
        start = x.new_zeros(inputs[0].numel()) if y is None or not problem.perturbs else project(y)
        worst = worst_perturbation(problem, x, start, project, arrays, self.attack_steps)
        measures = pooled_measures(problem, classes, *predict(problem, x, (perturbed(inputs, worst), targets)))
        return {f"attacked_{name}": value for name, value in measures.items() if name in PER_CLIENT}

    def _adapted(self, problem: Problem, data: FederatedData, x: torch.Tensor, arrays: Arrays) -> Measures:
        """Return the pooled measures of the mean of the clients' adapted models, for a global inner mean."""
        adaptation = self.adaptation(problem)
        if adaptation is None or not _shared(problem):
            return {}
        point = adapted_point(problem, data, x, *adaptation, self.adapt_rows)
        measures = pooled_measures(problem, data.classes, *predict(problem, point, arrays))
        names = PER_CLIENT if math.isfinite(measures["loss"]) else ()
        return {f"adapted_{name}": value for name, value in measures.items() if name in names}

    def per_client(self, problem: Problem, data: FederatedData, x: torch.Tensor) -> dict[str, np.ndarray]:
        """Return ``loss``, ``accuracy`` and ``auc`` of each client; NaN if it has too few samples to measure on.

        If the model is adapted, also ``personal_loss`` and ``personal_accuracy``.
        """
        clients = self._of_clients(problem, data, x)
        return {} if clients is None else clients.own(self.own_rows)

    def _of_clients(
        self, problem: Problem, data: FederatedData, x: torch.Tensor, predicted: Arrays | None = None
    ) -> OfClients | None:
        """Return the measures of each client; None if there is nothing to measure them on.

        ``predicted`` has the outputs and targets of all samples of the clients, if they are known.
        """
        part = self.part(data)
        if part is None or problem.predict is None or problem.losses is None or not part.sizes.any():
            return None
        outputs, targets = predict(problem, x, _rows_of(part)) if predicted is None else predicted
        means = _means(part.sizes)
        measures = {"loss": means(problem.losses(outputs, targets))}
        if classifies(problem, outputs, data.classes):
            measures["accuracy"] = means(correct(outputs, targets))
        pairs = None
        if has_auc(outputs, data.classes):
            pairs = pairs_of(scores(outputs).cpu().numpy(), targets.cpu().numpy(), part.sizes)
        measures |= self._personal(problem, data, x, part, "accuracy" in measures)
        return OfClients(measures, part.sizes, pairs)

    def _personal(
        self, problem: Problem, data: FederatedData, x: torch.Tensor, part: Part, classified: bool
    ) -> dict[str, np.ndarray]:
        adaptation = self.adaptation(problem)
        if adaptation is None or _shared(problem) or data.one_place:
            return {}
        assert problem.losses is not None
        losses, accuracies = (np.full(len(part.sizes), np.nan) for _ in range(2))
        personal = Personal(problem, data, x, *adaptation, self.adapt_rows)
        for adapted, own in personal.models(np.flatnonzero(part.sizes)):
            for clients, (outputs, targets) in personal.outputs(adapted, own, part):
                means = _means(part.sizes[clients])
                losses[clients] = means(problem.losses(outputs, targets))
                if classified:
                    accuracies[clients] = means(correct(outputs, targets))
        losses[~np.isfinite(losses)] = np.nan
        accuracies[np.isnan(losses)] = np.nan
        return {"personal_loss": losses} | ({"personal_accuracy": accuracies} if classified else {})

    def adaptation(self, problem: Problem) -> tuple[int, float] | None:
        """Return the steps and the rate that adapt the model to a client; None if it is not adapted."""
        given = [n for n in ("adapt_steps", "adapt_lr", "adapt_rows") if getattr(self, n) is not None]
        if self.adapt_steps == 0:
            return None
        if given and problem.predict is None:
            raise InputError(f"The problem {problem.name} has no model to adapt: leave out {', '.join(given)}.")
        steps, lr = problem.adapt or (None, None)
        steps = steps if self.adapt_steps is None else self.adapt_steps
        lr = lr if self.adapt_lr is None else self.adapt_lr
        if steps is not None and lr is not None:
            return (steps, lr) if steps else None
        if given:
            raise InputError(
                f"To adapt a model of the problem {problem.name} to each client, the evaluation needs adapt_steps and "
                f"adapt_lr. Got only {' and '.join(given)}."
            )
        return None

    def attacks(self, problem: Problem, arrays: Arrays) -> bool:
        """Whether the model is also measured under attack, on samples like those of ``arrays``."""
        if self.attack_radius is None and not problem.perturbs:
            return False
        if problem.predict is None:
            raise InputError(f"The problem {problem.name} has no model to attack: leave out attack_radius.")
        if len(arrays) > 2:
            raise InputError("Samples with several inputs cannot be perturbed: leave out attack_radius.")
        if not arrays[0].is_floating_point():
            raise InputError("Integer inputs cannot be perturbed: leave out attack_radius of the evaluation.")
        return True

    def part(self, data: FederatedData) -> Part | None:
        """Return the clients' data that the per-client measures use; of data in one place, those of each client."""
        data = data.separate or data
        if self.clients == "test" and data.client_test is None:
            raise InputError("Clients have no held-out test data: split with holdout > 0, or evaluate on 'train'.")
        if self.clients == "none":
            return None
        return data.train if self.clients == "train" or data.client_test is None else data.client_test


def _means(sizes: np.ndarray) -> Callable[[torch.Tensor], np.ndarray]:
    """Return a function that takes the mean of each client's values; client k has the next ``sizes[k]`` of them.

    The mean of a client without values is NaN.
    """
    owner = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.where(sizes > 0, sizes, np.nan)

    def means(values: torch.Tensor) -> np.ndarray:
        sums: np.ndarray = np.bincount(owner, weights=values.double().cpu().numpy(), minlength=len(sizes))
        return sums / counts

    return means


def _shared(problem: Problem) -> bool:
    """Whether adapted models are averaged into one for all clients."""
    return problem.adapt is not None and bool(problem.levels) and problem.inner_mean == "global"


def measured_on(problem: Problem, data: FederatedData, evaluation: Evaluation) -> dict[str, str]:
    """Describe the data that the measures use, and the models if there are two."""
    part = evaluation.part(data)
    clients = (
        "nothing"
        if part is None
        else "training data"
        if part is (data.separate or data).train
        else "held-out test data"
    )
    words = {"pooled": "training data" if pooled_is_training(data) else "test data", "clients": clients}
    if evaluation.samples(data) and problem.predict is not None:
        some = f" of {evaluation.sample:,} of {data.clients:,} clients"
        words = {
            name: on + some if on != "nothing" and (name == "clients" or data.test is None) else on
            for name, on in words.items()
        }
    adaptation = evaluation.adaptation(problem) if _shared(problem) else None
    if adaptation is not None:
        steps, lr = adaptation
        rows = "all" if evaluation.adapt_rows is None else f"at most {evaluation.adapt_rows}"
        mean = f"the clients' mean after {steps} gradient steps at rate {lr:g} on {rows} of their rows"
        words["model"] = f"the one at x, before the inner steps; 'adapted' is at G(x), {mean}"
    return words


def pooled_is_training(data: FederatedData) -> bool:
    """Whether pooled measures use the training data because there are no test data."""
    return data.test is None and data.client_test is None


def pooled(data: FederatedData) -> Arrays:
    """Return the pooled test set, else the clients' held-out data, else the training data."""
    if data.test is not None:
        return data.test
    return _rows_of(_pooled_part(data))


def _pooled_part(data: FederatedData) -> Part:
    return data.train if data.client_test is None else data.client_test


def _rows_of(part: Part) -> Arrays:
    return tuple(a.index_select(0, part.rows.to(a.device)) for a in part.arrays)

"""One perturbation of all inputs: training against it, and measuring a model under attack."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.problems.adversarial import perturbed
from fedstrata.problems.projections import ball
from fedstrata.training.metrics.attack import worst_perturbation
from fedstrata.training.metrics.evaluation import MEASURES, Evaluation, objective
from minimax import Duals, numeric_slopes
from support import make_client, make_setting

SHAPE = (2, 3)


def images(sizes: tuple[int, ...] = (7, 4, 9), classes: int = 3) -> fs.FederatedData:
    """Build clients with small images as inputs."""
    rng = np.random.default_rng(0)
    pairs = [(rng.normal(size=(n, *SHAPE)) + 0.5 * k, (np.arange(n) + k) % classes) for k, n in enumerate(sizes)]
    return fs.FederatedData.from_arrays(pairs, classes=classes, name="images")


def model(outputs: int = 3) -> nn.Module:
    """A small network with random weights, always the same."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in network.parameters():
            weights.copy_(torch.randn(weights.shape, generator=rng, dtype=torch.float64))
    return network


DATA = images()
LOSSES = [("cross_entropy", 3, 3), ("binary_cross_entropy", 1, 2), ("squared", 1, 3)]


# --- the objective ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "outputs", "classes"), LOSSES)
@pytest.mark.parametrize("sampling", ["uniform", "balanced"])
def test_it_is_ordinary_learning_on_shifted_inputs(loss: str, outputs: int, classes: int, sampling: str) -> None:
    """For several clients at once, as training computes it; the gradients are those of finite differences."""
    data, plain = images(classes=classes), fs.erm(model(outputs), loss, prior=False)
    problem = fs.adversarial(model(outputs), SHAPE, loss=loss, prior=False)
    client = make_client(make_setting(problem, data, batch_size=3, sampling=sampling), [0, 2])
    batch = client.draw()
    rng = torch.Generator().manual_seed(1)
    x = problem.x0 + 0.1 * torch.randn(2, len(problem.x0), generator=rng, dtype=torch.float64)
    y = torch.randn(2, 6, generator=rng, dtype=torch.float64)
    values, found = client.loss(x, batch, y), client.f_grads(x, batch, y)
    for c in range(2):
        inputs, *rest = (a[c] for a in batch.parts[0])
        assert len(rest) == (2 if sampling == "balanced" else 1)

        def f(x: torch.Tensor, y: torch.Tensor, inputs: Any = inputs, rest: Any = rest) -> torch.Tensor:
            return plain.outer(x, (inputs + y.reshape(SHAPE), *rest))

        assert float(values[c]) == pytest.approx(float(f(x[c], y[c])), abs=1e-12)
        for ours, numeric in zip(found, numeric_slopes(f, x[c], y[c]), strict=True):
            torch.testing.assert_close(ours[c], numeric, atol=1e-8, rtol=1e-7)


def test_without_a_perturbation_it_is_ordinary_learning() -> None:
    problem, plain = fs.adversarial(model(), SHAPE, prior=False), fs.erm(model(), prior=False)
    assert problem.y0 is not None
    assert torch.equal(problem.y0, torch.zeros(6, dtype=torch.float64))
    assert (problem.name, problem.kind, problem.perturbs) == ("adversarial", "no inner level, a dual", True)
    assert objective(problem, DATA, problem.x0, problem.y0) == objective(plain, DATA, plain.x0, None)
    shifted = [(x + 0.3, t) for x, t in (DATA.train.of_client(k) for k in range(3))]
    y = torch.full((6,), 0.3, dtype=torch.float64)
    moved = objective(plain, fs.FederatedData.from_arrays(shifted), plain.x0, None)
    assert objective(problem, DATA, problem.x0, y) == pytest.approx(moved, rel=1e-12)
    assert moved != pytest.approx(objective(plain, DATA, plain.x0, None), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [fs.LocalSGDA(dual_lr=5.0, steps=3), fs.FGDA(lam=5.0, steps=3), fs.CODASCA(lr=0.5, steps=3), fs.CDMA(steps=3)],
    ids=lambda a: a.name,
)
def test_the_perturbation_stays_in_the_ball(algorithm: fs.Algorithm) -> None:
    duals = Duals()
    problem = fs.adversarial(model(), SHAPE, radius=0.3, prior=False)
    run = fs.train(problem, DATA, algorithm, rounds=6, batch_size=3, callbacks=[duals])
    norms = [float(y.norm()) for y in duals.seen]
    assert len(norms) == 6
    assert max(norms) <= 0.3 * (1 + 1e-12)
    assert max(norms) > 0.1
    assert run.y is not None and torch.equal(run.y, duals.seen[-1])
    assert run.history[-1]["attacked_loss"] >= run.history[-1]["loss"]


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (
                {"shape": bad},
                r"The shape of the adversarial problem must be ",
            )
            for bad in ((), [], (0,), (2, -3), (2.0, 3), "23", 6, None, ("2", 3))
        ),
        *(
            ({"radius": bad}, r"The radius of the adversarial problem must be a number above 0\. Got")
            for bad in (0, -1.0, math.inf, math.nan, True, "1", None)
        ),
        ({"loss": "hinge"}, "The loss of the adversarial problem must be 'cross_entropy', "),
    ],
    ids=str,
)
def test_a_bad_adversarial_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.adversarial(model(), **{"shape": SHAPE, **options}, prior=False)


class Words(nn.Module):
    """A model of rows of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.table(words).mean(1)


def words() -> fs.FederatedData:
    rng = np.random.default_rng(0)
    return fs.FederatedData.from_arrays([(rng.integers(0, 10, size=(8, 6)), np.arange(8) % 2)] * 2, name="words")


@pytest.mark.parametrize(
    ("network", "shape", "data", "message"),
    [
        (
            model(),
            (3, 2),
            DATA,
            r"must be the shape of one floating-point input\. Got .*\(3, 2\).*images have shape \(2, 3\)",
        ),
        (model(), (6,), DATA, r"Got .*\(6,\), but the inputs of images have shape \(2, 3\)"),
        (Words(), (6,), words(), "words have shape .6,. and are integers, which cannot be perturbed"),
        (model(2), SHAPE, DATA, "labels of the data must be between 0 and 1"),
    ],
    ids=["turned", "flat", "whole numbers", "too few outputs"],
)
def test_data_that_do_not_fit_are_refused(
    network: nn.Module, shape: tuple[int, ...], data: fs.FederatedData, message: str
) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.train(fs.adversarial(network, shape, prior=False), data, fs.LocalSGDA(), rounds=1)


FILE = """
[data]
name = "digits"
subset = 100
clients = 3

[model]
name = "logreg"

[problem]
name = "adversarial"
radius = 0.25
prior = false

[algorithm]
name = "local_sgda"
steps = 1

[evaluate]
attack_steps = 2
"""


def test_a_configuration_file_takes_the_shape_from_the_data() -> None:
    tables = tomllib.loads(FILE)
    experiment = build.Experiment(config.parse(tables, "here"))
    shape = tuple(experiment.data.train.arrays[0].shape[1:])
    assert experiment.problem.y0 is not None and len(experiment.problem.y0) == math.prod(shape) == 64
    assert float(experiment.problem.projected(torch.ones(64)).norm()) == pytest.approx(0.25)
    assert experiment.evaluation.attack_steps == 2
    run = fs.train(experiment.problem, experiment.data, experiment.algorithm, rounds=1, evaluate=experiment.evaluation)
    assert run.history[0]["attacked_loss"] == pytest.approx(math.log(10), rel=1e-6), "all weights are zero"
    assert run.history[1]["attacked_loss"] > run.history[1]["loss"]
    tables["problem"]["shape"] = [1, 8, 8]
    with pytest.raises(fs.InputError, match="Unknown option of the adversarial problem 'shape'"):
        build.Experiment(config.parse(tables, "here"))


# --- measured under attack -------------------------------------------------------------------------------------------


def loss_under(problem: fs.Problem, data: fs.FederatedData, y: torch.Tensor) -> float:
    """The mean loss of the model on all inputs + y."""
    assert problem.predict is not None and problem.losses is not None
    inputs, targets = data.train.arrays
    return float(problem.losses(problem.predict(problem.x0, perturbed(inputs, y)), targets).mean())


def attack(problem: fs.Problem, data: fs.FederatedData, radius: float, steps: int, start: Any = None) -> torch.Tensor:
    start = torch.zeros(data.train.arrays[0][0].numel(), dtype=torch.float64) if start is None else start
    return worst_perturbation(problem, problem.x0, start, ball(radius), data.train.arrays, steps)


@pytest.mark.parametrize("radius", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("loss", "outputs", "classes"), LOSSES)
def test_no_feasible_perturbation_that_is_tried_hurts_more(
    loss: str, outputs: int, classes: int, radius: float
) -> None:
    problem, data = fs.erm(model(outputs), loss, prior=False), images((20, 15, 25), classes)
    rng = torch.Generator().manual_seed(0)
    others = torch.randn(300, 6, generator=rng, dtype=torch.float64)
    others *= radius / others.norm(dim=1, keepdim=True)
    others[150:] *= torch.rand(150, 1, generator=rng, dtype=torch.float64)
    found = attack(problem, data, radius, 30)
    assert found.shape == (6,)
    assert float(found.norm()) <= radius * (1 + 1e-12)
    reached = loss_under(problem, data, found)
    assert reached >= max(loss_under(problem, data, y) for y in others)
    for start in (torch.zeros(6, dtype=torch.float64), found, *others[:3]):
        again = attack(problem, data, radius, 3, start)
        assert float(again.norm()) <= radius * (1 + 1e-12)
        assert loss_under(problem, data, again) >= loss_under(problem, data, start)
    losses = [loss_under(problem, data, attack(problem, data, radius, steps)) for steps in (0, 1, 3, 10, 30)]
    assert losses == sorted(losses), "more steps never give a weaker attack"
    assert losses[0] == loss_under(problem, data, torch.zeros(6, dtype=torch.float64))


LINEAR = torch.tensor([[0.6, -1.2, 0.4]], dtype=torch.float64)
UNIT = LINEAR[0] / LINEAR.norm()


@pytest.mark.parametrize(
    ("loss", "targets", "sign"),
    [
        ("binary_cross_entropy", [1, 1, 1, 1], -1),
        ("binary_cross_entropy", [0, 0, 0, 0], 1),
        ("binary_cross_entropy", [1, 0, 1, 1], -1),
        ("squared", [3.0, 2.0, 2.5, 4.0], -1),
        ("squared", [-3.0, -2.0, -2.5, -4.0], 1),
    ],
)
@pytest.mark.parametrize("steps", [1, 10])
def test_the_worst_direction_of_a_linear_model_is_found(loss: str, targets: list[float], sign: int, steps: int) -> None:
    """The loss depends on w^T y alone, and is convex in it: the worst y is radius w / ||w||, or its opposite."""
    linear = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    linear.load_state_dict({"weight": LINEAR})
    problem = fs.erm(linear, loss, prior=False)
    inputs = np.random.default_rng(0).normal(size=(4, 3))
    data = fs.FederatedData.from_arrays([(inputs, np.array(targets))], classes=2 if loss != "squared" else 0)
    expected = 0.8 * sign * UNIT
    assert loss_under(problem, data, expected) > loss_under(problem, data, -expected)
    torch.testing.assert_close(attack(problem, data, 0.8, steps), expected, atol=1e-12, rtol=0)
    measured = Evaluation(attack_radius=0.8, attack_steps=steps)(problem, data, problem.x0, None)
    logits = inputs @ LINEAR[0].numpy() + 0.8 * sign * float(LINEAR.norm())
    if loss == "squared":
        assert measured["attacked_loss"] == pytest.approx(np.mean((logits - targets) ** 2), rel=1e-12)
        assert not {"attacked_accuracy", "attacked_auc"} & measured.keys()
    else:
        signs = 2 * np.array(targets) - 1
        assert measured["attacked_loss"] == pytest.approx(np.log1p(np.exp(-signs * logits)).mean(), rel=1e-12)
        assert measured["attacked_accuracy"] == pytest.approx(((logits > 0) == targets).mean())
        assert "attacked_auc" in measured


def test_without_steps_the_measures_are_those_under_the_start() -> None:
    """The start is the run's perturbation, projected; zero for a problem without one."""
    still = Evaluation(attack_steps=0)
    problem, plain, data = (
        fs.adversarial(model(2), SHAPE, radius=0.5, prior=False),
        fs.erm(model(2), prior=False),
        images(classes=2),
    )
    y = torch.tensor([1.0, -0.4, 0.2, 0.0, 0.1, 0.3], dtype=torch.float64)
    for given, radius in ((still, 0.5), (Evaluation(attack_steps=0, attack_radius=0.2), 0.2)):
        measured = given(problem, data, problem.x0, y)
        start = ball(radius)(y).reshape(SHAPE)
        shifted = [(x + start, t) for x, t in (data.train.of_client(k) for k in range(3))]
        expected = Evaluation("none")(plain, fs.FederatedData.from_arrays(shifted), plain.x0, None)
        assert {k for k in measured if k.startswith("attacked")} == {
            f"attacked_{k}" for k in ("loss", "accuracy", "auc")
        }
        for name in ("loss", "accuracy", "auc"):
            assert measured[f"attacked_{name}"] == pytest.approx(expected[name], rel=1e-12)
        clean = Evaluation()(plain, data, plain.x0, None)
        assert {k: v for k, v in measured.items() if not k.startswith("attacked")} == clean
    measured = Evaluation(attack_steps=0, attack_radius=0.2)(plain, data, plain.x0, None)
    assert all(measured[f"attacked_{name}"] == measured[name] for name in ("loss", "accuracy", "auc"))


def test_which_runs_are_measured_under_attack() -> None:
    plain, problem = fs.erm(model(), prior=False), fs.adversarial(model(), SHAPE, radius=0.5, prior=False)
    attacked = {"attacked_loss", "attacked_accuracy"}
    assert not attacked & Evaluation()(plain, DATA, plain.x0, None).keys()
    ours = Evaluation(attack_radius=0.5)(plain, DATA, plain.x0, None)
    theirs = Evaluation()(problem, DATA, problem.x0, problem.y0)
    assert attacked <= ours.keys()
    assert ours == theirs, "from no perturbation, within the same radius"
    assert ours["attacked_loss"] > ours["loss"]
    wider = Evaluation(attack_radius=2.0)(problem, DATA, problem.x0, problem.y0)
    assert wider["attacked_loss"] > theirs["attacked_loss"]
    assert attacked | {"attacked_auc"} <= set(MEASURES)
    held = fs.FederatedData(DATA.train, client_test=DATA.train, test=images((30,)).train.arrays, classes=3)
    pooled = Evaluation(attack_radius=0.5)(plain, held, plain.x0, None)
    assert pooled["attacked_loss"] != pytest.approx(ours["attacked_loss"], rel=1e-3), "on the pooled test set"


def test_the_attack_on_many_rows_uses_a_fixed_subset() -> None:
    problem, data = fs.erm(model(), prior=False), images((2500, 100))
    found = [attack(problem, data, 0.5, 5) for _ in range(2)]
    assert torch.equal(*found)
    others = torch.randn(30, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert loss_under(problem, data, found[0]) > max(loss_under(problem, data, 0.5 * y / y.norm()) for y in others)


def test_a_model_that_ignores_its_inputs_cannot_be_attacked() -> None:
    flat = nn.Linear(3, 2, dtype=torch.float64)
    nn.init.zeros_(flat.weight)
    data = fs.FederatedData.from_arrays([(np.ones((4, 3)), np.arange(4) % 2)])
    problem = fs.erm(flat, prior=False)
    assert torch.equal(attack(problem, data, 1.0, 5), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("steps", [0, 3])
def test_whole_numbers_are_not_attacked(steps: int) -> None:
    evaluation = Evaluation(attack_radius=1.0, attack_steps=steps)
    with pytest.raises(fs.InputError, match="Integer inputs cannot be perturbed: leave out attack_radius"):
        fs.train(fs.erm(Words(), prior=False), words(), fs.FedAvg(), rounds=1, evaluate=evaluation)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"attack_radius": bad}, "attack_radius of the evaluation must be a number") for bad in (0, -1, math.inf)),
        *(({"attack_radius": bad}, "attack_radius of the evaluation must be a number") for bad in (True, "1")),
        *(({"attack_steps": bad}, "attack_steps of the evaluation must be a whole") for bad in (-1, 1.5, True, "3")),
    ],
    ids=str,
)
def test_a_bad_attack_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        Evaluation(**options)

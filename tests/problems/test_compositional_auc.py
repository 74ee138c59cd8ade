"""Compositional AUC: steps on cross-entropy inside and the AUC loss outside, written out by hand; scheduled rates."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.training.metrics.evaluation import MEASURES, gradient_norm, objective
from minimax import numeric_slopes, prepared, slopes
from support import make_client, make_clients, make_setting, without_seconds

COUNTS = [(9, 3), (2, 4), (17, 1), (5, 0), (0, 3)]
LR = 0.7


def binary(counts: list[tuple[int, int]] = COUNTS, seed: int = 0, dtype: type = np.float64) -> fs.FederatedData:
    """Build clients with these numbers of negatives and positives; positives lie higher, and clients differ."""
    rng = np.random.default_rng(seed)
    pairs = []
    for negatives, positives in counts:
        targets = np.repeat([0, 1], [negatives, positives])
        inputs = rng.normal(size=(len(targets), 3)) + 0.6 * targets[:, None] + 0.4 * rng.normal(size=3)
        pairs.append((inputs.astype(dtype), targets))
    return fs.FederatedData.from_arrays(pairs, classes=2, name="binary")


def model(outputs: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A small network from a random starting point."""
    network = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, outputs)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in network.parameters():
            weights.copy_(torch.randn(weights.shape, generator=generator))
    return network


@pytest.fixture(autouse=True)
def _neither_trace_nor_plot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take longer than these runs; one test covers traced graphs."""
    monkeypatch.setattr("fedstrata.training.plots.plot", lambda *_, **__: None)
    if "along_the_gradient[False]" not in request.node.name:
        monkeypatch.setattr("fedstrata.problems.runner.Runner.tracing", False)


# --- by hand ---------------------------------------------------------------------------------------------------------


def outputs_of(x: torch.Tensor, inputs: torch.Tensor, outputs: int) -> torch.Tensor:
    """The network of :func:`model`, its weights cut out of the vector: [samples, outputs]."""
    first, bias, second, last = x[: 11 + 3 * (outputs - 1)].split([6, 2, 2 * outputs, outputs])  # type: ignore[no-untyped-call]
    return torch.tanh(inputs @ first.view(2, 3).T + bias) @ second.view(outputs, 2).T + last


def entropy(x: torch.Tensor, rows: tuple[torch.Tensor, ...], outputs: int) -> torch.Tensor:
    inputs, targets = rows
    out = outputs_of(x, inputs, outputs)
    if outputs == 2:
        return F.cross_entropy(out, targets)
    return F.softplus((1 - 2 * targets) * out[:, 0]).mean()


def stepped(x: torch.Tensor, rows: tuple[torch.Tensor, ...], steps: int, outputs: int, lr: float) -> torch.Tensor:
    """x after gradient steps on the cross-entropy, differentiable in x."""
    for _ in range(steps):
        x = x if x.requires_grad else x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(entropy(x, rows, outputs), x, create_graph=True)
        x = x - lr * gradient
    return x


def auc_loss(
    u: torch.Tensor, alpha: torch.Tensor, rows: tuple[torch.Tensor, ...], p: float, form: str, outputs: int
) -> torch.Tensor:
    """F as in the docstring of auc, for a sigmoid score and margin 1."""
    inputs, targets = rows
    out = outputs_of(u, inputs, outputs)
    s = torch.sigmoid(out[:, 0] if outputs == 1 else out[:, 1] - out[:, 0])
    a, b = u[-2], u[-1]
    plus, minus = (targets == 1).double(), (targets == 0).double()
    squares = (1 - p) * (s - a) ** 2 * plus + p * (s - b) ** 2 * minus
    pull = p * s * minus - (1 - p) * s * plus
    if form == "square":
        return (squares + 2 * (1 + alpha) * pull - p * (1 - p) * alpha**2).mean()
    return (squares + 2 * alpha * (p * (1 - p) + pull) - p * (1 - p) * alpha**2).mean()


def by_hand(
    x: torch.Tensor,
    y: torch.Tensor,
    data: fs.FederatedData,
    steps: int,
    p: float,
    form: str = "square",
    outputs: int = 1,
    lr: float = LR,
) -> torch.Tensor:
    """M_k[ F_k(G(x), y) ], with G the mean over clients of their points after the steps."""
    rows = [data.train.of_client(k) for k in range(data.clients)]
    inner = torch.stack([stepped(x, r, steps, outputs, lr) for r in rows]).mean(0)
    return torch.stack([auc_loss(inner, y[0], r, p, form, outputs) for r in rows]).mean()


def composed(problem: fs.Problem, data: fs.FederatedData, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same from the problem's own functions."""
    inner = []
    for k in range(data.clients):
        u = x
        for j, level in enumerate(problem.levels, 1):
            u = level(u, data.part(j).of_client(k))
        inner.append(u)
    mean = torch.stack(inner).mean(0)
    return torch.stack([problem.outer(mean, y, data.train.of_client(k)) for k in range(data.clients)]).mean()


def point(problem: fs.Problem, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights near the first ones with some a and b, and a dual."""
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(len(problem.x0), generator=generator, dtype=torch.float64)
    return problem.x0 + 0.3 * away, torch.tensor([0.4], dtype=torch.float64)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize(("form", "outputs"), [("square", 1), ("margin", 1), ("square", 2)])
def test_the_objective_and_its_gradient_are_those_written_by_hand(levels: int, form: Any, outputs: int) -> None:
    data = binary()
    problem = prepared(fs.compositional_auc(model(outputs), levels, LR, form=form), data)
    assert problem.kind == f"{levels} inner level{'s' * (levels > 1)}, a global inner mean, a dual"
    assert (problem.name, problem.adapt, problem.takes_weights) == ("compositional_auc", (levels, LR), True)
    assert len(problem.x0) == len(model(outputs).state_dict()["0.weight"].ravel()) + 2 + 3 * outputs + 2
    p = float(np.mean([n1 / (n0 + n1) for n0, n1 in COUNTS]))
    x, y = point(problem)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return by_hand(x, y, data, levels, p, form, outputs)

    expected, gradients = float(f(x, y).detach()), slopes(f, x, y)
    assert objective(problem, data, x, y) == pytest.approx(expected, abs=1e-10)
    assert gradient_norm(problem, data, x, y) == pytest.approx(float(gradients[0].norm()), abs=1e-10)
    ours = slopes(lambda x, y: composed(problem, data, x, y), x, y)
    torch.testing.assert_close(ours, gradients, atol=1e-10, rtol=0)
    assert float(gradients[0].norm()) > 0.01 and float(gradients[1].abs()) > 0.01


def test_the_mean_over_clients_is_inside() -> None:
    """Not the mean of F_k at each client's own point after its steps."""
    data = binary()
    shared = fs.compositional_auc(model(), 2, LR, p=0.3)
    own = replace(shared, inner_mean="local")
    x, y = point(shared)
    rows = [data.train.of_client(k) for k in range(data.clients)]
    apart = torch.stack([auc_loss(stepped(x, r, 2, 1, LR), y[0], r, 0.3, "square", 1) for r in rows]).mean()
    assert objective(own, data, x, y) == pytest.approx(float(apart.detach()), abs=1e-10)
    assert abs(objective(shared, data, x, y) - objective(own, data, x, y)) > 1e-3


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("score", ["sigmoid", "none"])
def test_the_gradient_is_that_of_finite_differences(levels: int, score: Any) -> None:
    data = binary([(9, 3), (2, 4)])
    problem = fs.compositional_auc(model(), levels, LR, score=score, scale_dual=True, p=0.3)
    x, y = point(problem, 2)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return composed(problem, data, x, y)

    for ours, numeric in zip(slopes(f, x, y), numeric_slopes(f, x, y), strict=True):
        torch.testing.assert_close(ours, numeric, atol=1e-8, rtol=1e-7)
    numbers = [objective(problem, data, x + side * 1e-5 * torch.eye(len(x)).double()[3], y) for side in (1, -1)]
    assert (numbers[0] - numbers[1]) / 2e-5 == pytest.approx(float(slopes(f, x, y)[0][3]), abs=1e-8)


def test_a_and_b_go_through_the_levels_unchanged() -> None:
    data = binary()
    problem = fs.compositional_auc(model(), 3, LR, p=0.3)
    x, _ = point(problem)
    for k in range(data.clients):
        u = x
        for level in problem.levels:
            before, u = u, level(u, data.train.of_client(k))
            assert torch.equal(u[-2:], x[-2:])
            assert (u - before)[:-2].abs().max() > 1e-6
    client = make_client(make_setting(problem, data), [0, 1])
    _, jacobian = client.g_jacobian(1, x.expand(2, -1), client.all_data(1))
    torch.testing.assert_close(jacobian[:, -2:, -2:], torch.eye(2).double().expand(2, 2, 2), atol=1e-14, rtol=0)
    for block in (jacobian[:, -2:, :-2], jacobian[:, :-2, -2:]):
        assert block.abs().max() < 1e-14
    assert torch.equal(problem.x0[-2:], torch.zeros(2).double())


def test_first_order_treats_every_jacobian_as_the_identity() -> None:
    """The value is the same; the gradient is that of the AUC loss after the steps."""
    data = binary()
    full, first = (fs.compositional_auc(model(), 3, LR, flag, p=0.3) for flag in (False, True))
    x, y = point(full)
    assert objective(first, data, x, y) == pytest.approx(objective(full, data, x, y), abs=1e-13)
    rows = [data.train.of_client(k) for k in range(data.clients)]
    inner = torch.stack([stepped(x, r, 3, 1, LR) for r in rows]).mean(0).detach()

    def outside(u: torch.Tensor) -> torch.Tensor:
        return torch.stack([auc_loss(u, y[0], r, 0.3, "square", 1) for r in rows]).mean()

    (expected,) = slopes(outside, inner)
    assert gradient_norm(first, data, x, y) == pytest.approx(float(expected.norm()), abs=1e-10)
    ours = slopes(lambda x: composed(first, data, x, y), x)[0]
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
    assert abs(gradient_norm(full, data, x, y) - gradient_norm(first, data, x, y)) > 1e-3
    assert (full.options["first_order"], first.options["first_order"]) == (False, True)


@pytest.mark.slow
@pytest.mark.parametrize("first_order", [False, True])
def test_a_clients_first_step_is_along_the_gradient(first_order: bool) -> None:
    """One client alone, all its data at once: the estimates of the first step are exact."""
    data = binary([(9, 5)])
    problem = fs.compositional_auc(model(), 2, LR, first_order)
    algorithm = fs.LocalSMCGDAM(eta=0.5, gamma_x=0.4, gamma_y=0.6, steps=1)
    run = fs.train(problem, data, algorithm, rounds=1)
    x, y = problem.x0, torch.zeros(1).double()
    if first_order:
        inner = stepped(x, data.train.of_client(0), 2, 1, LR).detach()
        in_x, in_y = slopes(lambda u, y: auc_loss(u, y[0], data.train.of_client(0), 5 / 14, "square", 1), inner, y)
    else:
        in_x, in_y = slopes(lambda x, y: by_hand(x, y, data, 2, 5 / 14), x, y)
    torch.testing.assert_close(run.x, x - 0.2 * in_x, atol=1e-10, rtol=0)
    torch.testing.assert_close(run.y, 0.3 * in_y, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_it_learns_to_rank_and_is_measured_after_the_steps() -> None:
    data = binary([(30, 5), (25, 10), (31, 4)], dtype=np.float32)
    problem = fs.compositional_auc(model(dtype=torch.float32), 1, 0.2)
    run = fs.train(problem, data, fs.LocalSMCGDAM(gamma_x=1.0, steps=5), rounds=12, eval_every=12)
    first, last = run.history[0], run.history[-1]
    assert last["adapted_auc"] > first["adapted_auc"] + 0.3
    assert "adapted_accuracy" not in last and "accuracy" not in last, "no threshold is learnt"
    assert {"auc", "adapted_auc", "adapted_loss", "auc_worst"} <= last.keys() <= {*MEASURES, *first.keys()}
    assert not any(name.startswith("personal") for name in last)
    inputs, _ = data.train.arrays
    assert problem.predict is not None
    with torch.no_grad():
        torch.testing.assert_close(run.model()(inputs), problem.predict(run.x, inputs), atol=1e-6, rtol=0)


# --- a rate that follows a schedule ----------------------------------------------------------------------------------

STEP = fs.StepDecay(LR, factor=0.3)
RATES = [LR] * 5 + [LR * 0.3] * 3 + [LR * 0.3**2] * 2
"""Ten rounds with the decays at 50 % and 75 % of them."""

METHOD = fs.LocalSMCGDAM(gamma_x=0.5, steps=1)
ALIKE = [(4, 2), (3, 3), (6, 0)]
"""Clients of one size, which advance together."""


def scheduled(inner_lr: Any = STEP, levels: int = 2, **options: Any) -> fs.Run:
    problem = fs.compositional_auc(model(), levels, inner_lr)
    return fs.train(problem, binary(ALIKE), METHOD, **{"rounds": 10, "eval_every": 1, "seed": 4, **options})


@pytest.fixture
def straight() -> fs.Run:
    """Ten rounds without a stop."""
    return scheduled()


def assert_same(run: fs.Run, expected: fs.Run) -> None:
    assert torch.equal(run.x, expected.x)
    assert run.y is not None and expected.y is not None and torch.equal(run.y, expected.y)
    assert without_seconds(run.history) == without_seconds(expected.history)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rate of each round: how far the last level moves, divided by the gradient there."""
    seen: list[float] = []
    before, rows = fs.LocalSMCGDAM.round, binary().train.of_client(0)

    def round(self: Any, s: fs.State, clients: Any) -> fs.State:
        with torch.enable_grad():
            gradient = slopes(lambda x: entropy(x, rows, 1), s.x)[0]
        moved = s.x - clients.problem.levels[-1](s.x, rows)
        seen.append(float(moved.norm() / gradient.norm()))
        assert clients.problem.adapt == (len(clients.problem.levels), pytest.approx(seen[-1], rel=1e-9))
        return before(self, s, clients)

    monkeypatch.setattr(fs.LocalSMCGDAM, "round", round)
    return seen


def test_each_round_has_the_rate_of_the_schedule(rates: list[float]) -> None:
    run = scheduled()
    assert rates == pytest.approx(RATES, rel=1e-9)
    assert run.problem.adapt == (2, pytest.approx(RATES[-1], rel=1e-12))


@pytest.mark.slow
def test_a_schedule_is_as_if_the_rate_were_changed_by_hand(straight: fs.Run) -> None:
    data = binary(ALIKE)
    p = float(np.mean([n1 / (n0 + n1) for n0, n1 in ALIKE]))
    by_rate = {rate: fs.compositional_auc(model(), 2, rate, p=p) for rate in RATES}
    clients = make_clients(make_setting(by_rate[LR], data, seed=4), chunk=3)
    with torch.no_grad():
        clients.begin(-1)
        state = METHOD.start(by_rate[LR].x0, by_rate[LR].y0, clients)
        for r, rate in enumerate(RATES):
            clients.begin(r)
            clients.engine.adopt(by_rate[rate])
            state = METHOD.round(state, clients)
    torch.testing.assert_close(straight.x, state.x, atol=1e-13, rtol=0)
    torch.testing.assert_close(straight.y, state.y, atol=1e-13, rtol=0)
    constant = scheduled(LR)
    assert without_seconds(constant.history[:6]) == without_seconds(straight.history[:6])
    assert (constant.x - straight.x).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 6, 9, 10])
def test_a_resumed_run_gives_the_same_bits(straight: fs.Run, tmp_path: Path, stop: int) -> None:
    class Stop(fs.Callback):
        def on_round(self, round: int, state: fs.State) -> None:
            if round == stop:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scheduled(out=tmp_path / "run", callbacks=[Stop()])
    assert_same(scheduled(out=tmp_path / "run", resume=True), straight)


@pytest.mark.slow
def test_decays_at_round_numbers_stay_when_a_run_is_extended(straight: fs.Run, tmp_path: Path) -> None:
    by_number = fs.StepDecay(LR, at=(5, 8), factor=0.3)
    scheduled(by_number, rounds=6, out=tmp_path / "run")
    assert_same(scheduled(by_number, out=tmp_path / "run", resume=True), straight)


def test_decays_at_fractions_move_when_a_run_is_extended(rates: list[float], tmp_path: Path) -> None:
    for rounds in (4, 8):
        run = scheduled(rounds=rounds, out=tmp_path / "run", resume=True)
    factors = [1, 1, 0.3, 0.09, 0.3, 0.3, 0.09, 0.09]
    assert rates == pytest.approx([LR * factor for factor in factors], rel=1e-9)
    assert run.problem.adapt == (2, pytest.approx(LR * 0.09, rel=1e-12))


def test_a_finished_run_that_is_resumed_knows_its_last_rate(straight: fs.Run, tmp_path: Path) -> None:
    scheduled(out=tmp_path / "run")
    run = scheduled(out=tmp_path / "run", resume=True)
    assert_same(run, straight)
    assert run.problem.adapt == straight.problem.adapt == (2, pytest.approx(RATES[-1], rel=1e-12))
    for found in (run, straight):
        again = fs.Evaluation()(found.problem, binary(ALIKE), found.x, found.y)
        assert again["adapted_auc"] == found.history[-1]["adapted_auc"] == found.summary["adapted_auc"]
        assert again["adapted_loss"] == found.history[-1]["adapted_loss"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["adapted_auc"] == straight.summary["adapted_auc"]
    at_first = fs.Evaluation()(fs.compositional_auc(model(), 2, LR), binary(ALIKE), run.x, run.y)
    assert at_first["adapted_loss"] != run.history[-1]["adapted_loss"]


def test_a_finished_run_is_at_its_last_round_and_not_beyond(tmp_path: Path) -> None:
    decay = fs.RoundDecay(LR, factor=0.5)
    first, again = (scheduled(decay, levels=1, rounds=3, out=tmp_path / "run", resume=True) for _ in range(2))
    assert first.problem.adapt == again.problem.adapt == (1, LR / 4)


def test_a_run_directory_holds_the_schedule_and_another_is_not_resumed(tmp_path: Path) -> None:
    scheduled(rounds=1, levels=1, out=tmp_path / "run")
    held = tomllib.loads((tmp_path / "run" / "config.toml").read_text())["problem"]
    assert held["inner_lr"] == {"schedule": "step", "value": LR, "at": [0.5, 0.75], "factor": 0.3}
    others = [
        (fs.StepDecay(LR, factor=0.2), r"problem\.inner_lr\.factor was 0\.3 and is now 0\.2"),
        (fs.RoundDecay(LR), r"cannot be resumed with other settings: problem\.inner_lr\."),
        (LR, r"cannot be resumed with other settings: problem\.inner_lr"),
    ]
    for other, message in others:
        with pytest.raises(fs.InputError, match=message):
            scheduled(other, rounds=2, levels=1, out=tmp_path / "run", resume=True)
    assert scheduled(rounds=2, levels=1, out=tmp_path / "run", resume=True).history[-1]["round"] == 2


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (fs.RoundDecay(0.4, factor=0.5), [0.4, 0.2, 0.1]),
        (fs.CubeRoot(0.4), [0.4, 0.4 / 2 ** (1 / 3), 0.4 / 3 ** (1 / 3)]),
        (fs.StepDecay(0.4, at=(2,)), [0.4, 0.4, 0.04]),
    ],
    ids=lambda v: v.name if isinstance(v, fs.schedules.Schedule) else "",
)
def test_any_schedule_works(schedule: Any, rates: list[float]) -> None:
    """A row is measured at the rate of the round before it."""
    data = binary(ALIKE)
    run = fs.train(fs.compositional_auc(model(), 1, schedule), data, METHOD, rounds=3, eval_every=1)
    built = fs.compositional_auc(model(), 1, schedule)
    assert built.adapt == (1, 0.4) and built.at is not None
    assert run.problem.adapt == (1, pytest.approx(rates[-1], rel=1e-12))
    plain = fs.compositional_auc(model(), 1, rates[-1])
    assert plain.at is None
    measured = fs.Evaluation()(plain, data, run.x, run.y)
    assert run.history[-1]["adapted_loss"] == pytest.approx(measured["adapted_loss"], abs=1e-12)


# --- from a file -----------------------------------------------------------------------------------------------------

FILE = """
[data]
imbalance = 0.3
subset = 200
clients = 3
[model]
name = "logreg"
[problem]
name = "compositional_auc"
levels = 1
inner_lr = { schedule = "step", value = 0.1, factor = 0.01 }
[algorithm]
name = "local_smcgdam"
steps = 2
[train]
rounds = 4
"""


@pytest.mark.slow
def test_the_config_of_a_run_holds_the_table_and_runs_again(fedstrata: Any, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    code, _, err = fedstrata("run", path, "--out", tmp_path / "a", "--quiet")
    assert code == 0, err
    held = tomllib.loads((tmp_path / "a" / "config.toml").read_text())["problem"]
    assert held["inner_lr"] == {"schedule": "step", "value": 0.1, "factor": 0.01}
    code, _, err = fedstrata("run", tmp_path / "a" / "config.toml", "--out", tmp_path / "b", "--quiet")
    assert code == 0, err
    for name in ("config.toml", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    code, _, err = fedstrata("run", path, "--out", tmp_path / "b", "--quiet", "--resume", "--set", "train.rounds=5")
    assert code == 0, err
    code, _, err = fedstrata("run", path, "--out", tmp_path / "b", "--resume", "--set", "problem.inner_lr.value=0.2")
    assert code == 2 and "problem.inner_lr.value was 0.1 and is now 0.2" in " ".join(err.split())
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 1, 2, 3, 4] and all(0 < row["adapted_auc"] < 1 for row in rows)


def test_a_file_gives_the_problem_its_schedule_and_the_model_one_output() -> None:
    tables = tomllib.loads(FILE)
    problem = build.Experiment(config.parse(tables, "here")).problem
    assert problem.options["inner_lr"] == fs.StepDecay(0.1, factor=0.01)
    assert len(problem.x0) == 64 + 1 + 2
    maml = {**tables, "problem": {"name": "maml", "inner_lr": {"schedule": "step", "value": 0.2, "at": [3]}}}
    problem = build.Experiment(config.parse(maml, "here")).problem
    assert problem.options["inner_lr"] == fs.StepDecay(0.2, at=(3,))


@pytest.mark.parametrize(
    ("inner_lr", "message"),
    [
        (
            {"schedule": "cosine", "value": 0.1},
            r"Unknown schedule 'cosine'.*\(inner_lr of the compositional_auc problem\)",
        ),
        ({"schedule": "step"}, r"The step schedule needs value.*\(inner_lr of the compositional_auc problem\)"),
        ({"schedule": "step", "value": 0.1, "k": 1}, r"Unknown option of the step schedule 'k'"),
        ({"schedule": "step", "value": -1}, r"The value of the step schedule must be a number above 0\. Got -1\."),
        ({"value": 0.1}, r"Unknown schedule None\. .*\(inner_lr of the compositional_auc problem\)"),
        ("fast", r"The inner_lr of the .* must be a number above 0, or a schedule\. Got 'fast'\."),
    ],
    ids=["unknown", "no value", "unknown option", "below 0", "no name", "text"],
)
def test_a_bad_rate_in_a_file_is_refused(inner_lr: Any, message: str) -> None:
    tables = tomllib.loads(FILE)
    tables["problem"]["inner_lr"] = inner_lr
    with pytest.raises(fs.InputError, match=message):
        build.Experiment(config.parse(tables, "here"))


# --- odd batches -----------------------------------------------------------------------------------------------------


def repeated_rows(counts: list[tuple[int, int]]) -> fs.FederatedData:
    """Clients whose rows of a class are all equal, so a balanced batch has all the information."""
    generator = np.random.default_rng(0)
    pairs = []
    for own in counts:
        inputs = generator.normal(size=(2, 3)) + np.array([[0.0], [0.8]])
        pairs.append((np.repeat(inputs, own, axis=0), np.repeat([0, 1], own)))
    return fs.FederatedData.from_arrays(pairs, classes=2)


def test_weights_compensate_for_balanced_batches() -> None:
    data = repeated_rows([(30, 2), (5, 6), (4, 0), (0, 3)])
    problem = fs.compositional_auc(model(), 2, LR)
    batches: list[dict[str, Any]] = [{"batch_size": 5, "sampling": "balanced"}, {}, {"batch_size": 5}]
    runs = [fs.train(problem, data, METHOD, rounds=3, **options) for options in batches]
    torch.testing.assert_close(runs[0].x, runs[1].x, atol=1e-12, rtol=0)
    torch.testing.assert_close(runs[0].y, runs[1].y, atol=1e-12, rtol=0)
    assert (runs[1].x - runs[2].x).abs().max() > 1e-4


def test_the_weights_of_samples_count_in_the_steps_and_outside() -> None:
    """A weight of 2 is like a sample that occurs twice, a weight of 0 like one that does not occur."""
    problem = fs.compositional_auc(model(2), 1, LR, p=0.3)
    inputs, targets = binary().train.of_client(1)
    weights = torch.tensor([2.0, 0.0, 1.0, 2.0, 1.0, 0.0]).double()
    rows = torch.tensor([0, 0, 2, 3, 3, 4])
    x, y = point(problem)
    for f in (lambda b: problem.levels[0](x, b), lambda b: problem.outer(x, y, b)):
        torch.testing.assert_close(f((inputs, targets, weights)), f((inputs[rows], targets[rows])), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("counts", "batch_size"),
    [([(9, 3), (6, 6), (11, 1)], 1), ([(6, 0), (0, 4), (5, 5)], None)],
    ids=["single-class batches", "single-class clients"],
)
def test_odd_classes_are_legal(counts: list[tuple[int, int]], batch_size: int | None) -> None:
    data = binary(counts, dtype=np.float32)
    for options in ({"form": "square", "scale_dual": True}, {"form": "margin", "score": "none"}):
        problem = fs.compositional_auc(model(dtype=torch.float32), 2, 0.1, **options)
        run = fs.train(problem, data, METHOD, rounds=3, batch_size=batch_size)
        assert run.y is not None and torch.isfinite(run.x).all() and torch.isfinite(run.y).all()
        assert all(math.isfinite(v) for row in run.history for v in row.values())
        assert "adapted_auc" in run.history[-1]


# --- models and options ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_norm_is_refused_or_replaced() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.raises(fs.InputError, match="keeps running statistics"):
        fs.compositional_auc(network)
    data = binary([(9, 3), (2, 4)])
    problem = fs.compositional_auc(network, 2, 0.1, p=0.3, batchnorm="group")
    assert problem.options["batchnorm"] == "group"
    x, y = point(problem)

    def f(x: torch.Tensor) -> torch.Tensor:
        return composed(problem, data, x, y)

    torch.testing.assert_close(slopes(f, x), numeric_slopes(f, x), atol=1e-7, rtol=1e-6)
    run = fs.train(problem, data, METHOD, rounds=2)
    assert torch.isfinite(run.x).all()
    assert any(isinstance(part, nn.GroupNorm) for part in run.model().modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"levels": bad}, r"The levels of the compositional_auc problem must be a whole number of at least 1\. Got")
            for bad in (0, -1, True, 1.5, "3", None)
        ),
        *(
            ({"inner_lr": bad}, r"The inner_lr of the compositional_auc problem must be a number above 0, or a schedu")
            for bad in (0, 0.0, -1, math.nan, math.inf, True, "0.1", None)
        ),
        *(
            ({"first_order": bad}, r"The first_order of the compositional_auc problem must be true or false\. Got")
            for bad in ("yes", 1, None)
        ),
        ({"form": "hinge"}, "'square' or 'margin'. Got 'hinge'"),
        ({"margin": 2.0}, "applies only with form = 'margin'"),
        ({"p": 1.0}, "a number above 0 and below 1, or left out"),
        ({"score": "softmax"}, "'sigmoid' or 'none'"),
        ({"scale_dual": "no"}, "must be true or false"),
        ({"batchnorm": "keep"}, "The batchnorm of the compositional_auc problem must be"),
    ],
    ids=str,
)
def test_a_bad_problem_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.compositional_auc(model(), **options)


def test_what_does_not_fit_is_refused() -> None:
    problem = fs.compositional_auc(model())
    with pytest.raises(fs.InputError, match=r"local_sgda does not solve .*\(3 inner levels, a global inner mean"):
        fs.train(problem, binary(), fs.LocalSGDA(), rounds=1)
    with pytest.raises(fs.InputError, match="local_scgdam does not solve"):
        fs.train(problem, binary(), fs.LocalSCGDAM(), rounds=1)
    fs.train(fs.compositional_auc(model(), 1), binary(), fs.LocalSCGDAM(steps=1), rounds=1)
    data = fs.FederatedData.from_arrays([(np.ones((6, 3)), np.arange(6) % 3)])
    with pytest.raises(fs.InputError, match="needs two classes, 0 and 1"):
        fs.train(problem, data, METHOD, rounds=1)
    with pytest.raises(fs.InputError, match="does not know the fraction of positives yet"):
        objective(problem, binary(), problem.x0, problem.y0)

"""The clients' own models, computed together: the same numbers as one client at a time, and when that is impossible."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from cases import product
from fedstrata.clients.chunk import choose_chunk
from fedstrata.training.metrics import adaptation
from fedstrata.training.metrics import objective as objectives
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.metrics.objective import gradient_norm, objective

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


def clients_of(sizes: np.ndarray, classes: int, seed: int = 0, shape: tuple[int, ...] = (1, 4, 4)) -> fs.FederatedData:
    generator = np.random.default_rng(seed)
    pairs = [(generator.normal(size=(n, *shape)), generator.integers(0, classes, n)) for n in sizes]
    return fs.FederatedData.from_arrays(pairs, classes=classes)


def one_by_one(monkeypatch: pytest.MonkeyPatch, measure: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(adaptation, "choose_chunk", lambda *_: 1)
        return measure()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many clients are computed together."""
    sizes: list[int] = []
    padded = adaptation._padded

    def recorded(part: Any, clients: np.ndarray, own: np.ndarray) -> Any:
        sizes.append(len(clients))
        return padded(part, clients, own)

    monkeypatch.setattr(adaptation, "_padded", recorded)
    return sizes


def check(problem: fs.Problem, data: fs.FederatedData, evaluation: Evaluation, patch: pytest.MonkeyPatch) -> None:
    """The measures of all clients together are those of each alone."""
    data = data.to(problem.x0.device, problem.x0.dtype)
    alone = one_by_one(patch, lambda: evaluation.per_client(problem, data, problem.x0))
    together = evaluation.per_client(problem, data, problem.x0)
    assert alone.keys() == together.keys() and "personal_loss" in alone
    for name, values in alone.items():
        np.testing.assert_allclose(together[name], values, rtol=TOLERANCE[problem.x0.dtype], atol=1e-7, err_msg=name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["logreg", "mlp"])
@pytest.mark.parametrize("sizes", ["equal", "unequal", "spread"])
@pytest.mark.parametrize("rows", [None, 7])
def test_clients_together_get_the_same_numbers_as_alone(
    name: str, dtype: torch.dtype, sizes: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(1)
    drawn = {
        "equal": np.full(40, 20),
        "unequal": generator.integers(10, 31, 60),
        "spread": np.append(np.exp(generator.normal(2.5, 1.2, 60)).astype(np.int64) + 1, 1500),
    }[sizes]
    data = clients_of(drawn, 3)
    model = fs.models.model(name, (1, 4, 4), 3).to(dtype)
    seen = counted(monkeypatch)
    check(fs.maml(model, inner_lr=0.3, steps=3), data, Evaluation(adapt_rows=rows), monkeypatch)
    assert max(seen) > 10


@pytest.mark.parametrize("support", [False, True], ids=["no support", "support"])
def test_clients_with_other_numbers_of_held_out_rows(support: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(2)
    sizes, held, inner = (generator.integers(1, 40, 50) for _ in range(3))
    tests = clients_of(held, 2, 1).train
    rows = np.split(tests.rows.numpy(), tests.offsets[1:-1])
    rows[3] = rows[40] = rows[0][:0]
    data = replace(clients_of(sizes, 2), client_test=fs.data.Part.of(tests.arrays, rows))
    data = replace(data, support=clients_of(inner, 2, 2).train if support else None)
    model = fs.models.model("mlp", (1, 4, 4), 2).double()
    check(fs.maml(model, inner_lr=0.3), data, Evaluation("test"), monkeypatch)


def test_clients_with_one_logit_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = np.random.default_rng(3).integers(1, 20, 30)
    evaluation = Evaluation(adapt_steps=2, adapt_lr=0.1)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 1)).double()
    for loss in ("binary_cross_entropy", "squared"):
        check(fs.erm(flat, loss), clients_of(sizes, 2), evaluation, monkeypatch)


def test_clients_with_several_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(2, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.first(a) * self.second(b)

    generator = torch.Generator().manual_seed(0)
    sites = []
    for n in range(1, 30):
        sites.append(
            (torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator), torch.arange(n) % 4)
        )
    data = fs.FederatedData.from_arrays(sites, classes=4)
    check(fs.maml(Two().double(), inner_lr=0.2), data, Evaluation(), monkeypatch)


def test_the_mean_of_the_adapted_models(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients_of(np.random.default_rng(4).integers(1, 30, 40), 3).to(torch.device("cpu"), torch.float64)
    problem = fs.maml(fs.models.model("mlp", (1, 4, 4), 3).double(), inner_lr=0.3, inner_mean="global")
    seen = counted(monkeypatch)
    together = adaptation.adapted_point(problem, data, problem.x0)
    assert seen
    assert torch.equal(adaptation.adapted_point(problem, data, problem.x0, steps=0), problem.x0)
    alone = one_by_one(monkeypatch, lambda: adaptation.adapted_point(problem, data, problem.x0))
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


# --- the objective ---------------------------------------------------------------------------------------------------


def saddle(levels: int, inner_mean: Any, numbered: bool) -> fs.Problem:
    """A problem without a model, whose functions are no means over rows."""

    def level(u: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.tanh(batch[0] @ u.reshape(4, 4)).square().mean(0).repeat(4) + u

    def outer(u: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
        weight = y[batch[-1]] if numbered else y[0].sin()
        return weight * torch.log(torch.cosh(batch[0] @ u[:4])).mean() ** 2 + (u**3).sum()

    x0 = torch.linspace(-1, 1, 16, dtype=torch.float64)
    y0 = torch.linspace(0, 1, 45, dtype=torch.float64)
    return fs.Problem(outer, x0, (level,) * levels, y0, inner_mean=inner_mean, numbered=numbered)


@product(
    *("levels, inner_mean, numbered, support", [0, 2], ["local", "global"], [False, True], [False, True]),
)
def test_the_objective_and_its_gradient_of_all_clients_together(
    levels: int, inner_mean: str, numbered: bool, support: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(8)
    data, inner = (clients_of(generator.integers(1, 20, 45), 2, seed, (4,)) for seed in (0, 1))
    data = replace(data, support=inner.train if support else None).to(torch.device("cpu"), torch.float64)
    problem = saddle(levels, inner_mean, numbered)

    def measures() -> list[float]:
        values = [objective(problem, data, problem.x0, problem.y0, training=training) for training in (False, True)]
        return [*values, gradient_norm(problem, data, problem.x0, problem.y0)]

    seen = sizes_of(monkeypatch, objectives)
    together = measures()
    assert max(seen) == 45
    with monkeypatch.context() as patch:
        patch.setattr(objectives, "choose_chunk", lambda *_: 1)
        alone = measures()
    np.testing.assert_allclose(together, alone, rtol=1e-10)


def sizes_of(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[int]:
    sizes: list[int] = []
    batch = module.Layers.batch

    def recorded(self: Any, clients: np.ndarray, level: int) -> Any:
        sizes.append(len(clients))
        return batch(self, clients, level)

    monkeypatch.setattr(module.Layers, "batch", recorded)
    return sizes


def test_an_objective_that_branches_on_values_is_computed_one_by_one() -> None:
    def outer(x: torch.Tensor, batch: Any) -> torch.Tensor:
        value = (batch[0] @ x).mean()
        return value if float(value.detach()) > 0 else 2 * value

    data = clients_of(np.full(9, 3), 2, shape=(4,)).to(torch.device("cpu"), torch.float64)
    problem = fs.Problem(outer, torch.ones(4, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = objective(problem, data, problem.x0, None)
    values = [outer(problem.x0, data.train.of_client(k)) for k in range(9)]
    assert found == pytest.approx(float(torch.stack(values).mean()), rel=1e-12)


# --- how many --------------------------------------------------------------------------------------------------------


def test_chunks_follow_the_rule_and_repeat_few_rows() -> None:
    sizes = np.append(np.exp(np.random.default_rng(5).normal(3, 1, 3000)).astype(np.int64), [0, 0, 4000])
    data = clients_of(np.maximum(sizes, 1), 3, shape=(2,)).to(torch.device("cpu"), torch.float32)
    problem = fs.erm(nn.Linear(2, 3))
    personal = adaptation.Personal(problem, data, problem.x0, 1, 0.1)
    clients = np.flatnonzero(np.arange(len(sizes)) != 17)
    chunks = list(personal._chunks(clients, sizes))
    assert sorted(np.concatenate(chunks).tolist()) == clients.tolist()
    for chunk in chunks:
        own = sizes[chunk]
        assert len(chunk) <= choose_chunk("auto", problem, data, int(own.max()), torch.device("cpu"))
        assert len(chunk) == 1 or (own.min() > 0 and own.max() * len(own) <= 1.5 * own.sum() and own.max() <= 1024)
    assert len(chunks) < 20


@pytest.mark.parametrize("name", ["lenet5", "lstm"])
def test_convolutions_and_recurrent_layers_are_computed_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lstm":
        generator = np.random.default_rng(0)
        sites = [(generator.integers(0, 10, (n, 5)), generator.integers(0, 10, n)) for n in (3, 4, 4)]
        data, model = fs.FederatedData.from_arrays(sites, classes=10), fs.models.model("lstm", (5,), 10)
    else:
        data, model = clients_of(np.array([3, 4, 4]), 3, shape=(1, 28, 28)), fs.models.model(name, (1, 28, 28), 3)
    seen = counted(monkeypatch)
    problem = fs.maml(model, inner_lr=0.1, prior=False)
    data = data.to(problem.x0.device, problem.x0.dtype)
    assert np.isfinite(Evaluation().per_client(problem, data, problem.x0)["personal_loss"]).all()
    assert not seen


# --- models for which it does not work -------------------------------------------------------------------------------


def test_a_model_with_batch_statistics_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    problem = fs.maml(model, inner_lr=0.3, batchnorm="batch")
    check(problem, clients_of(np.random.default_rng(6).integers(5, 30, 20), 3), Evaluation(), monkeypatch)
    monkeypatch.setattr(adaptation, "choose_chunk", lambda *_: 8)  # so that rows are repeated in the second chunk only
    check(problem, clients_of(np.array([9] * 8 + [8, 7, 6, 6, 6]), 3), Evaluation(), monkeypatch)


def test_a_model_that_branches_on_values_is_computed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            return outputs if outputs.sum() > 0 else 2 * outputs

    data = clients_of(np.random.default_rng(7).integers(5, 30, 20), 3, shape=(4,))
    seen = counted(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(fs.erm(Branches(4, 3).double()), data, Evaluation(adapt_steps=2, adapt_lr=0.2), monkeypatch)
    assert len(seen) == 1, "tried once"


def test_an_error_in_the_model_is_raised() -> None:
    data = clients_of(np.full(6, 4), 3, shape=(4,)).to(torch.device("cpu"), torch.float32)
    problem = fs.erm(nn.Linear(4, 3))

    def broken(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a broken model")

    personal = adaptation.Personal(replace(problem, predict=broken), data, problem.x0, 1, 0.1)
    with pytest.raises(RuntimeError, match="a broken model"):
        list(personal.models(np.arange(6)))


def test_one_diverging_client_does_not_change_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients_of(np.full(12, 4), 2, shape=(4,)).to(torch.device("cpu"), torch.float64)
    data.train.arrays[0][data.train.rows[8:12]] *= 1e160
    problem = fs.erm(nn.Linear(4, 1).double(), "squared")
    evaluation = Evaluation(adapt_steps=3, adapt_lr=0.1)
    found = evaluation.per_client(problem, data, problem.x0)["personal_loss"]
    assert np.flatnonzero(np.isnan(found)).tolist() == [2]
    check(problem, data, evaluation, monkeypatch)

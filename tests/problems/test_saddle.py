"""The quadratic saddle at zero, and the distance of a run from a known solution."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedstrata as fs
from fedstrata.experiments import build, config
from fedstrata.training.metrics.evaluation import MEASURES, Evaluation, gradient_norm, objective
from minimax import mean_over_clients, numeric_slopes, slopes
from support import make_clients, make_setting

OPTIONS: dict[str, Any] = {"clients": 6, "dimension": 4, "samples": 5}


def parts(q: fs.Quadratic) -> tuple[torch.Tensor, torch.Tensor]:
    """t, [clients, samples], and b, [clients, samples, dimension]."""
    t, b = q.data.train.arrays
    return t.reshape(q.data.clients, -1), b.reshape(q.data.clients, -1, b.shape[1])


@pytest.mark.parametrize("curvature", [10.0, 2])
@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_every_client_has_the_stated_function(noise: float, curvature: float) -> None:
    q = fs.quadratic_saddle(**OPTIONS, noise=noise, curvature=curvature)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, generator=rng, dtype=torch.float64)
    t, b = parts(q)
    for k in range(6):
        batch = q.data.train.of_client(k)
        t_k, b_k = float(t[k, 0]), b[k].mean(0)

        def f(x: torch.Tensor, y: torch.Tensor, batch: Any = batch) -> torch.Tensor:
            return q.problem.outer(x, y, batch)

        value = 0.5 * curvature * (x @ x) - (0.5 * (y @ y) - b_k @ y + t_k * (y @ x))
        assert float(f(x, y)) == pytest.approx(float(value), abs=1e-12)
        expected = [curvature * x - t_k * y, b_k - y - t_k * x]
        torch.testing.assert_close(slopes(f, x, y), expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(numeric_slopes(f, x, y), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_the_saddle_is_zero(noise: float, seed: int, spread: float) -> None:
    q = fs.quadratic_saddle(**OPTIONS, noise=noise, seed=seed, spread=spread)
    zero = torch.zeros(4, dtype=torch.float64)
    assert q.dual is not None
    assert torch.equal(q.solution, zero)
    assert torch.equal(q.dual, zero)

    def mean(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean_over_clients(q.problem, q.data, x, y)

    for slope in slopes(mean, zero, zero):
        assert float(slope.abs().max()) < 1e-13 * spread
    assert gradient_norm(q.problem, q.data, zero, zero) < 1e-13
    x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    t = float(parts(q)[0].mean())
    torch.testing.assert_close(slopes(mean, x, y), [10.0 * x - t * y, -y - t * x], atol=1e-12, rtol=0)
    best = float(mean(zero, zero))
    assert float(mean(x, zero)) > best > float(mean(zero, y))
    own = [slopes(lambda y, k=k: q.problem.outer(zero, y, q.data.train.of_client(k)), zero)[0] for k in range(6)]
    assert min(float(g.norm()) for g in own) > 0.1 * spread, "the clients disagree"


def test_clients_differ_by_spread_and_their_mean_is_zero() -> None:
    narrow, wide = (fs.quadratic_saddle(clients=400, dimension=5, spread=spread) for spread in (1.0, 10))
    for q, spread in ((narrow, 1.0), (wide, 10.0)):
        b = parts(q)[1][:, 0]
        assert float(b.mean(0).abs().max()) < 1e-13 * spread
        assert float(b.std()) == pytest.approx(spread, rel=0.05)
    torch.testing.assert_close(parts(wide)[1], 10 * parts(narrow)[1], atol=1e-12, rtol=1e-12)
    assert torch.equal(wide.problem.x0, narrow.problem.x0)
    none = fs.quadratic_saddle(**OPTIONS, spread=0.0)
    assert float(parts(none)[1].abs().max()) < 1e-15


@pytest.mark.parametrize("coupling", [0.1, 3.0, 0.0])
def test_couplings_are_in_their_range(coupling: float) -> None:
    t = parts(fs.quadratic_saddle(clients=400, samples=2, coupling=coupling))[0]
    assert torch.equal(t[:, 0], t[:, 1]), "one for each client"
    assert float(t.min()) >= 0
    assert float(t.max()) <= coupling
    assert float(t.mean()) == pytest.approx(coupling / 2, rel=0.1)


def test_noise_is_within_clients_and_keeps_their_functions() -> None:
    plain, noisy = (fs.quadratic_saddle(**OPTIONS, noise=noise) for noise in (0.0, 0.7))
    assert torch.equal(parts(plain)[0], parts(noisy)[0])
    assert float(parts(plain)[1].std(1).max()) == 0.0
    assert float(parts(noisy)[1].std(1).mean()) == pytest.approx(0.7, rel=0.3)
    torch.testing.assert_close(parts(noisy)[1].mean(1), parts(plain)[1].mean(1), atol=1e-14, rtol=0)
    x, y = noisy.problem.x0, noisy.problem.y0
    assert objective(noisy.problem, noisy.data, x, y) == pytest.approx(
        objective(plain.problem, plain.data, x, y), abs=1e-12
    )


def test_the_best_dual() -> None:
    """The gradient in y vanishes there, for one batch, and at the mean over clients for their mean."""
    q = fs.quadratic_saddle(**OPTIONS, noise=0.7)
    assert q.problem.best_y is not None
    x = q.problem.x0
    clients = make_clients(make_setting(q.problem, q.data, batch_size=2), chunk=4)
    batches = [tuple(a[:2] for a in q.data.train.of_client(k)) for k in range(6)]
    for batch in batches:
        found = q.problem.best_y(x, batch)
        slope = slopes(lambda y, batch=batch: q.problem.outer(x, y, batch), found)[0]
        assert float(slope.abs().max()) < 1e-14
    together = clients.mean(lambda client, x: client.best_y(x, client.all_data()), x)
    slope = slopes(lambda y: mean_over_clients(q.problem, q.data, x, y), together)[0]
    assert float(slope.abs().max()) < 1e-13
    torch.testing.assert_close(together, -parts(q)[0].mean() * x, atol=1e-13, rtol=0)


def test_its_sizes_its_seed_and_its_dtype() -> None:
    q = fs.quadratic_saddle(**OPTIONS, dtype=torch.float32)
    assert [tuple(a.shape) for a in q.data.train.arrays] == [(30, 1), (30, 4)]
    assert {a.dtype for a in (*q.data.train.arrays, q.problem.x0, q.problem.y0, q.solution, q.dual)} == {torch.float32}  # type: ignore[union-attr]
    assert (q.problem.name, q.problem.kind) == ("quadratic_saddle", "no inner level, a dual")
    first, again, other = (fs.quadratic_saddle(seed=seed) for seed in (2, 2, 3))
    assert first.data.clients == 50
    for pick in (lambda q: q.problem.x0, lambda q: q.problem.y0, lambda q: parts(q)[0], lambda q: parts(q)[1]):
        assert torch.equal(pick(first), pick(again))
        assert not torch.equal(pick(first), pick(other))
    assert not torch.equal(first.problem.x0, first.problem.y0)  # type: ignore[arg-type]


def test_a_configuration_file_names_it() -> None:
    tables = {
        "problem": {"name": "quadratic_saddle", "clients": 5, "spread": 2.0},
        "algorithm": {"name": "fgda"},
        "train": {"seed": 3},
    }
    experiment = build.Experiment(config.parse(tables, "here"))
    q = fs.quadratic_saddle(clients=5, spread=2.0, seed=3)
    assert torch.equal(experiment.data.train.arrays[1], q.data.train.arrays[1])
    assert torch.equal(experiment.problem.x0, q.problem.x0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, r"The clients of the quadratic_saddle problem must be a whole number of at least 1\. Got 0\."),
        ({"dimension": 2.0}, "The dimension of the quadratic_saddle problem must be a whole number"),
        ({"samples": True}, "The samples of the quadratic_saddle problem must be a whole number"),
        ({"seed": -1}, "The seed of the quadratic_saddle problem must be a whole number of at least 0"),
        ({"spread": -1.0}, r"The spread of the quadratic_saddle problem must be a number of at least 0\. Got -1\.0\."),
        ({"coupling": "a"}, "The coupling of the quadratic_saddle problem must be a number"),
        ({"noise": math.nan}, "The noise of the quadratic_saddle problem must be a number"),
        ({"curvature": -0.5}, "The curvature of the quadratic_saddle problem must be a number of at least 0"),
        ({"curvature": True}, "The curvature of the quadratic_saddle problem must be a number"),
    ],
    ids=str,
)
def test_a_bad_saddle_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fs.InputError, match=message):
        fs.quadratic_saddle(**options)


# --- the distance from the solution ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        fs.quadratic,
        fs.composition,
        lambda **options: fs.composition(**options, inner_mean="global"),
        fs.quadratic_saddle,
    ],
    ids=["quadratic", "composition", "composition, global", "quadratic_saddle"],
)
def test_the_distance_from_a_solution_that_is_known(build: Any) -> None:
    q = build(clients=3, dimension=4)
    assert q.problem.known is not None
    assert q.problem.known[0] is q.solution
    rng = np.random.default_rng(0)
    dx, dy = (torch.from_numpy(rng.normal(size=4)) for _ in range(2))
    y = None if q.dual is None else q.dual + dy
    measured = Evaluation()(q.problem, q.data, q.solution + dx, y)
    square = float(dx @ dx) + (0.0 if y is None else float(dy @ dy))
    assert measured["distance"] == pytest.approx(math.sqrt(square), rel=1e-12)
    assert measured.get("distance_dual") == (None if y is None else pytest.approx(float(dy.norm()), rel=1e-12))
    assert measured.keys() == {"loss", "distance"} | ({"distance_dual"} if y is not None else set())
    assert measured.keys() <= set(MEASURES)
    assert Evaluation()(q.problem, q.data, q.solution, q.dual)["distance"] == 0.0


def test_without_a_known_solution_there_is_no_distance() -> None:
    q = fs.quadratic_saddle(**OPTIONS)
    unknown = fs.Problem(q.problem.outer, q.problem.x0, y0=q.problem.y0)
    assert Evaluation()(unknown, q.data, q.problem.x0, q.problem.y0).keys() == {"loss"}


def test_training_approaches_the_solution_and_reports_the_distance() -> None:
    q = fs.quadratic_saddle(**OPTIONS)
    run = fs.train(q.problem, q.data, fs.LocalSGDA(lr=0.05, dual_lr=0.5, steps=1), rounds=60)
    first, last = run.history[0], run.history[-1]
    start = torch.cat([q.problem.x0, q.problem.y0])  # type: ignore[list-item]
    assert first["distance"] == pytest.approx(float(start.norm()), rel=1e-12)
    assert run.y is not None
    assert last["distance_dual"] == pytest.approx(float(run.y.norm()), rel=1e-12)
    assert last["distance_dual"] <= last["distance"] < 1e-6


def test_another_curvature_is_never_resumed(tmp_path: Path) -> None:
    for curvature, resume in ((10.0, False), (3.0, True)):
        q = fs.quadratic_saddle(clients=3, dimension=2, curvature=curvature)
        run = partial(fs.train, q.problem, q.data, fs.LocalSGDA(steps=2), rounds=2, out=tmp_path / "run", resume=resume)
        if resume:
            with pytest.raises(fs.InputError, match="curvature"):
                run()
        else:
            run()

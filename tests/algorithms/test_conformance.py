"""What every algorithm promises, checked over the whole registry: a new algorithm is covered the day it is added."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
from pathlib import Path

import pytest
import torch

import fedstrata as fs
from fedstrata.algorithms import ALGORITHMS
from support import example_for, play, without_seconds

NAMES = sorted(ALGORITHMS)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}


def numbers_sent(formula: str, **sizes: int) -> int:
    """Evaluate a formula such as ``2*d + K`` without running it as code."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise AssertionError(f"{formula!r} is not a sum of products")

    return value(ast.parse(formula, mode="eval").body)


def participation_of(name: str, share: int | float) -> int | float:
    return 1.0 if ALGORITHMS[name].full_participation else share


def rounds_of(name: str, dtype: torch.dtype, chunk: int, sampling: str) -> dict[str, torch.Tensor]:
    """Three rounds with chunks of at most ``chunk`` clients: the server's vectors."""
    problem, data = example_for(ALGORITHMS[name], dtype)
    options = {"participation": participation_of(name, 5), "batch_size": 4, "sampling": sampling}
    state, _ = play(ALGORITHMS[name](), problem, data, 3, chunk=chunk, **options)
    return dict(state)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("sampling", ["uniform", "epochs"])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_any_size_agree(name: str, sampling: str, dtype: torch.dtype, tolerance: float) -> None:
    alone, three, together = (rounds_of(name, dtype, chunk, sampling) for chunk in (1, 3, 7))
    start = ALGORITHMS[name]().init(example_for(ALGORITHMS[name], dtype)[0])
    assert (alone["x"] - start["x"]).abs().max() > 1e-2
    for vector, expected in alone.items():
        assert expected.dtype == dtype
        for other in (three, together):
            torch.testing.assert_close(other[vector], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1.0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_counted_bytes_are_the_formula(name: str, share: int | float, dtype: torch.dtype) -> None:
    kind = ALGORITHMS[name]
    problem, data = example_for(kind, dtype)
    participation = participation_of(name, share)
    _, counts = play(kind(), problem, data, 2, batch_size=4, participation=participation, chunk=2)
    sizes = {
        "d": len(problem.x0),
        "p": 0 if problem.y0 is None else len(problem.y0),
        "K": len(problem.levels),
    }
    cohort = data.clients if participation == 1.0 else share
    messages = 2 * cohort * problem.x0.element_size()
    assert counts.bytes_up == messages * numbers_sent(kind.up, **sizes)
    assert counts.bytes_down == messages * numbers_sent(kind.down, **sizes)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.plots.plot", lambda *_, **__: None)  # drawing costs more than these runs
    kind = ALGORITHMS[name]
    problem, data = example_for(kind)
    options = {
        "batch_size": 4,
        "participation": participation_of(name, 3),
        "sampling": "epochs",
        "chunk": 2,
        "eval_every": 1,
    }
    straight = fs.train(problem, data, kind(), rounds=6, **options)
    fs.train(problem, data, kind(), rounds=3, out=tmp_path / "run", **options)
    resumed = fs.train(problem, data, kind(), rounds=6, out=tmp_path / "run", resume=True, **options)
    assert torch.equal(resumed.x, straight.x)
    if straight.y is not None:
        assert torch.equal(resumed.y, straight.y)
    assert [row["round"] for row in straight.history] == list(range(7))
    assert without_seconds(resumed.history) == without_seconds(straight.history)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_is_a_frozen_set_of_explained_hyperparameters(name: str) -> None:
    kind = ALGORITHMS[name]
    algorithm = kind()
    fields = dataclasses.fields(algorithm)
    assert fields
    for field in fields:
        assert field.metadata.get("doc"), f"{field.name} of {name} has no explanation"
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(algorithm, field.name, getattr(algorithm, field.name))
    assert kind() == algorithm
    assert fs.algorithm(name) == algorithm


@pytest.mark.parametrize("name", NAMES)
def test_the_file_tells_where_the_algorithm_comes_from(name: str) -> None:
    kind = ALGORITHMS[name]
    assert kind.name == name
    assert kind.__module__ == f"fedstrata.algorithms.{name}"
    module = inspect.getmodule(kind)
    text = module.__doc__ if module is not None else None
    assert text is not None
    for heading in ("Problem:", "Sent:", "Departures from the paper:"):
        assert heading in text
    assert kind.__bases__ == (fs.Algorithm,)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_is_what_the_file_says(name: str) -> None:
    module = inspect.getmodule(ALGORITHMS[name])
    assert module is not None
    (line,) = [line for line in str(module.__doc__).splitlines() if line.startswith("Sent:")]
    said = dict(part.split(maxsplit=1) for part in line.removeprefix("Sent: ").split(".")[0].split(", "))
    spaceless = {way: formula.replace("*", "").replace(" ", "") for way, formula in said.items()}
    for way in ("up", "down"):
        assert spaceless[way] == getattr(ALGORITHMS[name], way).replace("*", "").replace(" ", "")


def other_problem(kind: type[fs.Algorithm]) -> fs.Problem:
    """A problem outside the algorithm's class: with a dual if it wants none, and the other way round."""
    x0 = torch.zeros(2)

    def saddle(u: torch.Tensor, y: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return u @ y

    def plain(u: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return u @ u

    return fs.Problem(plain, x0, name="other") if kind.dual else fs.Problem(saddle, x0, y0=x0, name="other")


@pytest.mark.parametrize("name", NAMES)
def test_a_problem_of_another_class_is_refused(name: str) -> None:
    kind = ALGORITHMS[name]
    problem = other_problem(kind)
    with pytest.raises(fs.InputError) as refused:
        kind().check(problem, 1.0, 5)
    message = str(refused.value)
    assert message.startswith(f"{name} does not solve the problem 'other' ({problem.kind}).")
    named = message.split("Algorithms that do: ")[1].rstrip(".").split(", ")
    assert named == (sorted(n for n, a in ALGORITHMS.items() if a.solves(problem)) or ["none"])
    assert name not in named


@pytest.fixture(scope="module")
def digits() -> fs.FederatedData:
    return fs.data.digits().split(fs.partition.dirichlet(0.5), clients=8, seed=0)


@pytest.mark.parametrize("name", [n for n in NAMES if ALGORITHMS[n].solves(fs.quadratic().problem)])
def test_default_hyperparameters_learn_digits(name: str, digits: fs.FederatedData) -> None:
    problem = fs.erm(fs.models.model("logreg", (1, 8, 8), 10))
    run = fs.train(problem, digits, ALGORITHMS[name](), rounds=5, batch_size=16, eval_every=5)
    first, last = run.history[0], run.history[-1]
    assert first["loss"] == pytest.approx(2.302585, abs=1e-4)  # log 10: the model starts at zero
    assert last["loss"] < 0.8 * first["loss"]
    assert last["accuracy"] > 0.6

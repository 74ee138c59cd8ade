"""Budgets and early stopping: when a run ends, what it returns, and that resuming changes nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata as fs
from fedstrata.problems.runner import TRACING
from fedstrata.training.callbacks import Callback
from fedstrata.training.metrics.catalogue import measure
from fedstrata.training.stopping import best_row
from support import without_seconds

ROUNDS = 12


def sites(rows: int = 40, noise: float = 0.0) -> fs.FederatedData:
    """Return three clients whose labels depend on the first of four features, some of them wrong."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(3):
        inputs = torch.randn(rows, 4, generator=generator)
        flipped = torch.rand(rows, generator=generator) < noise
        pairs.append((inputs, ((inputs[:, 0] > 0) ^ flipped).long()))
    return fs.FederatedData.from_arrays(pairs)


def train(data: fs.FederatedData | None = None, lr: float = 0.1, **settings: Any) -> fs.Run:
    net = fs.models.model("mlp", (4,), 2, hidden=[32], seed=0)
    options = {"rounds": ROUNDS, "batch_size": 5, "eval_every": 1} | settings
    return fs.train(fs.erm(net, prior=False), sites() if data is None else data, fs.FedAvg(lr=lr, steps=2), **options)


@pytest.mark.parametrize(
    ("option", "counts"), [("max_samples", ["samples"]), ("max_bytes", ["bytes_up", "bytes_down"])]
)
def test_a_budget_is_used_up_and_not_exceeded(option: str, counts: list[str]) -> None:
    whole = train()
    per_round = sum(whole.history[1][count] for count in counts)
    for limit, rounds in ((5 * per_round, 5), (5 * per_round - 1, 4), (1, 1), (100 * per_round, ROUNDS)):
        run = train(**{option: limit})
        assert run.history[-1]["round"] == rounds
        assert run.summary.get("stopped_by") == (None if rounds == ROUNDS else option)
        assert run.summary["status"] == "finished"
        assert without_seconds(run.history) == without_seconds(whole.history[: rounds + 1])


def test_seconds_are_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a slow evaluation nor tracing counts."""

    def slow(*args: Any) -> dict[str, float]:
        time.sleep(0.05)
        return {"loss": 1.0}

    before = TRACING.seconds
    run = train(rounds=4, evaluate=slow)
    last = run.history[-1]
    assert TRACING.seconds > before
    assert last["total_seconds"] >= last["seconds"] + 4 * 0.05
    assert last["total_seconds"] >= last["seconds"] + TRACING.seconds - before
    assert last["seconds"] > run.history[1]["seconds"] > 0


class Slow(Callback):
    """Takes time outside of training."""

    def on_round(self, round: int, state: Any) -> None:
        time.sleep(0.02)


def test_max_seconds_counts_training_only() -> None:
    run = train(max_seconds=60.0, callbacks=[Slow()])
    assert run.history[-1]["round"] == ROUNDS
    run = train(max_seconds=1e-6)
    assert run.history[-1]["round"] == 1 and run.summary["stopped_by"] == "max_seconds"


def test_patience_returns_the_best_model() -> None:
    data = sites(noise=0.2)
    run = train(data, lr=0.5, rounds=60, patience=5, watch="loss", validation=0.5)
    best = best_row(run.history)
    values = [row["validation_loss"] for row in run.history]
    assert run.summary["stopped_by"] == "patience" and values[best] == min(values)
    assert len(run.history) - 1 - best == 5
    assert best > 0
    assert (run.summary["best_round"], run.summary["round"]) == (best, best + 5)
    assert run.summary["loss"] == run.history[best]["loss"] != run.history[-1]["loss"]
    until_best = train(data, lr=0.5, rounds=60, patience=5, watch="loss", validation=0.5, max_samples=30 * best)
    assert torch.equal(run.x, until_best.x)  # the budget ends this run right after the best round
    assert run.final["bytes_up"] == run.history[-1]["bytes_up"]


def test_validation_rows_are_not_trained_on() -> None:
    run = train(rounds=1, patience=3, batch_size=None)
    assert run.history[-1]["samples"] == 2 * 3 * 32  # two steps on 80 % of 40 rows at each of three clients


def test_the_measure_to_watch_is_checked() -> None:
    with pytest.raises(fs.InputError, match=r"Unknown measure 'ac'.*accuracy"):
        train(patience=2, watch="ac")
    assert measure("validation_auc").higher_is_better and not measure("validation_loss").higher_is_better
    assert "validation_accuracy" not in train(rounds=1).history[0]
    assert "validation_auc" in train(rounds=1, patience=1).history[0]


@pytest.mark.parametrize("settings", [{"patience": 4, "watch": "loss", "validation": 0.5}, {"max_samples": 400}])
def test_a_stopped_run_resumes_exactly(tmp_path: Path, settings: dict[str, Any]) -> None:
    data = sites(noise=0.2)
    straight = train(data, lr=0.5, rounds=40, **settings)
    train(data, lr=0.5, rounds=3, **settings, out=tmp_path / "run")
    for _ in range(2):  # the second time there is nothing left to do
        run = train(data, lr=0.5, rounds=40, **settings, out=tmp_path / "run", resume=True)
        assert torch.equal(run.x, straight.x)
        assert without_seconds(run.history) == without_seconds(straight.history)
        assert run.summary["stopped_by"] == straight.summary["stopped_by"]


def test_a_run_that_diverges_carries_its_history() -> None:
    with pytest.raises(fs.Diverged) as caught:
        train(lr=1e30)
    assert caught.value.history[0]["round"] == 0

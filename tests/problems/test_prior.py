"""A fair start: the output bias at the log-odds of the classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedstrata as fs
from fedstrata.problems.prior import find_output_bias, log_odds

COUNTS = ((30, 2), (10, 6), (24, 0))
"""Rows of each class at each client."""


def sites(classes: int = 2) -> fs.FederatedData:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for counts in COUNTS:
        labels = torch.cat([torch.full((n,), c) for c, n in enumerate(counts)])
        pairs.append((torch.randn(len(labels), 4, generator=generator), labels))
    return fs.FederatedData.from_arrays(pairs, classes=classes)


def started(problem: fs.Problem, data: fs.FederatedData | None = None, **settings: Any) -> torch.Tensor:
    """Return the starting point of a run: its solution after a round with a rate of almost 0."""
    return fs.train(problem, data or sites(), fs.FedAvg(lr=1e-30, steps=1), rounds=1, **settings).x


SHARE = float(np.mean([b / (a + b) for a, b in COUNTS]))


def test_one_output_starts_at_the_logit_of_the_mean_share_of_positives() -> None:
    net = nn.Linear(4, 1, dtype=torch.float64)
    x = started(fs.erm(net, "binary_cross_entropy"))
    assert float(x[-1]) == pytest.approx(math.log(SHARE / (1 - SHARE)), rel=1e-6)
    assert torch.equal(x[:-1], net.weight.detach().flatten())


def test_clients_are_weighted_as_the_run_weights_them() -> None:
    x = started(fs.erm(nn.Linear(4, 1), "binary_cross_entropy"), weighting="samples")
    share = 8 / 72
    assert float(x[-1]) == pytest.approx(math.log(share / (1 - share)), rel=1e-5)


def test_several_outputs_predict_the_shares() -> None:
    x = started(fs.erm(nn.Linear(4, 3, dtype=torch.float64)), sites(3))
    shares = x[-3:].softmax(0)
    assert float(shares[1]) == pytest.approx(SHARE * (1 - 1e-4), rel=1e-3)
    assert float(shares[2]) == pytest.approx(1e-4, rel=0.01), "a class that nobody has"
    assert float(x[-3:].sum()) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("build", [fs.robust, fs.maml, fs.damaml, fs.risk_averse])
def test_other_problems_start_there_too(build: Any) -> None:
    net = nn.Linear(4, 1)
    algorithm = fs.LocalSMCGDAM(gamma_x=1e-30, steps=1) if build is fs.risk_averse else fs.ComFedL(lr=1e-30, steps=1)
    run = fs.train(build(net, loss="binary_cross_entropy"), sites(), algorithm, rounds=1)
    assert float(run.x[4]) == pytest.approx(math.log(SHARE / (1 - SHARE)), rel=1e-5)


def test_a_problem_asks_for_what_it_needs_after_the_class_counts(tmp_path: Path) -> None:
    """The shift of ``robust`` comes from the losses at the new starting point; a resumed run knows both answers."""
    net = nn.Linear(4, 1, dtype=torch.float64)
    problem = fs.robust(net, loss="binary_cross_entropy", gamma=0.5)
    algorithm = fs.ComFedL(lr=0.1, steps=2)
    straight = fs.train(problem, sites(), algorithm, rounds=4)
    fs.train(problem, sites(), algorithm, rounds=2, out=tmp_path / "run")
    resumed = fs.train(problem, sites(), algorithm, rounds=4, out=tmp_path / "run", resume=True)
    assert torch.equal(straight.x, resumed.x)
    moved = nn.Linear(4, 1, dtype=torch.float64)
    moved.load_state_dict(net.state_dict())
    with torch.no_grad():
        moved.bias.fill_(math.log(SHARE / (1 - SHARE)))
    by_hand = fs.robust(moved, loss="binary_cross_entropy", gamma=0.5, prior=False)
    torch.testing.assert_close(straight.x, fs.train(by_hand, sites(), algorithm, rounds=4).x, rtol=1e-6, atol=1e-9)


class Scaled(nn.Module):
    """A model whose last layer is not the one of the outputs, and whose outputs have no plain bias."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)
        self.hidden = nn.Linear(4, 3)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.out(self.hidden(x).relu())


def test_the_bias_is_found_by_what_it_does() -> None:
    for scale, found in ((1.0, slice(6, 8)), (2.0, None)):
        flat = fs.erm(Scaled(scale)).flat
        assert flat is not None
        inputs = torch.randn(2, 4)
        assert find_output_bias(flat, flat(flat.initial, inputs), inputs) == found
    net = Scaled(2.0)
    start = started(fs.erm(net))
    assert torch.equal(start, fs.erm(net).x0), "a model without such a bias starts as it is"


def test_nothing_is_asked_for_where_it_must_not_be() -> None:
    net = nn.Linear(4, 1)
    own = fs.erm(net, "binary_cross_entropy").x0
    assert torch.equal(started(fs.erm(net, "binary_cross_entropy", prior=False)), own)
    private = fs.Channel(clip=1.0, noise=1.0)
    problem = fs.erm(net, "binary_cross_entropy")
    run = fs.train(problem, sites(), fs.FedAvg(lr=1e-30, steps=1), rounds=1, channel=private)
    assert run.history[0]["bytes_up"] == 0, "noise protects clients: their class counts are not asked for"
    trained = fs.train(problem, sites(), fs.FedAvg(lr=0.5, steps=5), rounds=3)
    again = fs.erm(trained.model(), "binary_cross_entropy")
    assert torch.equal(started(again), trained.x), "a trained model keeps its bias"


def test_the_counts_are_asked_for_once() -> None:
    run = fs.train(fs.erm(nn.Linear(4, 2, dtype=torch.float64)), sites(), fs.FedAvg(), rounds=2)
    assert run.history[0]["bytes_up"] == len(COUNTS) * 2 * 8 and run.history[0]["bytes_down"] == 0


def test_log_odds() -> None:
    assert float(log_odds(torch.tensor([0.75, 0.25]), 1)) == pytest.approx(math.log(1 / 3))
    assert float(log_odds(torch.tensor([1.0, 0.0]), 1)) == pytest.approx(math.log(1e-4))
    torch.testing.assert_close(log_odds(torch.tensor([0.5, 0.25, 0.25]), 3).softmax(0), torch.tensor([0.5, 0.25, 0.25]))

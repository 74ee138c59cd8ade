"""Noise: how it is drawn, what it cannot protect, and the epsilon it gives."""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten

import fedstrata as fs
from clients.distributed_worker import Case
from clients.squares import LR, SIZES, engine, train
from fedstrata.clients import Usage
from fedstrata.clients.engine import Reduced
from fedstrata.clients.privacy import epsilon
from fedstrata.clients.reduce import noisy
from support import mixture_of, sized_data, smooth_example, without_seconds

pytestmark = [pytest.mark.usefixtures("no_pictures"), pytest.mark.untraced]


# --- noise -----------------------------------------------------------------------------------------------------------

WIDE = 4000


@cache
def wide() -> tuple[fs.Problem, fs.FederatedData]:
    """A problem of many numbers, so that noise has a mean and a variance."""

    def outer(x: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return 0.5 * ((x - batch[0]) ** 2).mean(0).sum()

    draw = np.random.default_rng(1)
    pairs = [(draw.normal(size=(n, WIDE)), np.zeros(n)) for n in SIZES]
    return fs.Problem(outer, torch.zeros(WIDE, dtype=torch.float64), name="wide"), fs.FederatedData.from_arrays(pairs)


def noise_of(channel: fs.Channel, rounds: int = 1, **options: Any) -> list[torch.Tensor]:
    """What noise adds to the mean of each round."""
    problem, data = wide()
    algorithm = fs.FedAvg(lr=LR, steps=2)
    means = []
    for noise in (channel.noise, 0.0):
        clients = engine(problem, data, fs.Channel(clip=channel.clip, noise=noise), **options)
        with torch.no_grad():
            found = []
            for r in range(rounds):
                clients.begin(r)
                found.append(clients.mean(algorithm.local, problem.x0))
        means.append(found)
    return [noisy - quiet for noisy, quiet in zip(*means, strict=True)]


def looks_normal(noise: torch.Tensor, deviation: float) -> None:
    """Mean, variance and fourth moment within five standard errors."""
    z = noise.numpy() / deviation
    assert abs(z.mean()) < 5 / math.sqrt(len(z))
    assert abs((z**2).mean() - 1) < 5 * math.sqrt(2 / len(z))
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / len(z))


@pytest.mark.parametrize("sampled", [6, 4])
def test_noise_is_normal_with_a_deviation_of_one_client(sampled: int) -> None:
    for noise in noise_of(fs.Channel(clip=0.7, noise=1.3), 2, participation=sampled):
        looks_normal(noise, 1.3 * 0.7 / sampled)


def test_noise_is_in_units_of_the_heaviest_client() -> None:
    """In a weighted mean, which a run with noise never takes."""
    weights = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    mean, shape = tree_flatten((torch.ones(WIDE, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)))
    for answered in (range(6), (0, 1, 4)):
        mask = np.isin(np.arange(6), list(answered))
        found = noisy(
            fs.Channel(clip=0.7, noise=1.3), Reduced(mean, shape, ("mean",) * 2, Usage(), mask), weights, (1,)
        )
        wide, small = found.tree
        sizes = [SIZES[k] for k in answered]
        looks_normal(wide - 1, 1.3 * 0.7 * max(sizes) / sum(sizes))
        assert small.shape == (2, 3) and small.abs().min() > 0


def test_noise_does_not_go_with_weights_by_samples() -> None:
    with pytest.raises(fs.InputError, match=r"^The weighting must be 'uniform' if the channel has noise"):
        train(fs.Channel(clip=1.0, noise=1.0), weighting="samples")
    train(fs.Channel(clip=1.0), rounds=1, weighting="samples")


def test_noise_does_not_go_with_means_taken_beside_maxima() -> None:
    with pytest.raises(fs.InputError, match=r"^The weighting must be 'uniform' if the channel has noise"):
        train(fs.Channel(clip=1.0, noise=1.0), algorithm=fs.FedLALR(steps=1), weighting="samples")
    train(fs.Channel(clip=1.0, noise=1.0), rounds=1, algorithm=fs.FedLALR(steps=1))


def test_noise_is_of_its_seed_and_round_and_of_nothing_else() -> None:
    channel = fs.Channel(clip=0.7, noise=1.3)
    first, second = noise_of(channel, 2)
    for chunk in (1, 4):
        again = noise_of(channel, 2, chunk=chunk)
        torch.testing.assert_close(again, [first, second], atol=1e-12, rtol=0)
    (other,) = noise_of(channel, seed=1)
    for one, two in ((first, second), (first, other)):
        assert abs(np.corrcoef(one.numpy(), two.numpy())[0, 1]) < 5 / math.sqrt(WIDE)


def test_noise_of_two_exchanges_of_a_round_differs() -> None:
    problem, data = wide()
    clients, quiet = (engine(problem, data, fs.Channel(clip=0.7, noise=noise)) for noise in (1.0, 0.0))
    with torch.no_grad():
        algorithm = fs.FedAvg(lr=LR, steps=1)
        base = quiet.mean(algorithm.local, problem.x0)
        one, two = (clients.mean(algorithm.local, problem.x0) - base for _ in range(2))
    assert abs(np.corrcoef(one.numpy(), two.numpy())[0, 1]) < 5 / math.sqrt(WIDE)
    assert clients.engine.ledger.releases == {"2 of 6": 1}


def test_runs_with_one_seed_have_the_same_bits() -> None:
    channel = fs.Channel(clip=1.0, noise=0.5)
    one, two, other = (train(channel, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.x, two.x)
    assert not torch.equal(one.x, other.x)


def test_a_maximum_has_no_noise() -> None:
    problem, data = smooth_example()
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=r"cannot protect the elementwise maximum of what local of fedlalr returns"):
        fs.train(problem, data, fs.FedLALR(aggregate="max"), rounds=1, channel=channel)
    assert fs.train(problem, data, fs.FedLALR(aggregate="mean"), rounds=1, channel=channel).summary["epsilon"] > 0


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (fs.AFL, "cannot protect gradient of afl, which shows the server the answer of every single client"),
        (fs.DRFA, "cannot protect local of drfa: its clients are drawn by weights"),
    ],
)
def test_what_single_clients_answer_has_no_noise(kind: type[fs.Algorithm], wanted: str) -> None:
    problem, data = smooth_example()
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=wanted):
        fs.train(mixture_of(problem, data.clients), data, kind(), rounds=1, channel=channel)


def test_a_problem_that_asks_single_clients_is_refused_under_noise() -> None:
    data = sized_data([6, 7, 8], classes=2)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    channel = fs.Channel(clip=1.0, noise=1.0)
    with pytest.raises(fs.InputError, match=r"cannot protect class_counts, which shows .*pass the problem the values"):
        fs.train(fs.auc(model), data, fs.LocalSGDA(), rounds=1, channel=channel)
    assert fs.train(fs.auc(model, p=0.5), data, fs.LocalSGDA(), rounds=1, channel=channel).summary["epsilon"] > 0
    softmax = torch.nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(fs.InputError, match="cannot protect first_loss"):
        fs.train(fs.robust(softmax), data, fs.ComFedL(), rounds=1, channel=channel)


def test_noise_does_not_cover_a_pretraining() -> None:
    before = train(fs.Channel())
    with pytest.raises(fs.InputError, match="does not cover a pre-training"):
        train(fs.Channel(clip=1.0, noise=1.0), pretrain=before)


def test_noise_and_a_pretraining_are_refused_before_either(fedstrata: Any, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        '[data]\nclients = 4\n[model]\nname = "logreg"\n[train]\nrounds = 1\n[pretrain]\nrounds = 1\n'
        "[channel]\nclip = 1.0\nnoise = 1.0\n"
    )
    code, _, err = fedstrata("run", file, "--out", tmp_path / "run")
    assert code == 2 and "does not cover a pre-training" in err
    assert "round" not in err and not (tmp_path / "run").exists()


def test_noise_without_an_accountant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(fs.InputError, match=r"^Noise needs the package dp-accounting: pip install "):
        train(fs.Channel(clip=1.0, noise=1.0))
    train(fs.Channel(clip=1.0), rounds=1)


# --- epsilon --------------------------------------------------------------------------------------------------------


EPSILONS = [
    # By dp_accounting 0.6.0's RdpAccountant with REPLACE_ONE, called by hand, multipliers halved.
    (fs.Channel(clip=1.0, noise=4.0), {"1 of 10": 1}, 10, 2.165715659029443),
    (fs.Channel(clip=9.0, noise=6.0), {"1 of 10": 100}, 100, 3.2174992613767284),
    (fs.Channel(clip=1.0, noise=6.0), {"2 of 7": 5}, 7, 5.023949750348651),
    (fs.Channel(clip=1.0, noise=8.0, delta=1e-4), {"4 of 7": 3}, 7, 3.5297387000351286),
    (fs.Channel(clip=1.0, noise=8.0), {"3 of 5": 20}, 50, 1.84649598232127),
]


@pytest.mark.parametrize(("channel", "releases", "clients", "expected"), EPSILONS)
def test_epsilon_is_that_of_the_library(
    channel: fs.Channel, releases: dict[str, int], clients: int, expected: float
) -> None:
    assert epsilon(channel, releases, clients) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("noise", "exchanges"), [(4.0, 1), (6.0, 10), (2.0, 3)])
def test_epsilon_is_no_less_than_that_of_the_gaussian_mechanism(noise: float, exchanges: int) -> None:
    """Balle and Wang (2018), Theorem 8: delta = Phi(1 / 2s - e s) - exp(e) Phi(-1 / 2s - e s), for a shift of 1."""
    s, phi = noise / 2 / math.sqrt(exchanges), NormalDist().cdf
    claimed = epsilon(fs.Channel(clip=1.0, noise=noise), {f"{exchanges} of 9": 1}, 9)

    def delta(e: float) -> float:
        return phi(0.5 / s - e * s) - math.exp(e) * phi(-0.5 / s - e * s)

    assert delta(claimed) < 1e-5 < delta(0.85 * claimed)  # sound, and not far from the best that can be said


@pytest.mark.slow
def test_epsilon_falls_with_noise_and_grows_with_what_is_released() -> None:
    def worth(noise: float, releases: dict[str, int], clients: int = 5, delta: float = 1e-5) -> float:
        return epsilon(fs.Channel(clip=1.0, noise=noise, delta=delta), releases, clients)

    assert worth(4.0, {}) == 0.0
    assert 0 < worth(5.0, {"1 of 5": 10}) < worth(5.0, {"1 of 5": 11}) < worth(5.0, {"2 of 5": 11})
    assert worth(5.0, {"1 of 5": 10}) < worth(4.0, {"1 of 5": 10})
    assert worth(5.0, {"1 of 5": 10}) < worth(5.0, {"1 of 5": 10}, delta=1e-6)
    assert worth(5.0, {"1 of 5": 10}, 50) < worth(5.0, {"1 of 5": 10, "1 of 50": 1}, 50) < worth(5.0, {"1 of 5": 10})
    assert worth(5.0, {"2 of 5": 3}) == pytest.approx(worth(5.0, {"1 of 5": 6}))


def test_a_run_of_sampled_clients_reports_its_epsilon(tmp_path: Path) -> None:
    data = sized_data([2] * 100, features=2)
    problem = fs.erm(torch.nn.Linear(2, 2, dtype=torch.float64))
    channel = fs.Channel(clip=0.1, noise=6.0, delta=1e-5)
    how: dict[str, Any] = {"participation": 10, "evaluate": lambda *_: {}, "eval_every": 100, "checkpoint_every": 100}
    run = fs.train(problem, data, fs.FedAvg(steps=1), rounds=100, channel=channel, out=tmp_path / "run", **how)
    assert [row["epsilon"] for row in run.history] == [0.0, pytest.approx(3.2174992613767284, rel=1e-6)]
    assert run.summary["epsilon"] == run.history[-1]["epsilon"]
    assert run.summary["delta"] == 1e-5


def test_epsilon_grows_and_survives_a_stop(tmp_path: Path) -> None:
    channel = fs.Channel(clip=1.0, noise=4.0)
    straight = train(channel, 4, eval_every=1)
    found = [row["epsilon"] for row in straight.history]
    assert found[:2] == [0.0, pytest.approx(2.165715659029443, rel=1e-6)]
    assert found == sorted(set(found))
    train(channel, 2, eval_every=1, out=tmp_path / "run")
    resumed = train(channel, 4, eval_every=1, out=tmp_path / "run", resume=True)
    assert torch.equal(resumed.x, straight.x)
    assert without_seconds(resumed.history) == without_seconds(straight.history)
    assert without_seconds([resumed.summary]) == without_seconds([straight.summary])


def test_without_noise_there_is_no_epsilon() -> None:
    run = train(fs.Channel(clip=1.0))
    assert not {"epsilon", "delta"} & {*run.summary, *run.history[-1]}


EXCHANGES = [
    ("fedavg", {}, "example", {"1 of 7": 3}),
    ("fednest", {}, "example", {"4 of 7": 3}),
    ("fednest", {"inner_rounds": 3}, "example", {"8 of 7": 3}),
    ("fgda", {"synchronisation": "single"}, "example", {"1 of 7": 4}),  # before the first round there is one more
    ("local_sgdam", {}, "example", {"1 of 7": 4}),
    ("cdma", {}, "example", {"1 of 7": 6}),  # of two cohorts
    ("mfcgd", {}, "example", {"1 of 7": 3}),  # what is asked for before the first round is not sent
]


@pytest.mark.parametrize(
    ("name", "options", "problem", "releases"), EXCHANGES, ids=[f"{n} {o}" for n, o, *_ in EXCHANGES]
)
def test_exchanges_of_a_cohort_are_counted_together(
    name: str, options: dict[str, Any], problem: str, releases: dict[str, int]
) -> None:
    channel = fs.Channel(clip=1.0, noise=8.0, delta=1e-4)
    case = Case(name, options, problem)
    built, data = case.build()
    run = fs.train(built, data, case.algorithm, rounds=3, batch_size=4, channel=channel, evaluate=lambda *_: {})
    assert run.summary["epsilon"] == pytest.approx(epsilon(channel, releases, 7), rel=1e-12)
    if releases == {"4 of 7": 3}:
        assert run.summary["epsilon"] == pytest.approx(3.5297387000351286, rel=1e-6)


def test_epsilon_is_printed(fedstrata: Any, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(
        '[data]\nclients = 4\n[model]\nname = "logreg"\n[train]\nrounds = 1\n[channel]\nclip = 1.0\nnoise = 4.0\n'
    )
    code, out, err = fedstrata("run", file)
    assert code == 0, err
    assert "epsilon" in out and "2.16" in out
    assert "epsilon" in err.splitlines()[-1]

"""Verdicts: how often a method is declared different from itself, and how often a real difference is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedstrata as fs
from fedstrata.experiments.influence import auc_influence
from fedstrata.experiments.judge import Difference, difference, differences, holm, interval
from fedstrata.experiments.methods import Outcome
from fedstrata.training.metrics.measures import auc

ROWS = 200


def outcome(label: str, seed: int, score: np.ndarray, target: np.ndarray, mark: float = 0.0) -> Outcome:
    """Return a run with these scores on the test rows."""
    fewest = min(int(target.sum()), int((1 - target).sum()))
    about = {"training_rows": np.array([10**9]), "fewest": np.array([fewest])}
    rows = {"auc": auc_influence(score, target), "mark": np.arange(len(target)) + mark, **about}
    return Outcome(label, seed, [], {"auc": auc(score, target)}, {}, None, rows)


def pretend(
    generator: np.random.Generator, seeds: int, gains: dict[str, float], shared: bool = True
) -> dict[str, list[Outcome]]:
    """Return runs of methods whose scores differ by ``gain`` in how far positives are above negatives.

    Every seed adds its own noise to the model of a method, and every test row has its own difficulty, the same for all
    methods. The test rows are the same for all seeds, or drawn anew for each.
    """
    target = (np.arange(ROWS) % 4 == 0).astype(np.int64)
    hard = generator.normal(size=ROWS)
    groups: dict[str, list[Outcome]] = {label: [] for label in gains}
    for seed in range(seeds):
        if not shared:
            hard = generator.normal(size=ROWS)
        for label, gain in gains.items():
            skill = 1.0 + gain + 0.15 * generator.normal()
            score = skill * target + hard + 0.5 * generator.normal(size=ROWS)
            groups[label].append(outcome(label, seed, score, target, 0.0 if shared else seed))
    return groups


def binomial_bounds(rate: float, trials: int) -> tuple[float, float]:
    low, high = stats.binom.ppf((0.0005, 0.9995), trials, rate) / trials
    return float(low), float(high)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["same test rows", "test rows of each seed"])
@pytest.mark.parametrize("seeds", [3, 5, 20])
def test_a_method_is_rarely_declared_different_from_itself(seeds: int, shared: bool) -> None:
    """The rate of false verdicts is at most the level, up to chance; and it is not zero, so the test has power."""
    generator = np.random.default_rng(seeds)
    trials = 600
    judged = [
        difference(*(group for group in pretend(generator, seeds, {"a": 0, "b": 0}, shared).values()), "auc")
        for _ in range(trials)
    ]
    rate = np.mean([one.verdict != "undecided" for one in judged])
    low, high = binomial_bounds(0.05, trials)
    assert rate <= high
    assert rate >= (low if not shared else 0.002)  # rows that all seeds share also add to the variance of the seeds
    covered = np.mean([one.low <= 0 <= one.high for one in judged if one.low is not None and one.high is not None])
    assert covered == pytest.approx(1 - rate, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 10])
def test_seeds_that_split_the_same_rows_do_not_make_a_verdict(seeds: int) -> None:
    """Two methods of equal accuracy, measured on a fifth of 300 rows that every seed draws anew."""
    generator = np.random.default_rng(seeds)
    wrong = 0
    for _ in range(400):
        right = generator.random((2, 300)) < 0.8
        groups: list[list[Outcome]] = [[], []]
        for seed in range(seeds):
            rows = generator.permutation(300)[:60]
            for group, values, label in zip(groups, right[:, rows].astype(float), "ab", strict=True):
                about = {"mark": np.sort(rows), "training_rows": np.array([240]), "fewest": np.array([60])}
                final = {"accuracy": float(values.mean())}
                group.append(Outcome(label, seed, [], final, {}, None, {"accuracy": values - values.mean(), **about}))
        wrong += difference(groups[1], groups[0], "accuracy").verdict != "undecided"
    assert wrong / 400 <= binomial_bounds(0.05, 400)[1]


@pytest.mark.slow
@pytest.mark.parametrize("positives", [2, 5, 30])
def test_few_positives_do_not_make_a_verdict(positives: int) -> None:
    """Seeds that give the same scores: all chance is in the test rows."""
    generator = np.random.default_rng(positives)
    target = (np.arange(10 * positives + positives) < positives).astype(np.int64)
    wrong = 0
    for _ in range(400):
        scores = [generator.normal(size=len(target)) + target for _ in range(2)]
        groups = [[outcome(k, seed, s, target) for seed in range(3)] for k, s in zip("ab", scores, strict=True)]
        wrong += difference(groups[1], groups[0], "auc").verdict != "undecided"
    assert wrong / 400 <= binomial_bounds(0.08, 400)[1]


def test_methods_with_other_test_data_are_not_judged() -> None:
    generator = np.random.default_rng(0)
    groups = pretend(generator, 3, {"a": 0.0, "b": 0.0})
    moved = [replace(o, rows={**(o.rows or {}), "mark": np.arange(ROWS) + 0.5}) for o in groups["b"]]
    judged = differences({"a": groups["a"], "b": moved}, "a", "auc")
    assert judged == {"b": "b and a were measured on different test data: no verdict."}


@pytest.mark.slow
def test_a_percentile_bootstrap_over_five_seeds_would_not_do() -> None:
    """What the docstring of the module says."""
    generator = np.random.default_rng(0)
    draws = generator.integers(0, 5, size=(1000, 5))
    found = 0
    for _ in range(600):
        gains = generator.normal(size=5)
        low, high = np.quantile(gains[draws].mean(1), [0.025, 0.975])
        found += low > 0 or high < 0
    assert found / 600 > 0.1


@pytest.mark.slow
def test_a_known_difference_is_found_with_the_power_of_the_t_test() -> None:
    generator = np.random.default_rng(1)
    trials, seeds, gain = 300, 8, 0.3
    judged = [
        difference(groups["b"], groups["a"], "auc")
        for groups in (pretend(generator, seeds, {"a": 0.0, "b": gain}, shared=False) for _ in range(trials))
    ]
    gains = np.array([one.gain for one in judged])
    mean, spread = gains.mean(), gains.std(ddof=1) * math.sqrt(seeds)
    freedom, limit = seeds - 1, stats.t.ppf(0.975, seeds - 1)
    power = stats.nct.sf(limit, freedom, mean / spread * math.sqrt(seeds))
    low, high = binomial_bounds(float(power), trials)
    found = np.mean([one.verdict == "ahead" for one in judged])
    assert power > 0.6 and low - 0.03 <= found <= high + 0.03
    assert not any(one.verdict == "behind" for one in judged)


@pytest.mark.slow
def test_with_many_methods_one_false_verdict_in_twenty_comparisons_is_the_most() -> None:
    generator = np.random.default_rng(2)
    labels = {f"m{i}": 0.0 for i in range(8)}
    wrong = 0
    for _ in range(200):
        judged = differences(pretend(generator, 6, labels), "m0", "auc")
        wrong += any(isinstance(d, Difference) and d.verdict != "undecided" for d in judged.values())
    assert wrong / 200 <= binomial_bounds(0.05, 200)[1]


def test_the_variance_over_rows_is_that_of_the_bootstrap() -> None:
    generator = np.random.default_rng(3)
    groups = pretend(generator, 4, {"a": 0.0, "b": 0.4})
    target = (np.arange(ROWS) % 4 == 0).astype(np.int64)
    scores = {label: [generator.normal(size=ROWS) + target * (1 + (label == "b")) for _ in range(4)] for label in "ab"}
    groups = {k: [outcome(k, seed, score, target) for seed, score in enumerate(v)] for k, v in scores.items()}
    drawn = []
    for _ in range(2000):
        rows = generator.integers(0, ROWS, ROWS)
        each = [auc(b[rows], target[rows]) - auc(a[rows], target[rows]) for a, b in zip(*scores.values(), strict=True)]
        drawn.append(np.mean(each))
    assert all(o.rows is not None for group in groups.values() for o in group)
    influence = np.mean([b.rows["auc"] - a.rows["auc"] for a, b in zip(*groups.values(), strict=True)], axis=0)
    assert (influence**2).sum() / ROWS**2 == pytest.approx(np.var(drawn), rel=0.15)
    judged = difference(groups["b"], groups["a"], "auc")
    pairs = zip(groups["b"], groups["a"], strict=True)
    of_seeds = np.var([b.final["auc"] - a.final["auc"] for b, a in pairs if a.final and b.final], ddof=1)
    total = of_seeds / 4 + (influence**2).sum() / ROWS**2
    freedom = total**2 / ((of_seeds / 4) ** 2 / 3 + ((influence**2).sum() / ROWS**2) ** 2 / (ROWS // 4 - 1))
    assert judged.over_rows and judged.high is not None
    assert judged.high - judged.gain == pytest.approx(stats.t.ppf(0.975, freedom) * math.sqrt(total), rel=1e-6)


def test_holm_is_that_of_a_worked_example() -> None:
    """Holm 1979: 0.01, 0.04, 0.03, 0.005 become 0.03, 0.06, 0.06, 0.02."""
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert corrected == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_an_interval_is_students() -> None:
    values = [0.1, 0.4, 0.3]
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert interval(values).bounds == pytest.approx((low, high))
    assert interval([0.3]).bounds is None


def finals(label: str, *values: float | None) -> list[Outcome]:
    return [
        Outcome(label, seed, [], None if v is None else {"loss": v, "auc": v}, {}, None if v is not None else "NaN")
        for seed, v in enumerate(values)
    ]


def test_words() -> None:
    base = finals("fedavg", 0.80, 0.81, 0.82, 0.83)
    ahead = difference(finals("fgda", 0.812, 0.823, 0.831, 0.842), base, "auc")
    assert ahead.verdict == "ahead"
    assert ahead.words.startswith("fgda is ahead of fedavg by 0.012 [0.011, 0.013], p < 0.001")
    behind = difference(finals("fgda", 0.812, 0.823, 0.831, 0.842), base, "loss")
    assert behind.words.startswith("fgda is behind fedavg by 0.012 [0.011, 0.013], p < 0.001")
    same = difference(finals("fgda", 0.83, 0.80, 0.84, 0.80), base, "auc")
    assert same.words.startswith("fgda cannot be told apart from fedavg: 0.003 [-0.0") and "p = 0." in same.words
    alone = difference(finals("fgda", 0.9), finals("fedavg", 0.8), "auc")
    assert alone.p is None and alone.verdict == "undecided" and "with one seed" in alone.words
    equal = difference(finals("twin", 0.80, 0.81, 0.82, 0.83), base, "auc")
    assert (equal.gain, equal.p, equal.verdict) == (0.0, 1.0, "undecided")


def test_a_diverged_seed_allows_no_verdict() -> None:
    groups = {"fedavg": finals("fedavg", 0.8, 0.8, 0.8), "wild": finals("wild", 0.99, None, None)}
    assert differences(groups, "fedavg", "auc") == {"wild": "wild diverged in 2 of 3 seeds: no verdict."}
    groups = {"wild": groups["wild"], "fedavg": groups["fedavg"]}
    assert differences(groups, "wild", "auc") == {
        "fedavg": "fedavg cannot be judged: wild diverged in 2 of 3 seeds: no verdict."
    }


def test_influences_of_a_run_are_those_of_its_test_rows() -> None:
    """Removing a row changes a measure by about minus its influence over the number of rows."""
    generator = np.random.default_rng(0)
    target = (generator.random(300) < 0.3).astype(np.int64)
    score = np.round(generator.normal(size=300) + target, 1)  # with ties
    influence = auc_influence(score, target)
    assert influence.mean() == pytest.approx(0, abs=1e-12)
    for row in (0, 7, 100, 299):
        kept = np.arange(300) != row
        change = auc(score[kept], target[kept]) - auc(score, target)
        assert change == pytest.approx(-influence[row] / 300, abs=4e-5)


def test_a_comparison_of_twins_and_of_a_better_method() -> None:
    """The same algorithm under two names, and one that trains longer."""
    data = fs.data.digits().imbalance(0.2).split(fs.partition.iid(), clients=4, seed=0)

    def problem(seed: int) -> fs.Problem:
        return fs.erm(fs.models.model("logreg", (1, 8, 8), 1, seed=seed), "binary_cross_entropy")

    short, long = fs.FedAvg(lr=0.1, steps=1), fs.FedAvg(lr=1.0, steps=20)
    methods = {"one": (problem, short), "twin": (problem, short), "longer": (problem, long)}
    result = fs.compare(methods, data, seeds=4, rounds=10, batch_size=8, threads=1)
    judged = result.differences()
    twin, longer = judged["twin"], judged["longer"]
    assert isinstance(twin, Difference) and (twin.gain, twin.verdict) == (0.0, "undecided")
    assert isinstance(longer, Difference) and longer.verdict == "ahead" and longer.over_rows
    assert result.best == "longer" and result.verdicts[1].startswith("longer is ahead of one by 0.")


@pytest.mark.slow
def test_the_same_method_with_other_chance_is_rarely_told_apart() -> None:
    """Real runs: both start from weights of their own, so their differences are chance; 12 comparisons of 20 seeds."""
    data = fs.data.digits().imbalance(0.3).split(fs.partition.iid(), clients=2, seed=0)

    def starting(offset: int) -> Callable[[int], fs.Problem]:
        def problem(seed: int) -> fs.Problem:
            net = fs.models.model("mlp", (1, 8, 8), 1, hidden=[8], seed=seed + offset)
            return fs.erm(net, "binary_cross_entropy")

        return problem

    false = 0
    for number in range(12):
        first = 20 * number
        methods = {"a": (starting(0), fs.FedAvg(steps=1)), "b": (starting(10_000), fs.FedAvg(steps=1))}
        how: dict[str, Any] = {"rounds": 1, "batch_size": 8, "threads": 1}
        judged = fs.compare(methods, data, seeds=range(first, first + 20), **how).differences()["b"]
        assert isinstance(judged, Difference) and judged.gain != 0
        false += judged.verdict != "undecided"
    assert false <= 3, "at a rate of 5 %, more than 3 of 12 happen once in 400 times"

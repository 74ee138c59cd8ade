"""Judge the differences between methods: paired over seeds and over test rows, corrected for the number of methods.

The difference of two methods is the mean over seeds of what they reach with the same seed. Its variance has two parts.
That of the seeds is s^2 / n, with s^2 the variance of the n differences. That of the test rows, if all seeds share
them, is the variance of the bootstrap, which draws rows with replacement, the same for both methods and all seeds; it
is computed without drawing, from the influence of each row (the infinitesimal jackknife). If every seed splits the data
into training and test rows anew, their test rows overlap, and the variance is s^2 (1/n + test rows / training rows), as
in Nadeau and Bengio, "Inference for the generalization error", Machine Learning 2003. Intervals and p-values are
Student's t, whose degrees of freedom follow from the two parts (Satterthwaite). A percentile bootstrap over a handful
of seeds would be too narrow: with five seeds it finds a difference between a method and itself in more than a tenth of
all comparisons.

With several methods, p-values are corrected by Holm's procedure, so that the probability of any false verdict is at
most ``LEVEL``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstrata.core.files import Row
from fedstrata.core.intervals import LEVEL, half_width
from fedstrata.experiments.influence import FEWEST
from fedstrata.experiments.methods import Outcome
from fedstrata.training.metrics.catalogue import measure as about
from fedstrata.training.metrics.catalogue import sign_of

ROUNDING = 1e-12
"""Differences below this fraction of the values are rounding errors: the seeds are then one observation."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval; ``low`` and ``high`` are None with a single seed."""

    mean: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Both ends, if there are any."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Difference:
    """How much better a method is than the baseline in one measure: positive if it is better.

    seeds:  how many seeds both have finished.
    over_rows: whether the interval also covers the choice of test rows.
    p:      the p-value, corrected for the number of ``comparisons``; None with a single seed, or without any variance.
            If the difference is the same in every seed, ``low`` and ``high`` are that difference.
    """

    label: str
    baseline: str
    measure: str
    seeds: int
    gain: float
    low: float | None
    high: float | None
    p: float | None
    over_rows: bool
    comparisons: int = 1

    @property
    def verdict(self) -> str:
        """``"ahead"``, ``"behind"``, or ``"undecided"`` if the two cannot be told apart."""
        if self.p is None or self.p >= LEVEL or self.gain == 0:
            return "undecided"
        return "ahead" if self.gain > 0 else "behind"

    @property
    def words(self) -> str:
        """The verdict in a sentence."""
        size = abs(self.gain)
        form = "{:.3g}" if size >= 10_000 else "{:.3f}" if size >= 0.0005 or size == 0 else "{:.2g}"
        if self.low is None or self.high is None:
            why = "with one seed" if self.seeds == 1 else "with so few test rows"
            return f"{self.label} cannot be judged against {self.baseline} {why}: {form.format(self.gain)}."
        if self.p is None:
            by, better = f"{abs(self.gain):,.6g}", self.label if self.gain > 0 else self.baseline
            return f"{self.label} differs from {self.baseline} by exactly {by} in every seed: {better} is better."
        low, high = self.low, self.high
        gain = self.gain
        if self.verdict == "behind":
            gain, low, high = -gain, -high, -low
        numbers = (
            f"{form.format(gain)} [{form.format(low)}, {form.format(high)}], {p_in_words(self.p, self.comparisons)}"
        )
        if self.verdict == "undecided":
            return f"{self.label} cannot be told apart from {self.baseline}: {numbers}."
        place = "ahead of" if self.verdict == "ahead" else "behind"
        return f"{self.label} is {place} {self.baseline} by {numbers}."


def p_in_words(p: float, of: int = 1) -> str:
    """Return a p-value, corrected for a number of comparisons, for a sentence."""
    digits = 2 if float(f"{p:.2g}") != LEVEL else 4  # on which side of the level it is
    number = "p < 0.001" if p < 0.001 else f"p = {p:.{digits}g}"
    return number if of == 1 else f"{number} after correction for {of} comparisons"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean over seeds and its t-interval."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return Interval(mean, None, None)
    half = half_width(float(np.var(values, ddof=1)) / n, n - 1)
    return Interval(mean, mean - half, mean + half)


def differences(outcomes: Mapping[str, Sequence[Outcome]], baseline: str, measure: str) -> dict[str, Difference | str]:
    """Compare each method with the baseline in one measure; a method that cannot be judged has a sentence instead."""
    others = {label: group for label, group in outcomes.items() if label != baseline}
    of_baseline = _no_verdict(outcomes[baseline], baseline, measure)
    reasons = {label: _no_verdict(group, label, measure) for label, group in others.items()}
    for label, group in others.items():
        if reasons[label] is None and of_baseline is not None:
            reasons[label] = f"{label} cannot be judged: {of_baseline}"
        elif reasons[label] is None:
            reasons[label] = _incomparable(group, outcomes[baseline], measure)
    judged = {
        label: difference(group, outcomes[baseline], measure)
        for label, group in others.items()
        if reasons[label] is None
    }
    corrected = holm({label: one.p for label, one in judged.items() if one.p is not None})
    judged = {k: replace(one, p=corrected.get(k), comparisons=max(1, len(corrected))) for k, one in judged.items()}
    return {label: judged[label] if label in judged else str(reasons[label]) for label in others}


def _no_verdict(group: Sequence[Outcome], label: str, measure: str) -> str | None:
    """Return why a method cannot be judged, if it cannot."""
    failed = sum(outcome.diverged for outcome in group)
    if failed:
        return f"{label} diverged in {failed} of {len(group)} seed{'s' * (len(group) > 1)}: no verdict."
    without = sum(measure not in (outcome.final or {}) for outcome in group)
    return (
        f"{label} has no {about(measure).phrase} in {without} of {len(group)} seeds: no verdict." if without else None
    )


def _incomparable(group: Sequence[Outcome], baseline: Sequence[Outcome], measure: str) -> str | None:
    """Return why two methods cannot be judged against each other, if they cannot."""
    labels = f"{group[0].label} and {baseline[0].label}"
    if not _same_test_rows(group, baseline):
        return f"{labels} were measured on different test data: no verdict."
    one, other = ([o.summary.get("measured_on", {}) for o in part] for part in (group, baseline))
    if about(measure).rows == "clients":
        if {on.get("clients") for on in one} != {on.get("clients") for on in other}:
            return f"{labels} were measured on different data of the clients: no verdict."
        counted = "auc" if measure in ("auc_mean", "auc_worst") else "accuracy" if "accuracy_worst" in measure else ""
        if {on.get(counted) for on in one} != {on.get(counted) for on in other}:
            return f"{labels} were measured on different numbers of clients: no verdict."
    if "loss" in measure and {o.loss for o in group} != {o.loss for o in baseline}:
        return f"{labels} have different losses: no verdict on {about(measure).phrase}."
    return None


def difference(group: Sequence[Outcome], baseline: Sequence[Outcome], measure: str) -> Difference:
    """Compare a method with the baseline over the seeds that both have run; ``p`` is not corrected."""
    sign = sign_of(measure)
    of_baseline = {outcome.seed: outcome for outcome in baseline}
    pairs = [(one, of_baseline[one.seed]) for one in group if one.seed in of_baseline]
    gains = np.array([sign * (_value(a, measure) - _value(b, measure)) for a, b in pairs])
    n, gain = len(gains), float(gains.mean())
    names = group[0].label, baseline[0].label
    if n < 2:
        return Difference(*names, measure, n, gain, None, None, None, False)
    resplit = _resplit(pairs)
    of_seeds = float(gains.var(ddof=1)) * (1 / n + (resplit or 0.0))
    of_rows = _variance_of_rows(pairs, measure)
    variance = of_seeds + (of_rows or 0.0)
    over_rows = of_rows is not None or resplit is not None
    largest = max(abs(_value(outcome, measure)) for pair in pairs for outcome in pair)
    if variance == 0 or (np.ptp(gains) <= ROUNDING * largest and not of_rows):
        if abs(gain) > ROUNDING * largest:  # the seeds are one observation, not several
            return Difference(*names, measure, n, gain, gain, gain, None, over_rows)
        return Difference(*names, measure, n, 0.0, 0.0, 0.0, 1.0, over_rows)
    if math.isnan(variance):  # a single test row of a class
        return Difference(*names, measure, n, gain, None, None, None, over_rows)
    rows_freedom = _fewest(pairs, measure) - 1
    freedom = variance**2 / (of_seeds**2 / (n - 1) + (of_rows or 0.0) ** 2 / max(rows_freedom, 1))
    half = half_width(variance, freedom)
    from scipy.special import stdtr

    p = 2 * float(stdtr(freedom, -abs(gain) / math.sqrt(variance)))
    return Difference(*names, measure, n, gain, gain - half, gain + half, p, over_rows)


def _value(outcome: Outcome, measure: str) -> float:
    assert outcome.final is not None
    return float(outcome.final[measure])


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values corrected by Holm's procedure."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, (label, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[label] = largest
    return corrected


# --- test rows -------------------------------------------------------------------------------------------------------

Rows = Mapping[str, np.ndarray]


def _variance_of_rows(pairs: Sequence[tuple[Outcome, Outcome]], measure: str) -> float | None:
    """Return the bootstrap variance of the mean difference over test rows; None if seeds do not share their rows."""
    rows = [(a.rows, b.rows) for a, b in pairs]
    each = [one for pair in rows for one in pair]
    if any(one is None or measure not in one for one in each):
        return None
    marks = [one["mark"] for one in each if one is not None]
    if not all(np.array_equal(mark, marks[0]) for mark in marks):
        return None
    influence = np.mean([a[measure] - b[measure] for a, b in rows if a is not None and b is not None], axis=0)
    return float((influence**2).sum()) / len(influence) ** 2


def _fewest(pairs: Sequence[tuple[Outcome, Outcome]], measure: str) -> int:
    """Return the number of test rows that a measure rests on: in a ranking, those of the rarer class."""
    rows = pairs[0][0].rows
    if rows is None or measure not in rows:
        return 1 << 30
    return int(rows[FEWEST[measure]][0]) if measure in FEWEST else len(rows["mark"])


def _same_test_rows(group: Sequence[Outcome], baseline: Sequence[Outcome]) -> bool:
    """Whether two methods were measured on the same rows with each seed, as far as that is known."""
    if {o.summary.get("data") for o in group} != {o.summary.get("data") for o in baseline}:
        return False
    of_baseline = {o.seed: o.rows for o in baseline}
    pairs = [(o.rows, of_baseline.get(o.seed)) for o in group]
    return all(a is None or b is None or np.array_equal(a["mark"], b["mark"]) for a, b in pairs)


def _resplit(pairs: Sequence[tuple[Outcome, Outcome]]) -> float | None:
    """Return the ratio of test rows to training rows if every seed has a split of its own; None if they share one."""
    rows = [a.rows for a, _ in pairs if a.rows is not None]
    if len(rows) < len(pairs) or all(np.array_equal(one["mark"], rows[0]["mark"]) for one in rows):
        return None
    return float(np.mean([len(one["mark"]) / one["training_rows"][0] for one in rows]))


def final_values(group: Sequence[Outcome], measure: str) -> list[float]:
    """Return the value of each seed that finished and has this measure."""
    rows: list[Row] = [outcome.final for outcome in group if outcome.final is not None]
    return [row[measure] for row in rows if measure in row]

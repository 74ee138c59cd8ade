"""experiments/rates.py: slopes and their intervals, runs that resume, what READMEs show, and the papers' studies."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evidence
import fedstrata as fs
import rates
import rates_problems
import records
from fedstrata.algorithms.algorithm import ALGORITHMS

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PAPERS = sorted(path.parent.name for path in EXPERIMENTS.glob("*/rates.py"))
GRID = (10, 20, 40, 80, 160)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Leave the list of algorithms as it is: studies have algorithms of their own."""
    known = set(ALGORITHMS)
    yield
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]


class Planted:
    """Measures c x^power times noise, one c for each seed; counts its calls and fails after ``most`` of them."""

    def __init__(self, power: float = -0.5, noise: float = 0.02) -> None:
        self.power, self.noise = power, noise
        self.calls: list[tuple[int, int]] = []
        self.most = 10**6

    def __call__(self, seed: int, *, T: int, flat: bool = False) -> dict[str, float]:
        if len(self.calls) == self.most:
            raise KeyboardInterrupt
        self.calls.append((seed, T))
        random = np.random.default_rng((seed, T))
        value = (2 + seed) * T ** (0 if flat else self.power) * math.exp(self.noise * random.standard_normal())
        return {"mean": value, "rounds": T / 10}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a study whose law is known the only one, in a directory of its own."""
    measure = Planted()
    points = [{"T": T} for T in GRID]
    study = rates.Study(
        "009",
        "law",
        "a law",
        measure,
        [
            rates.Line("fgda", {}, points, "T", expected=-1 / 2, theorem="theorem 9", panel="in T"),
            rates.Line("rounds", {}, points, "rounds", expected=-1.0, panel="in rounds", label="fgda"),
            rates.Line("flat", {"flat": True}, points, "T", expected=-1 / 2, panel="in T"),
            rates.Line("ratio", {}, points, "T", over="flat", panel="ratio", label="fgda"),
        ],
        {"mean": "gradient"},
        lambda seed: {"L": 1.0, "sigma": 0.02},
        "A planted law.",
    )
    monkeypatch.setattr(rates, "HERE", tmp_path)
    monkeypatch.setattr(rates, "studies", lambda: [study])
    monkeypatch.setattr(rates, "origin", lambda: {"commit": "0123456789ab", "date": "2026-01-01", "versions": {}})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "009").mkdir()
    return measure


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(path.read_text())["lines"]}


def test_a_slope_is_found_and_its_interval_covers_the_truth() -> None:
    random = np.random.default_rng(0)
    x = np.tile(GRID, (5, 1)).astype(float)
    covered = 0
    for _ in range(400):
        noise = 0.1 * random.standard_normal(x.shape) + random.standard_normal((5, 1))
        fit = rates.slope(x, x**-0.5 * np.exp(noise))
        assert fit["mean"] == pytest.approx(-0.5, abs=0.15)
        covered += fit["low"] <= -0.5 <= fit["high"]
    assert 0.92 <= covered / 400 <= 0.98


def test_a_slope_needs_values_that_are_finite() -> None:
    assert rates.slope(np.array([[1.0, 2.0]]), np.array([[1.0, math.inf]])) is None
    assert rates.intervals(np.array([[1.0, math.inf], [1.0, 2.0]]))[1] is None


@pytest.mark.parametrize(
    ("whole", "half", "equal", "expected"),
    [
        ((-0.52, -0.48), (-0.55, -0.45), False, "holds"),
        ((-0.9, -0.8), (-0.9, -0.8), False, "holds"),
        ((-0.9, -0.8), (-0.9, -0.8), True, "does not hold"),
        ((-0.52, -0.48), (-0.2, -0.1), False, "holds in part"),
        ((-0.3, -0.2), (-0.1, 0.0), False, "does not hold"),
        ((-0.52, -0.48), (-0.6, -0.3), False, "undecided"),
        ((-0.45, -0.55), None, False, "undecided"),
    ],
)
def test_verdicts(whole: Any, half: Any, equal: bool, expected: str) -> None:
    fits = [None if ends is None else {"mean": 0.0, "low": ends[0], "high": ends[1]} for ends in (whole, half)]
    assert rates.verdict(fits, -0.5, equal) == expected
    assert rates.verdict(fits, None, equal) == ""


def test_the_best_choice_for_a_seed_is_that_of_the_others() -> None:
    y = np.array([[1.0, 1.0, 9.0], [2.0, 2.0, 0.1]])  # [choices, seeds]
    assert [rates.best_for_others(y, seed) for seed in range(3)] == [1, 1, 0]
    y[1, 0] = math.inf
    assert rates.best_for_others(y, 1) == 0


def test_a_run_stores_values_slopes_and_verdicts(planted: Planted) -> None:
    path = rates.run("009/law")
    lines = lines_of(path)
    assert lines["fgda"]["slope"]["mean"] == pytest.approx(-0.5, abs=0.02)
    assert [lines[name]["verdict"] for name in ("fgda", "rounds", "flat", "ratio")] == [
        "holds",
        "does not hold",
        "does not hold",
        "",
    ]
    assert lines["rounds"]["at"] == [T / 10 for T in GRID]
    assert lines["ratio"]["slope"]["mean"] == pytest.approx(-0.5, abs=0.03)
    record = json.loads(path.read_text())
    assert record["commit"] == "0123456789ab" and record["seeds"] == [0, 1, 2, 3, 4]
    assert len(record["points"]) == 2 * len(GRID) and all(len(p["seeds"]) == 5 for p in record["points"])
    before = path.read_bytes()
    rates.refit("009/law")
    assert path.read_bytes() == before


def test_a_killed_run_loses_no_finished_point(planted: Planted) -> None:
    planted.most = 13
    with pytest.raises(KeyboardInterrupt):
        rates.run("009/law")
    journal = Path("runs/rates/009_law.jsonl")
    journal.write_text(journal.read_text()[:-20])  # the last line was being written
    planted.most = 10**6
    path = rates.run("009/law")
    assert len(planted.calls) == 2 * 5 * len(GRID) + 1
    resumed = lines_of(path)
    journal.unlink()
    assert lines_of(rates.run("009/law")) == resumed


@pytest.mark.parametrize("commit", ["ba9876543210", "0123456789ab-dirty"])
def test_what_other_code_has_measured_is_not_used(
    planted: Planted, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "origin", lambda: {"commit": commit, "date": "2026-01-01", "versions": {}})
    rates.run("009/law", seeds=2)
    rates.run("009/law", seeds=2)
    once = 2 * 2 * len(GRID)
    assert len(planted.calls) == (2 * once if commit.endswith("dirty") else once)
    monkeypatch.setattr(rates, "origin", lambda: {"commit": "other", "date": "2026-01-01", "versions": {}})
    rates.run("009/law", seeds=2)
    assert len(planted.calls) == (3 if commit.endswith("dirty") else 2) * once


def test_jobs_give_the_same_result(planted: Planted) -> None:
    one = lines_of(rates.run("009/law", seeds=2))
    assert lines_of(rates.run("009/law", jobs=2, seeds=2, out=Path("elsewhere"))) == one


def test_a_point_that_diverges_has_no_slope(planted: Planted) -> None:
    planted.power = -10_000.0
    lines = lines_of(rates.run("009/law"))
    assert lines["fgda"]["slope"] is None and lines["fgda"]["verdict"] == "undecided"
    assert lines["flat"]["slope"] is not None


def test_readmes_show_stored_rates(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "HERE", Path.cwd())
    rates.run("009/law")
    paper = Path("009")
    readme = paper / "README.md"
    readme.write_text("# A law\n\n<!-- claims -->\n<!-- end -->\n\n<!-- rates law -->\nstale\n<!-- end -->\n")
    Path("README.md").write_text("# All\n")
    claim = (
        '[[claim]]\nwhere = "theorem 9"\nclaim = "a law"\nrates = "law"\nrow = "fgda"\nverdict = "VERDICT"\n'
        'why = "slope {rates_law:fgda:slope}, theorem {rates_law:fgda:expected}, at the end {rates_law:fgda:last}"\n'
    )
    (paper / "claims.toml").write_text(claim.replace("VERDICT", "holds"))
    evidence.render([])
    text = readme.read_text()
    line = lines_of(paper / "results" / "rates_law.json")["fgda"]
    slope = f"{line['slope']['mean']:.2f} [{line['slope']['low']:.2f}, {line['slope']['high']:.2f}]"
    assert f"slope {slope}, theorem -1/2, at the end {line['values'][-1]['mean']:.3g}" in text
    assert f"| fgda | T | {slope} |" in text and "at most -1/2 (theorem 9)" in text
    assert "commit 0123456789ab" in text and "L = 1" in text and "stale" not in text
    assert (paper / "figures" / "rates_law.png").stat().st_size > 10_000
    assert evidence.check() == []
    for verdict in ("does not hold", "undecided", "holds in part"):
        (paper / "claims.toml").write_text(claim.replace("VERDICT", verdict))
        assert any("theorem 9" in wrong for wrong in evidence.contradictions(paper))


def test_a_result_without_a_commit_is_not_shown(planted: Planted) -> None:
    record = json.loads(rates.run("009/law").read_text())
    del record["commit"]
    with pytest.raises(SystemExit, match="no commit"):
        rates.block_of(record, "law")


def test_results_and_readmes_do_not_make_a_checkout_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(records, "_git", lambda *words: asked.append(words) or "" if words[0] == "status" else "abc")
    assert records.commit() == "abc" and ":(top,exclude)experiments/*/tuned/*" in asked[0]
    monkeypatch.setattr(records, "_git", lambda *words: "M src/x.py" if words[0] == "status" else "abc")
    assert records.commit() == "abc-dirty"


# --- the papers' studies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", PAPERS)
def test_the_studies_of_a_paper_fit_together(
    paper: str,
) -> None:
    for study in rates.module_of(EXPERIMENTS / paper / "rates.py").STUDIES:
        names = [line.name for line in study.lines]
        assert study.paper == paper and len(set(names)) == len(names)
        assert all(line.over in (None, *names) and len(line.at) >= 4 for line in study.lines)
        assert all(line.y in study.labels and line.x in rates.NAMES for line in study.lines)
        for point in study.points():
            inspect.signature(study.measure).bind(0, **point)
            json.loads(rates.key_of(point))
        assert all(math.isfinite(value) and value > 0 for value in study.constants(0).values())
        assert study.note.endswith(".")


@pytest.mark.parametrize("name", ["composition", "saddle", "wells", "tower"])
def test_norms_are_those_of_the_objective(
    name: str,
) -> None:
    if name == "tower":
        known = rates.module_of(EXPERIMENTS / "002" / "rates.py").known_tower(3, 2, 0.1, 0)[0]
    else:
        known = getattr(rates_problems, name)(2 if name == "composition" else 4, 0)
    problem, data = known.problem, known.data
    batches = [data.train.of_client(k) for k in range(data.clients)]

    def objective(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        values = [through(x, b) for b in batches]
        values = [torch.stack(values).mean(0)] * len(values) if problem.inner_mean == "global" else values
        dual = () if y is None else (y,)
        return torch.stack([problem.outer(u, *dual, b) for u, b in zip(values, batches, strict=True)]).mean()

    def through(x: torch.Tensor, batch: Any) -> torch.Tensor:
        for level in problem.levels:
            x = level(x, batch)
        return x

    x, y = problem.x0, problem.y0
    if y is not None:
        for _ in range(200):
            y = y + 0.6 * torch.func.grad(lambda y: objective(x, y))(y)
    assert known.norm(x) == pytest.approx(float(torch.func.grad(lambda x: objective(x, y))(x).norm()), rel=1e-6)


def test_every_number_of_clients_has_the_same_problem() -> None:
    for build in (rates_problems.wells, rates_problems.saddle):
        norms = [build(clients, 1).norm(torch.ones(rates_problems.DIMENSION).double()) for clients in (1, 4, 32)]
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-9)


def test_a_point_is_measured() -> None:
    module = rates.module_of(EXPERIMENTS / "003" / "rates.py")
    values = rates.measured(module.STUDIES[0], {"method": "restart", "N": 2, "rounds": 4}, 0)
    assert values["rounds"] == 4 and values["samples"] == values["T"] == 20 and values["seconds"] > 0
    assert values["square"] > 0 and all(math.isfinite(value) for value in values.values())
    diverging = rates.follow(module.wells(2, 0), fs.FedAvg(lr=1e300), rounds=3, batch_size=1, seed=0)
    assert diverging["mean"] == math.inf


@pytest.mark.slow
def test_the_moving_average_with_one_level_is_local_scgdam() -> None:
    module = rates.module_of(EXPERIMENTS / "002" / "rates.py")
    known = module.known_tower(4, 1, 0.3, 0)[0]
    runs = [
        rates.trajectory(known, algorithm(steps=4), rounds=5, batch_size=4, seed=0)[0]
        for algorithm in (fs.LocalSCGDAM, module.MovingAverage)
    ]
    assert np.abs(runs[0] - runs[1]).max() < 1e-12


@pytest.mark.slow
def test_two_phases_without_noise_and_with_equal_clients_are_mfcgd() -> None:
    module = rates.module_of(EXPERIMENTS / "000" / "rates.py")
    known = rates.module_of(EXPERIMENTS / "000" / "rates.py").composition(3, 0, noise=0.0, equal=True)
    same: dict[str, Any] = {"gamma": 0.1, "eta": 1.0, "steps": 3, "alpha": 0.3, "beta": 0.3}
    both = (module.MFCGDTwoPhase(**same), fs.MFCGD(jacobian="product", varrho=0.3, **same))
    runs = [rates.trajectory(known, algorithm, rounds=6, batch_size=1, seed=0)[0] for algorithm in both]
    assert np.abs(runs[0] - runs[1]).max() < 1e-12

"""Measure how fast methods converge, and compare the slopes with those of the papers' theorems.

    python experiments/rates.py list
    python experiments/rates.py run 003/speedup [--jobs 2] [--seeds 5] [--out runs/rates]
    python experiments/rates.py refit 003/speedup

``run`` measures every point of a study with every seed and writes ``results/rates_NAME.json`` beside the study: commit,
settings, seeds, constants of the assumptions, the values of every point and seed, slopes with intervals, verdicts. Each
point is kept in ``--out`` as soon as it is measured, so a run that was killed resumes and loses at most one point per
job; what another commit has measured is not used. ``refit`` fits and judges a stored result again, without measuring.
``evidence.py render`` draws the picture and writes the table.

A study is declared in ``experiments/00X/rates.py``. Each of its lines is a measure y against a quantity x on a
logarithmic grid. The slope of log y against log x is fitted for each seed (each has its own problem, starting point and
batches); its interval is Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student

import fedstrata as fs
from fedstrata.core.files import Rows
from fedstrata.experiments.pool import run_all
from fedstrata.training.plots import figures
from fedstrata.training.plots.axes import finish
from fedstrata.training.plots.styles import Style, styles
from records import Json, origin, rounded, write

HERE = Path(__file__).resolve().parent
SEEDS = 5
LEVEL = 0.95

TOLERANCE = 0.1
"""How much a slope may exceed a bound, or differ from an exact law; times the slope's size if that is above 1.

Bounds hide logarithms: on our grids sqrt(log T) alone changes a slope by 0.06.
"""

RULE = (
    "A bound holds if the intervals of the slope over the whole grid and over its upper half both lie below the "
    "theorem's slope plus 0.1 (plus a tenth of it, if it is above 1); it does not hold if both lie above; it holds in "
    "part if one lies below and the other above; otherwise it is undecided. A slope that must be equal has the same "
    "margin on both sides."
)

NAMES = {
    "T": "Iterations T",
    "rounds": "Rounds",
    "samples": "Samples per client",
    "N": "Clients N",
    "rate_of": "Clients N",
    "K": "Levels K",
    "q": "Local steps per round",
    "b": "Batch size b",
    "1/eta": r"$1/\eta$",
}
"""The labels of horizontal axes."""

Settings = dict[str, Any]
Values = dict[str, float]


@dataclass(frozen=True)
class Line:
    """A measure against a quantity.

    name:     its name in the table, unique in the study.
    label:    its name in the legend, by default ``name``; one that begins with an algorithm's name has its colour.
    shared:   the settings that all its points share.
    at:       the settings of each point, in the order of the grid.
    x:        the quantity: a setting of the points, or a measure.
    y:        the measure.
    expected: the slope that the theorem gives; None if it says nothing.
    theorem:  where the theorem says so.
    equal:    whether the slope must be equal to ``expected``; otherwise that is an upper bound.
    choices:  settings to choose from at each point: that with the least mean logarithm over the other seeds.
    over:     the name of a line by whose values, with the same seed, the values are divided.
    panel:    the title of its panel.
    """

    name: str
    shared: Settings
    at: Sequence[Settings]
    x: str
    y: str = "mean"
    expected: float | None = None
    theorem: str = ""
    equal: bool = False
    choices: Sequence[Settings] = ({},)
    over: str | None = None
    panel: str = ""
    label: str = ""

    def settings(self, place: int, choice: int) -> Settings:
        """Return the settings of a point."""
        return self.shared | self.at[place] | self.choices[choice]


@dataclass(frozen=True)
class Study:
    """Lines that are measured together.

    measure:   ``measure(seed, **settings)`` returns numbers by name; "seconds" is reserved.
    labels:    the labels of the measures.
    constants: ``constants(seed)`` returns the constants of the assumptions by name.
    note:      one sentence on schedules and sizes.
    """

    paper: str
    name: str
    title: str
    measure: Callable[..., Values]
    lines: Sequence[Line]
    labels: dict[str, str]
    constants: Callable[[int], Values]
    note: str

    def points(self) -> list[Settings]:
        """Return the settings of all points, each once, the cheapest of a line first."""
        every = [
            line.settings(place, choice)
            for line in self.lines
            for place in range(len(line.at))
            for choice in range(len(line.choices))
        ]
        return list({key_of(point): point for point in every}.values())


def key_of(settings: Settings) -> str:
    """Return settings as a text that identifies them."""
    return json.dumps(settings, sort_keys=True)


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A problem, its data, the exact norm of its gradient at x, and the constants of the assumptions."""

    problem: fs.Problem
    data: fs.FederatedData
    norm: Callable[[torch.Tensor], float]
    constants: Values


class Reached(Exception):
    """Ends a run that has got where it should."""


def follow(
    known: Known,
    algorithm: fs.Algorithm,
    *,
    rounds: int,
    batch_size: int,
    seed: int,
    steps: Sequence[int] | None = None,
) -> Values:
    """Train; return means of the gradient norm at the server's point after each round, infinite if the run diverged.

    mean, late: the mean over all rounds, and over the second half; square, late_square: the same of its square.
    ``steps`` are the local steps of each round, as weights of the means; by default all rounds count the same.
    """
    norms = trajectory(known, algorithm, rounds=rounds, batch_size=batch_size, seed=seed)
    if norms is None:
        return dict.fromkeys(("mean", "late", "square", "late_square", "samples", "rounds"), math.inf)
    values, samples = norms
    weights = np.ones(rounds) if steps is None else np.array(steps, dtype=float)
    half = slice(rounds // 2, None)
    return {
        "mean": float(np.average(values, weights=weights)),
        "late": float(np.average(values[half], weights=weights[half])),
        "square": float(np.average(values**2, weights=weights)),
        "late_square": float(np.average(values[half] ** 2, weights=weights[half])),
        "samples": samples,
        "rounds": float(rounds),
    }


def trajectory(
    known: Known, algorithm: fs.Algorithm, *, rounds: int, batch_size: int, seed: int
) -> tuple[np.ndarray, float] | None:
    """Train; return the gradient norm after each round and the samples per client; None if the run diverged."""
    norms: list[float] = []

    def evaluate(_: object, __: object, x: torch.Tensor, ___: object) -> Values:
        norms.append(known.norm(x))
        return {}

    how: Json = {"rounds": rounds, "batch_size": batch_size, "seed": seed, "eval_every": 1, "threads": 1}
    try:
        run = fs.train(known.problem, known.data, algorithm, evaluate=evaluate, **how)
    except fs.Diverged:
        return None
    if not all(map(math.isfinite, norms)):
        return None
    return np.array(norms[1:]), run.history[-1]["samples"] / known.data.clients


def rounds_until(
    known: Known, algorithm: fs.Algorithm, target: float, *, rounds: int, batch_size: int, seed: int
) -> float:
    """Train until the mean of the squared gradient norm over the rounds so far is at most ``target``^2.

    Return the rounds that this took, infinite if ``rounds`` are not enough.
    """
    squares: list[float] = []

    def evaluate(_: object, __: object, x: torch.Tensor, ___: object) -> Values:
        squares.append(known.norm(x) ** 2)
        if len(squares) > 1 and sum(squares[1:]) <= target**2 * (len(squares) - 1):
            raise Reached
        return {}

    how: Json = {"rounds": rounds, "batch_size": batch_size, "seed": seed, "eval_every": 1, "threads": 1}
    try:
        fs.train(known.problem, known.data, algorithm, evaluate=evaluate, **how)
    except Reached:
        return len(squares) - 1.0
    except fs.Diverged:
        pass
    return math.inf


def run(name: str, jobs: int = 1, seeds: int = SEEDS, out: Path = Path("runs/rates")) -> Path:
    """Measure the points of a study that are not measured yet, and store the result; return its path."""
    study = find(name)
    record: Json = {"study": name, **origin()}
    journal = Journal(out / f"{study.paper}_{study.name}.jsonl", record["commit"])
    tasks = [(point, seed) for point in study.points() for seed in range(seeds) if not journal.has(point, seed)]
    print(f"{name}: {len(tasks)} of {len(study.points()) * seeds} runs to do.", flush=True)
    began = time.monotonic()

    def done(number: int, values: Values) -> None:
        point, seed = tasks[number]
        journal.add(point, seed, values)
        passed = time.monotonic() - began
        if number % 20 == 0 or number == len(tasks) - 1:
            print(f"{name}: {number + 1} of {len(tasks)}, {passed:.0f} s, seed {seed}, {key_of(point)}", flush=True)

    run_all([partial(measured, study, point, seed) for point, seed in tasks], jobs, done)
    points = [{"settings": p, "seeds": [journal.values(p, s) for s in range(seeds)]} for p in study.points()]
    record |= {"seeds": list(range(seeds)), "constants": rounded(study.constants(0))}
    record["seconds"] = round(sum(v["seconds"] for p in points for v in p["seeds"]))
    path = path_of(study)
    write(path, fitted(study, record | {"points": points}))
    return path


def measured(study: Study, settings: Settings, seed: int) -> Values:
    """Measure a point with a seed."""
    torch.set_num_threads(1)
    began = time.process_time()
    values = study.measure(seed, **settings)
    return {**values, "seconds": time.process_time() - began}


class Journal:
    """The points that are measured, a line for each point and seed; those of another commit are not used.

    A checkout with uncommitted changes has no identity, so nothing is resumed there.
    """

    def __init__(self, path: Path, commit: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows, self._commit = Rows(path, "seed"), commit
        self._known: dict[tuple[str, int], Json] = {}
        if not commit.endswith("-dirty"):
            for row in self._rows.keep():
                if row["commit"] == commit:
                    self._known[row["point"], row["seed"]] = row["values"]

    def has(self, settings: Settings, seed: int) -> bool:
        """Whether the point is measured."""
        return (key_of(settings), seed) in self._known

    def values(self, settings: Settings, seed: int) -> Json:
        """Return the values of a point; None for what is not finite."""
        return self._known[key_of(settings), seed]

    def add(self, settings: Settings, seed: int, values: Values) -> None:
        """Keep the values of a point."""
        key = key_of(settings)
        plain = {name: rounded(float(v)) if math.isfinite(v) else None for name, v in values.items()}
        self._known[key, seed] = plain
        self._rows.append({"point": key, "seed": seed, "commit": self._commit, "values": plain})


# --- fitting -----------------------------------------------------------------------------------------------------


def fitted(study: Study, record: Json) -> Json:
    """Return the record with its lines, fitted to its points and judged."""
    known = {key_of(point["settings"]): point["seeds"] for point in record["points"]}
    seeds = len(record["seeds"])
    tables = {line.name: table_of(line, known, seeds) for line in study.lines}
    lines = []
    for line in study.lines:
        x, y, chosen = tables[line.name]
        if line.over is not None:
            y = y / tables[line.over][1]
        fits = {"slope": slope(x, y), "tail": slope(x[:, len(line.at) // 2 :], y[:, len(line.at) // 2 :])}
        entry: Json = {"name": line.name, "label": line.label or line.name, "panel": line.panel}
        entry |= {"x": line.x, "y": line.y, "over": line.over}
        entry |= {"expected": line.expected, "theorem": line.theorem, "equal": line.equal}
        entry |= {**fits, "verdict": verdict([*fits.values()], line.expected, line.equal)}
        entry |= {"at": np.exp(np.log(x).mean(0)).tolist(), "values": intervals(y)}
        entry["diverged"] = int((~np.isfinite(y)).any(1).sum())
        if len(line.choices) > 1:
            entry["choices"] = [[line.choices[c] for c in row] for row in chosen]
            entry["edges"] = edges(line, chosen)
        lines.append(rounded(entry))
    about = {"title": study.title, "note": study.note, "labels": study.labels, "rule": RULE}
    points = record.pop("points")
    return {**record, **about, "lines": lines, "points": points}


def table_of(line: Line, known: dict[str, list[Json]], seeds: int) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """Return x and y of a line, [seeds, points], and which choices were made: [seeds][points]."""

    def values(name: str, place: int, choice: int) -> list[float]:
        settings = line.settings(place, choice)
        if name in settings:
            return [float(settings[name])] * seeds
        numbers = [row[name] for row in known[key_of(settings)][:seeds]]
        return [math.inf if number is None else number for number in numbers]

    every = range(len(line.choices))
    x = np.array([[values(line.x, place, c) for c in every] for place in range(len(line.at))])  # [points, choices, ...]
    y = np.array([[values(line.y, place, c) for c in every] for place in range(len(line.at))])
    chosen = [[best_for_others(y[place], seed) for place in range(len(line.at))] for seed in range(seeds)]
    picked = [(range(len(line.at)), chosen[seed], seed) for seed in range(seeds)]
    return np.array([x[p] for p in picked]), np.array([y[p] for p in picked]), chosen


def best_for_others(y: np.ndarray, seed: int) -> int:
    """Return the choice with the least mean logarithm over the other seeds; y is [choices, seeds]."""
    if len(y) == 1:
        return 0
    with np.errstate(divide="ignore", invalid="ignore"):
        return int(np.log(np.delete(y, seed, axis=1)).mean(1).argmin())


def edges(line: Line, chosen: list[list[int]]) -> list[str]:
    """Return in words which settings the seeds chose most often at the edge of their range."""
    found = []
    for name in dict.fromkeys(name for choice in line.choices for name in choice):
        grid = sorted({choice[name] for choice in line.choices})
        for place, point in enumerate(line.at):
            values = [line.choices[row[place]][name] for row in chosen]
            value = max(set(values), key=values.count)
            if len(grid) > 1 and value in (grid[0], grid[-1]) and not (name == "b" and value == 1):
                where, at = next(iter(point.items()))
                found.append(f"{name} = {value:g} at {where} = {at:,}")
    return found


def slope(x: np.ndarray, y: np.ndarray) -> Json | None:
    """Return the mean slope of log y against log x over seeds, [seeds, points], and its interval."""
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (y > 0).all()):
        return None
    slopes = [float(np.polyfit(np.log(a), np.log(b), 1)[0]) for a, b in zip(x, y, strict=True)]
    return interval(np.array(slopes))


def interval(values: np.ndarray) -> Json:
    """Return the mean and its interval by Student's t."""
    count = len(values)
    half = student.ppf((1 + LEVEL) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count) if count > 1 else math.inf
    return {"mean": float(values.mean()), "low": float(values.mean() - half), "high": float(values.mean() + half)}


def intervals(y: np.ndarray) -> list[Json | None]:
    """Return for each point the geometric mean over seeds with the interval of the mean logarithm."""
    found: list[Json | None] = []
    for column in y.T:
        usable = np.isfinite(column).all() and (column > 0).all()
        logs = interval(np.log(column)) if usable else None
        found.append(None if logs is None else {name: math.exp(v) for name, v in logs.items()})
    return found


def verdict(fits: Sequence[Json | None], expected: float | None, equal: bool) -> str:
    """Return the verdict on a line by ``RULE``; empty if nothing is expected."""
    if expected is None:
        return ""
    margin = TOLERANCE * max(1.0, abs(expected))
    known = [fit for fit in fits if fit is not None]
    low = expected - margin if equal else -math.inf
    good = [low <= fit["low"] and fit["high"] <= expected + margin for fit in known]
    bad = [fit["low"] > expected + margin or fit["high"] < low for fit in known]
    if len(known) < len(fits) or not all(g or b for g, b in zip(good, bad, strict=True)):
        return "undecided"
    return "holds" if all(good) else "does not hold" if all(bad) else "holds in part"


# --- showing -----------------------------------------------------------------------------------------------------


def in_words(fit: Json | None) -> str:
    """Return an interval as text."""
    return "not finite" if fit is None else f"{fit['mean']:.2f} [{fit['low']:.2f}, {fit['high']:.2f}]"


def fraction(slope: float) -> str:
    """Return a slope as a whole number or a fraction."""
    return str(Fraction(slope).limit_denominator(12))


def bound_of(line: Json) -> str:
    """Return what the theorem says of a line."""
    if line["expected"] is None:
        return "–"
    words = f"{'' if line['equal'] else 'at most '}{fraction(line['expected'])}"
    return f"{words} ({line['theorem']})" if line["theorem"] else words


def block_of(record: Json, name: str) -> str:
    """Return what a README shows of a result: the picture, the table, and where they come from."""
    if not record.get("commit"):
        raise SystemExit(f"rates_{name}: the stored result has no commit, so nobody can repeat it: run it again.")
    table = ["| line | against | slope | in the upper half | theorem | last value | verdict |"]
    table.append("|---|---|---|---|---|---|---|")
    for line in record["lines"]:
        last = line["values"][-1]
        shown = "not finite" if last is None else f"{last['mean']:.3g} [{last['low']:.3g}, {last['high']:.3g}]"
        cells = [line["name"], line["x"], in_words(line["slope"]), in_words(line["tail"]), bound_of(line), shown]
        table.append(f"| {' | '.join(cells)} | {line['verdict'] or '–'} |")
    constants = ", ".join(f"{key} = {value:.3g}" for key, value in record["constants"].items())
    where = f"Seeds {record['seeds'][0]} to {record['seeds'][-1]}, commit {record['commit']}, {record['date']}."
    parts = [f"![{record['title']}](figures/rates_{name}.png)", "\n".join(table)]
    at_edge = [f"{line['name']}: {', '.join(line['edges'])}" for line in record["lines"] if line.get("edges")]
    parts += [f"Best at the edge of the range, so better settings may be outside: {'; '.join(at_edge)}."] * bool(
        at_edge
    )
    parts.append(f"{record['note']} Constants (seed 0): {constants}. *{where}*")
    return "\n\n".join(parts)


def marker(record: Json, line: str, what: str) -> str:
    """Return a number of a line for a sentence: slope, tail, verdict, expected, first, last, or at=X."""
    found = next((entry for entry in record["lines"] if entry["name"] == line), None)
    if found is None:
        raise SystemExit(f"{record['study']} has no line {line!r}: {', '.join(e['name'] for e in record['lines'])}.")
    if what in ("slope", "tail"):
        return in_words(found[what])
    if what == "verdict":
        return str(found["verdict"])
    if what == "expected":
        return fraction(found["expected"])
    places = {"first": 0, "last": -1} | {f"at={x:g}": i for i, x in enumerate(found["at"])}
    if what not in places:
        raise SystemExit(f"{record['study']}, {line}: no {what!r}. Known: slope, tail, expected, {', '.join(places)}.")
    value = found["values"][places[what]]
    return "not finite" if value is None else f"{value['mean']:.3g}"


def contradiction(record: Json, line: str | Sequence[str], claimed: str) -> str | None:
    """Return how the verdict on a claim contradicts those on its lines, if it does."""
    names = [line] if isinstance(line, str) else line
    verdicts = [marker(record, name, "verdict") for name in names]
    fine = {
        "holds": all(v == "holds" for v in verdicts),
        "does not hold": any(v == "does not hold" for v in verdicts),
        "undecided": not all(v == "holds" for v in verdicts) and "does not hold" not in verdicts,
        "holds in part": any(v != "holds" for v in verdicts) and any(v != "does not hold" for v in verdicts),
    }[claimed]
    return None if fine else f"{claimed!r}, but the lines say {', '.join(repr(v) for v in verdicts)}"


def draw(record: Json, path: Path) -> None:
    """Draw the lines with intervals, and the theorem's slopes as dashed lines."""
    titles = list(dict.fromkeys(line["panel"] for line in record["lines"]))
    figure, panels = figures.panels_of(len(titles), (4.6, 3.7))
    keys = {line["label"]: line["label"].lower().replace("-", "_") for line in record["lines"]}
    looks = styles(keys.values())
    handles = {}
    for panel, title in zip(panels, titles, strict=True):
        lines = [line for line in record["lines"] if line["panel"] == title]
        for line in lines:
            style = looks[keys[line["label"]]]
            handles[line["label"]] = figures.handle(style)
            draw_line(panel, line, style)
        draw_slopes(panel, lines)
        panel.set(xscale="log", yscale="log", title=figures.as_text(title))
        panel.set_xlabel(NAMES.get(lines[0]["x"], lines[0]["x"]))
        panel.set_ylabel("ratio" if lines[0]["over"] else record["labels"][lines[0]["y"]])
        set_ticks(panel, lines)
        finish(panel)
    figures.add_caption(
        figure,
        f"Points: geometric mean over {len(record['seeds'])} seeds; bars: its 95 % interval.",
        "Dashed: the slope that the theorem gives or bounds.",
    )
    figures.add_legend(figure, panels[0], handles)
    path.parent.mkdir(exist_ok=True)
    figures.write_figure(figure, path)


def draw_line(panel: Any, line: Json, style: Style) -> None:
    """Draw a line with its intervals; points that diverged are left out."""
    known = [(x, v) for x, v in zip(line["at"], line["values"], strict=True) if v is not None]
    x, mean = [x for x, _ in known], np.array([v["mean"] for _, v in known])
    below = mean - [v["low"] for _, v in known]
    above = np.array([v["high"] for _, v in known]) - mean
    panel.errorbar(x, mean, [below, above], **style.both, elinewidth=1.0, capsize=2)


def draw_slopes(panel: Any, lines: Sequence[Json]) -> None:
    """Draw the slopes that theorems give, each once, from a little above the first line that it is about."""
    for expected in dict.fromkeys(line["expected"] for line in lines):
        line = next((e for e in lines if e["expected"] == expected and e["values"][0] is not None), None)
        if expected is None or line is None:
            continue
        x = np.array([line["at"][0], line["at"][-1]])
        y = 1.25 * line["values"][0]["mean"] * (x / x[0]) ** expected
        panel.plot(x, y, "--", color=figures.FADED, linewidth=1.1, zorder=0)
        panel.annotate(fraction(expected), (x[-1], y[-1]), (3, 2), textcoords="offset points", color=figures.FADED)


def set_ticks(panel: Any, lines: Sequence[Json]) -> None:
    """Put a tick at each point of the grid if these are few whole numbers, else where matplotlib puts them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    grid = sorted({x for line in lines for x in line["at"]})
    panel.minorticks_off()
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    if len(grid) <= 8:
        panel.set_xticks(grid, [f"{x:,.0f}" if x >= 1 and round(x) == x else f"{x:.3g}" for x in grid])
        if len(grid) > 5 and grid[-1] >= 1000:
            panel.tick_params(axis="x", labelrotation=30)
    low, high = panel.get_ylim()
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


# --- the studies -------------------------------------------------------------------------------------------------


def studies() -> Iterator[Study]:
    """Yield all studies."""
    for path in sorted(HERE.glob("*/rates.py")):
        yield from module_of(path).STUDIES


@cache
def module_of(path: Path) -> ModuleType:
    """Import a file of studies."""
    name = f"rates_of_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("rates", sys.modules[__name__])  # the same classes, also when this file is the program
    spec.loader.exec_module(module)
    return module


def find(name: str) -> Study:
    """Return a study by its name, such as 003/speedup."""
    every = {f"{study.paper}/{study.name}": study for study in studies()}
    if name not in every:
        raise SystemExit(f"There is no study {name!r}: {', '.join(every)}.")
    return every[name]


def path_of(study: Study) -> Path:
    """Return where the result of a study is."""
    return HERE / study.paper / "results" / f"rates_{study.name}.json"


def refit(name: str) -> None:
    """Fit the lines of a stored result again."""
    study = find(name)
    record = json.loads(path_of(study).read_text())
    write(path_of(study), fitted(study, record))


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    runs = commands.add_parser("run")
    runs.add_argument("names", nargs="+")
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--seeds", type=int, default=SEEDS)
    runs.add_argument("--out", type=Path, default=Path("runs/rates"))
    commands.add_parser("refit").add_argument("names", nargs="+")
    chosen = parser.parse_args()
    if getattr(chosen, "seeds", 2) < 2:
        parser.error("--seeds must be at least 2, so that there is an interval.")
    if chosen.command == "list":
        for study in studies():
            print(f"{study.paper}/{study.name}: {study.title}; {len(study.points())} points")
    elif chosen.command == "refit":
        for name in chosen.names:
            refit(name)
    else:
        for name in chosen.names:
            print(run(name, chosen.jobs, chosen.seeds, chosen.out))


if __name__ == "__main__":
    main()

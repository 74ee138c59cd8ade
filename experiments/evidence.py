"""Run experiments for the record, and write what the READMEs show from the stored results.

    python experiments/evidence.py run 001/figure3 [--preset study] [--jobs 2] [--seeds 5] [--out runs/evidence]
    python experiments/evidence.py run sites/gusto --splits 5
    python experiments/evidence.py render [001 ...]
    python experiments/evidence.py check

``run`` tunes an experiment that has a [tune] table, writes its best settings to the file that its key ``tuned`` names,
and compares the variants with seeds that no trial has used. With ``--splits``, it does so for several splits into
training and test rows, each tuned by itself, so that no trial has used a test row of its split; ``tuned`` then has the
settings of the first split. What is in ``--out`` is resumed. The results go to ``results/NAME.json`` beside the
experiment: commit, settings, seeds, the final values of every seed, thinned histories, differences and verdicts.

``render`` rewrites the parts of the READMEs between ``<!-- result NAME -->``, ``<!-- rates NAME -->`` (of rates.py),
``<!-- claims -->`` or ``<!-- all claims -->`` and ``<!-- end -->``, and draws ``figures/NAME.png``, from ``results/``
and ``claims.toml`` alone: no number in them is typed by hand. ``check`` says which of them are not up to date, and
which verdicts the results contradict.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import rates
from fedstrata.cli.printing import progress
from fedstrata.core.errors import listed
from fedstrata.experiments import tables
from fedstrata.experiments.compare import compare_methods
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.config import Config, presets, read
from fedstrata.experiments.config_methods import config_methods
from fedstrata.experiments.config_tune import Plan, as_toml, tune_and_compare, tuning_of
from fedstrata.experiments.judge import Difference, p_in_words
from fedstrata.experiments.reproduce import find
from fedstrata.experiments.tune import Tuned
from fedstrata.training.metrics.catalogue import IN_TABLES
from fedstrata.training.plots import plot
from records import WORDS, Json, origin, rounded, write

HERE = Path(__file__).resolve().parent
COSTS = ("round", "samples", "bytes_up", "bytes_down", "seconds", "total_seconds")
ROWS = 26
"""How many rows of a history are stored at most."""

# --- running ---------------------------------------------------------------------------------------------------------


def run(name: str, preset: str | None, jobs: int, seeds: int, out: Path, splits: int = 0) -> None:
    """Tune and compare an experiment, and store the results."""
    (file,) = find(name)
    raw = tomllib.loads(file.path.read_text())
    names = presets(file.path)
    preset = preset or ("study" if "study" in names else next(iter(names), None))
    config = read(file.path, None, preset, tuned="tune" not in raw)
    folder, count = out / file.name, max(seeds, config.compare.seeds or 0)
    record: Json = {"experiment": file.name, "preset": preset, **origin()}
    how: Json = {"jobs": jobs, "callbacks": progress(False, brief=True), "say": lambda line: print(line, flush=True)}
    if splits and "tune" not in raw:
        raise SystemExit(f"{name} has no [tune] table, so its splits are those of its seeds: leave out --splits.")
    if "tune" in raw:
        plan = Plan.of(config, None)
        if splits:
            tuned, comparison, tuning = on_splits(config, splits, folder, how)
        else:
            tuned, judged = tune_and_compare(plan, count, out=folder, trial_callbacks=how["callbacks"], **how)
            assert judged is not None
            comparison, notes = judged, [*plan.notes, *tuned.notes]
            notes += [w for w in comparison.warnings if w not in tuned.notes]
            tuning = {"measure": tuned.measure, "notes": notes, "trials": rounded(tuned.rows)}
        target = file.path.parent / raw["tuned"]
        target.parent.mkdir(exist_ok=True)
        header = f"# Written by experiments/evidence.py: {file.name}, preset {preset}, commit {record['commit']}.\n\n"
        target.write_text(header + as_toml(tuning_of(plan.config, tuned)))
        record["tuning"] = tuning
        config = read(file.path, None, preset)
    else:
        kind, methods = config_methods(config, None, config.compare.baselines)
        chosen, table = range(config.train.seed, config.train.seed + count), config.compare
        comparison = compare_methods(
            kind, methods, chosen, baseline=table.baseline, measure=table.measure, out=folder / "final", **how
        )
    comparison.write(folder / "final", config.plot.measures)
    record |= result_of(comparison, config)
    write(file.path.parent / "results" / f"{file.path.stem}.json", record)


def on_splits(config: Config, splits: int, folder: Path, how: Json) -> tuple[Tuned, Comparison, Json]:
    """Tune on the training rows of each split, and compare on its test rows with a seed that no trial has used.

    Return the search on the first split, the comparison over all, and what is stored of the searches.
    """
    searches, compared = [], []
    for split in range(splits):
        plan = Plan.of(config.with_seed(config.train.seed + split * (config.tune.seeds + 1)), None)
        own = folder / f"split{split}"
        tuned, comparison = tune_and_compare(plan, 1, out=own, trial_callbacks=how["callbacks"], **how)
        assert comparison is not None
        searches.append(tuned)
        compared.append(comparison)
    first = compared[0]
    outcomes = {
        label: [outcome for one in compared for outcome in one.outcomes[label]]
        for label in first.outcomes
        if all(label in one.outcomes for one in compared)
    }
    notes = [
        f"Each of the {splits} splits was tuned on its own training rows, with seeds of its own.",
        *on_which([tuned.notes for tuned in searches]),
    ]
    trials = [{"split": split, **row} for split, tuned in enumerate(searches) for row in tuned.rows]
    tuning = {"measure": searches[0].measure, "notes": notes, "trials": rounded(trials)}
    return searches[0], Comparison(first.kind, outcomes, first.baseline, first.measure), tuning


def on_which(notes: list[list[str]]) -> list[str]:
    """Return the notes of several splits, each once, with the splits that have it unless all do."""
    having: dict[str, list[str]] = {}
    for split, group in enumerate(notes):
        for note in group:
            having.setdefault(note, []).append(str(split))
    return [
        note if len(group) == len(notes) else f"{note} (Split{'s' * (len(group) > 1)} {listed(group)}.)"
        for note, group in having.items()
    ]


def result_of(comparison: Comparison, config: Config) -> Json:
    """Return what is stored of a comparison."""
    names = {name for row in comparison.rows for name in row["values"]}
    shown = [*dict.fromkeys([comparison.measure, *(config.plot.measures or ()), *(m for m in IN_TABLES if m in names)])]
    measures = [name for name in shown if name in names]
    return {
        "settings": config.to_toml(),
        "kind": comparison.kind,
        "baseline": comparison.baseline,
        "measure": comparison.measure,
        "seeds": [outcome.seed for outcome in comparison.outcomes[comparison.baseline]],
        "rows": [rounded(row) for row in comparison.rows],
        "measured": comparison.measured,
        "conditions": comparison.conditions,
        "differences": {m: _differences(comparison, m) for m in measures},
        "histories": {
            label: [_thinned(outcome.history, measures) for outcome in group if not outcome.diverged]
            for label, group in comparison.outcomes.items()
        },
    }


def _differences(comparison: Comparison, measure: str) -> Json:
    """Return the difference of every method from every other, by baseline and label."""
    every: Json = {}
    for baseline in comparison.outcomes:
        judged = Comparison(comparison.kind, comparison.outcomes, baseline, measure).differences()
        every[baseline] = {
            label: d if isinstance(d, str) else rounded({**vars(d), "verdict": d.verdict})
            for label, d in judged.items()
        }
    return every


def _thinned(history: list[Json], measures: list[str]) -> list[Json]:
    every = max(1, -(-(len(history) - 1) // (ROWS - 1)))
    rows = [row for i, row in enumerate(history) if i % every == 0 or i == len(history) - 1]
    return [rounded({k: v for k, v in row.items() if k in (*COSTS, *measures)}) for row in rows]


# --- rendering -------------------------------------------------------------------------------------------------------


def papers() -> list[Path]:
    """Return the directories that have claims."""
    return sorted(path.parent for path in HERE.glob("*/claims.toml"))


class NotRun(Exception):
    """An experiment has no stored result yet."""


def load(paper: Path, name: str) -> Json:
    """Return a stored result."""
    path = paper / "results" / f"{name}.json"
    if not path.exists():
        raise NotRun(f"{paper.name}/{name}")
    stored: Json = json.loads(path.read_text())
    return stored


def block_of(paper: Path, name: str) -> str:
    """Return what a README shows of a result: the picture, the table, the verdicts, and where they come from."""
    result = load(paper, name)
    settings, measures = result["settings"], result["settings"].get("plot", {}).get("measures")
    wanted = [m for m in measures or IN_TABLES if any(m in row["values"] for row in result["rows"])]
    words = [f"- {_words(d)}" for d in result["differences"][result["measure"]][result["baseline"]].values()]
    lines = [f"![{name}](figures/{name}.png)", "", tables.as_markdown(result["rows"], wanted)]
    lines += [result["measured"], "", *words, "", f"*{result['conditions']}*", ""]
    if "tuning" in result:
        lines += [*(f"- {note}" for note in result["tuning"]["notes"]), ""]
    rounds, seeds = settings["train"]["rounds"], result["seeds"]
    preset = f", preset `{result['preset']}`" if result["preset"] else ""
    row = seeds == list(range(seeds[0], seeds[-1] + 1))
    lines.append(
        f"*{result['experiment']}{preset}, {rounds} rounds, "
        f"seeds {f'{seeds[0]} to {seeds[-1]}' if row else listed(list(map(str, seeds)))}, "
        f"commit {result['commit']}, {result['date']}.*"
    )
    return "\n".join(lines)


def _words(difference: Json | str) -> str:
    if isinstance(difference, str):
        return difference
    return Difference(**{k: v for k, v in difference.items() if k != "verdict"}).words


def filled(text: str, paper: Path) -> str:
    """Fill in numbers: ``{figure3:fedavg:auc}`` is a mean, ``{figure3:fgda-fedavg:auc}`` a gain with its interval.

    ``{rates_speedup:LINE:slope}`` is a slope with its interval; ``rates.marker`` has the other numbers of a line.
    """

    def number(found: re.Match[str]) -> str:
        name, label, measure = found.group(1).split(":")
        result = load(paper, name)
        if name.startswith("rates_"):
            return rates.marker(result, label, measure)
        rows = {row[result["kind"]]: row for row in result["rows"]}
        if label in rows:
            row = rows[label]
            return f"{row[measure]:.3f}" if measure in row else tables.diverged_in(row)
        one, other = _pair(label, rows)
        gain = result["differences"][measure][other][one]
        if isinstance(gain, str):
            return gain
        return f"{gain['gain']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}], {p_in_words(gain['p'])}"

    return re.sub(r"\{([^{}]+:[^{}]+:[^{}]+)\}", number, text)


def _pair(label: str, rows: Json) -> tuple[str, str]:
    for one in rows:
        if label.startswith(f"{one}-") and label[len(one) + 1 :] in rows:
            return one, label[len(one) + 1 :]
    raise SystemExit(f"No method or pair of methods {label!r}: {', '.join(rows)}.")


def claims_of(paper: Path) -> list[Json]:
    """Return the claims of a paper, checked."""
    claims: list[Json] = tomllib.loads((paper / "claims.toml").read_text())["claim"]
    for claim in claims:
        if claim["verdict"] not in WORDS:
            raise SystemExit(f"{paper.name}: the verdict {claim['verdict']!r} must be one of {', '.join(WORDS)}.")
    return claims


def claim_table(paper: Path) -> str:
    """Return the table of a paper's claims."""
    claims = claims_of(paper)
    head = "the paper's claim | ours" if any("paper" in claim for claim in claims) else "claim | what we found"
    lines = [f"| where | {head} | verdict |", "|---|---|---|---|"]
    for claim in claims:
        said = f"{claim['claim']} ({claim['paper']})" if claim.get("paper") else claim["claim"]
        try:
            why = filled(claim["why"], paper)
        except NotRun:
            why = "not measured yet"
        lines.append(f"| {claim['where']} | {said} | {why} | **{claim['verdict']}** |")
    return "\n".join(lines)


def all_claims() -> str:
    """Return the table of all papers' claims, in short."""
    lines = ["| paper | claim | verdict |", "|---|---|---|"]
    for paper in papers():
        for claim in claims_of(paper):
            where = f"[{paper.name}]({paper.name}/README.md), {claim['where']}"
            lines.append(f"| {where} | {claim['claim']} | {claim['verdict']} |")
    return "\n".join(lines)


def contradictions(paper: Path) -> list[str]:
    """Return the claims whose verdict the stored results contradict."""
    wrong = []
    for claim in claims_of(paper):
        try:
            filled(claim["why"], paper)
            reason = _contradiction(claim, paper)
        except NotRun as missing:
            given = claim["verdict"]
            reason = None if given == "undecided" else f"{given!r}, but {missing} has not been measured"
        wrong += [] if reason is None else [f"{paper.name}, {claim['where']}: {reason}."]
    return wrong


def _contradiction(claim: Json, paper: Path) -> str | None:
    """Return how the stored results contradict a claim's verdict, if they do."""
    if "rates" in claim:
        return rates.contradiction(load(paper, f"rates_{claim['rates']}"), claim["row"], claim["verdict"])
    if "better" not in claim:
        return None
    judged = load(paper, claim["result"])["differences"][claim["measure"]][claim["than"]][claim["better"]]
    verdict = judged if isinstance(judged, str) else judged["verdict"]
    fits = {"holds": verdict == "ahead", "does not hold": verdict != "ahead", "undecided": verdict == "undecided"}
    return None if fits.get(claim["verdict"], True) else f"{claim['verdict']!r}, but the result is {verdict!r}"


def rendered(readme: Path) -> str:
    """Return a README with its generated parts written again."""

    def part(found: re.Match[str]) -> str:
        kind, _, name = found.group(1).partition(" ")
        made = {
            "result": lambda: block_of(readme.parent, name),
            "rates": lambda: rates.block_of(load(readme.parent, f"rates_{name}"), name),
            "claims": lambda: claim_table(readme.parent),
            "all": all_claims,
        }[kind]
        try:
            text = made()
        except NotRun as missing:
            program = "rates" if kind == "rates" else "evidence"
            what = str(missing).replace("rates_", "")
            text = f"*Not measured yet in this edition: `python experiments/{program}.py run {what}`.*"
        return f"<!-- {found.group(1)} -->\n\n{text}\n\n<!-- end -->"

    pattern = r"<!-- ((?:result|rates) \S+|claims|all claims) -->\n.*?<!-- end -->"
    return re.sub(pattern, part, readme.read_text(), flags=re.S)


def readmes(names: list[str]) -> list[Path]:
    """Return the READMEs of these papers, or all."""
    wanted = [HERE / name for name in names] or papers()
    return [*(paper / "README.md" for paper in wanted), HERE / "README.md"]


def draw(paper: Path, name: str) -> None:
    """Draw the picture of a result."""
    result = load(paper, name)
    failed = {row[result["kind"]]: [[]] * row["diverged"] for row in result["rows"] if row["diverged"]}
    histories = {label: runs for label, runs in result["histories"].items() if runs}
    (paper / "figures").mkdir(exist_ok=True)
    plot(histories, paper / "figures" / f"{name}.png", diverged=failed, **result["settings"].get("plot", {}))


def render(names: list[str]) -> None:
    """Write READMEs and pictures."""
    for readme in readmes(names):
        readme.write_text(rendered(readme))
        for name in re.findall(r"<!-- result (\S+) -->", readme.read_text()):
            with suppress(NotRun):
                draw(readme.parent, name)
        for name in re.findall(r"<!-- rates (\S+) -->", readme.read_text()):
            with suppress(NotRun):
                rates.draw(load(readme.parent, f"rates_{name}"), readme.parent / "figures" / f"rates_{name}.png")


def check() -> list[str]:
    """Return what is not up to date, and contradictions."""
    stale = [f"{path} is not up to date: render it." for path in readmes([]) if rendered(path) != path.read_text()]
    return stale + [line for paper in papers() for line in contradictions(paper)]


def main() -> None:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("names", nargs="+")
    runs.add_argument("--preset")
    runs.add_argument("--jobs", type=int, default=2)
    runs.add_argument("--seeds", type=int, default=5)
    runs.add_argument("--splits", type=int, default=0)
    runs.add_argument("--out", type=Path, default=Path("runs/evidence"))
    commands.add_parser("render").add_argument("names", nargs="*")
    commands.add_parser("check")
    chosen = parser.parse_args()
    if chosen.command == "run":
        for name in chosen.names:
            run(name, chosen.preset, chosen.jobs, chosen.seeds, chosen.out, chosen.splits)
    elif chosen.command == "render":
        render(chosen.names)
    else:
        wrong = check()
        print("\n".join(wrong) or "Everything is up to date.")
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Figure 7: draw the norms of vhat within rounds, and measure how much the clients' learning rates differ.

    python experiments/evidence.py run 003/figure7
    python experiments/003/figure7.py [--runs runs/evidence/003/figure7/final]

Reads the diagnostics of the runs of figure7.toml. Writes figures/figure7_vhat.png, of the two clients that are in all
four rounds of its first seed, and results/figure7_rates.json, whose rows are a method in a round, in means over seeds:

ratio:   the largest effective learning rate of the round's clients after their last step, over the smallest.
spread:  its standard deviation over clients, over its mean.
rate:    its mean over clients, relative to that in round 1.
growth:  the factor by which the squared norm of vhat grows from the first to the last local step, mean over clients
         recorded; ``growth_of_one`` and ``growth_of_other`` are those of the two clients of the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedstrata.training.plots import plot_diagnostics

HERE = Path(__file__).resolve().parent
LABELS = {"fedlalr": "fedlalr", "fedlalr, maximum": "fedlalr--maximum", "fedlalr, 20 steps": "fedlalr--20-steps"}

Row = dict[str, Any]


def diagnostics(runs: Path, folder: str) -> dict[int, list[Row]]:
    """Return the rows of every seed of a method."""
    files = {int(path.parent.name.rpartition("-seed")[2]): path for path in runs.glob(f"{folder}-seed*/*.jsonl")}
    files = {seed: path.with_name("diagnostics.jsonl") for seed, path in files.items()}
    if not files:
        raise SystemExit(f"No runs of {folder} in {runs}: run figure7 first.")
    return {seed: [json.loads(line) for line in files[seed].read_text().splitlines()] for seed in sorted(files)}


def growth(rows: Sequence[Row], number: int) -> dict[int, float]:
    """Return the growth of the squared norm of vhat within a round, by client."""
    norms: dict[int, list[float]] = {}
    for row in rows:
        if row["round"] == number and "vhat" in row:
            norms.setdefault(row["client"], []).append(row["vhat"])
    return {client: values[-1] / values[0] for client, values in norms.items()}


def measured(label: str, seeds: dict[int, list[Row]]) -> list[Row]:
    """Return a row for each recorded round of a method."""
    of_rounds = {seed: {r["round"]: r for r in rows if "rate" in r} for seed, rows in seeds.items()}
    first = next(iter(seeds))
    numbers = sorted(of_rounds[first])
    result = []
    for number in numbers:
        rounds = [of_rounds[seed][number] for seed in seeds]
        start = [of_rounds[seed][numbers[0]]["rate"] for seed in seeds]
        grown = [value for rows in seeds.values() for value in growth(rows, number).values()]
        two = dict(zip(("growth_of_one", "growth_of_other"), growth(seeds[first], number).values(), strict=False))
        result.append(
            {
                "round": f"{label}, round {number}",
                "seeds": len(seeds),
                "ratio": fmean(r["rate_most"] / r["rate_least"] for r in rounds),
                "spread": fmean(r["rate_spread"] for r in rounds),
                "rate": fmean(r["rate"] / begun for r, begun in zip(rounds, start, strict=True)),
                "growth": fmean(grown),
                **two,
            }
        )
    return result


def main() -> None:
    """Read the runs, and write the picture and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence/003/figure7/final"))
    runs = parser.parse_args().runs
    found = {label: diagnostics(runs, folder) for label, folder in LABELS.items()}
    seeds = found["fedlalr"]
    (HERE / "figures").mkdir(exist_ok=True)
    plot_diagnostics(seeds[min(seeds)], HERE / "figures" / "figure7_vhat.png")
    rows = [
        {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        for label, of_seeds in found.items()
        for row in measured(label, of_seeds)
    ]
    (HERE / "results").mkdir(exist_ok=True)
    text = json.dumps({"kind": "round", "seeds": sorted(seeds), "rows": rows}, indent=1)
    (HERE / "results" / "figure7_rates.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()

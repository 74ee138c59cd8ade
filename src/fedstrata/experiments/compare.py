"""Compare algorithms, or variants of an experiment, over several seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedstrata.core.errors import Diverged
from fedstrata.core.files import Row
from fedstrata.experiments import runs
from fedstrata.experiments.config import Config
from fedstrata.experiments.overlay import slug
from fedstrata.experiments.runs import Say, candidates, check_all
from fedstrata.experiments.tables import as_markdown, measured_in_all
from fedstrata.training.callbacks import Callback, Titled
from fedstrata.training.run import Run


@dataclass(frozen=True)
class Comparison:
    """The runs of each algorithm or variant (``kind``), one per seed; a run that diverged is None."""

    kind: str
    runs: dict[str, list[Run | None]]

    @cached_property
    def finished(self) -> dict[str, list[Run]]:
        """The runs that did not diverge, by label; a label may have none."""
        return {label: [run for run in group if run is not None] for label, group in self.runs.items()}

    @property
    def histories(self) -> dict[str, list[list[Row]]]:
        """The histories of the finished runs, by label, without labels that have none."""
        return {label: [run.history for run in group] for label, group in self.finished.items() if group}

    @property
    def datasets(self) -> list[str]:
        """The names of the data that the runs used."""
        return list(dict.fromkeys(run.summary["data"] for group in self.finished.values() for run in group))

    @property
    def measured(self) -> str:
        """A sentence on the data that the runs were measured on."""
        return measured_in_all({label: [run.summary for run in group] for label, group in self.finished.items()})

    @cached_property
    def rows(self) -> list[Row]:
        """One row per label: mean and standard deviation over seeds at the end of the runs.

        ``NAME_seeds`` counts the runs with a finite value of a measure, if not all that finished had one.
        """
        rows = []
        for label, group in self.finished.items():
            total = len(self.runs[label])
            row: Row = {self.kind: label, "seeds": total, "diverged": total - len(group)}
            last = [run.history[-1] for run in group]
            for key in dict.fromkeys(k for values in last for k in values):
                values = [r[key] for r in last if key in r]
                row[key] = statistics.fmean(values)
                row[f"{key}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
                if len(values) < len(last):
                    row[f"{key}_seeds"] = len(values)
            rows.append(row)
        return rows

    def write(self, folder: Path, measures: Sequence[str] | None) -> None:
        """Write compare.json and table.md."""
        (folder / "compare.json").write_text(json.dumps(self.rows, indent=2))
        (folder / "table.md").write_text(as_markdown(self.rows, measures) + f"\n{self.measured}\n")


def compare(
    config: Config,
    names: Sequence[str] | None,
    seeds: Sequence[int],
    out: Path | None,
    callbacks: Sequence[Callback],
    say: Say,
) -> Comparison:
    """Run each algorithm in ``names``, or each variant if it is None, with each seed.

    A run that is already in ``out`` is resumed, or skipped if it is finished. One that diverges does not stop the rest.
    """
    kind, configs = candidates(config, names)
    check_all(c.with_seed(seeds[0]) for c in configs.values())
    results: dict[str, list[Run | None]] = {label: [] for label in configs}
    plan = [(label, c, seed) for label, c in configs.items() for seed in seeds]
    for number, (label, candidate, seed) in enumerate(plan, 1):
        folder = None if out is None else out / f"{slug(label)}-seed{seed}"
        listeners = [Titled(c, f"run {number} of {len(plan)}, {label} seed {seed}") for c in callbacks]
        resume = folder is not None and folder.exists()
        try:
            run = runs.run_config(candidate.with_seed(seed), folder, resume, listeners, compared=True)
        except Diverged as error:
            say(f"{label}, seed {seed}: {error}")
            results[label].append(None)
        else:
            results[label].append(run)
    return Comparison(kind, results)

"""The result of a comparison: runs of several methods with the same seeds, tables, verdicts and pictures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedstrata.core.errors import FedstrataError, unknown
from fedstrata.core.files import Row, make_folder, write_atomically
from fedstrata.core.frames import frame
from fedstrata.experiments import tables
from fedstrata.experiments.judge import Difference, differences, final_values, interval
from fedstrata.experiments.methods import Outcome
from fedstrata.training import plots
from fedstrata.training.metrics.catalogue import measure as about
from fedstrata.training.metrics.catalogue import sign_of

if TYPE_CHECKING:
    import pandas


def files_of(form: str = "png") -> list[str]:
    """Return the names of the files that a comparison writes besides its runs, with pictures in this form."""
    return ["compare.json", "verdicts.json", "table.md", f"ranking.{form}", f"plot.{form}"]


@dataclass(frozen=True)
class Comparison:
    """The runs of several methods with the same seeds.

    kind:     what a label stands for: "algorithm", "variant" or "method".
    outcomes: how the runs of each method ended, one per seed.
    baseline: the method that the others are judged against.
    measure:  the measure to judge by.
    warnings: what a reader must know of the search that came before, if any.
    """

    kind: str
    outcomes: dict[str, list[Outcome]]
    baseline: str
    measure: str
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(self.outcomes)}: {self.seeds} seeds>"

    @property
    def seeds(self) -> int:
        """How many seeds each method has."""
        return len(self.outcomes[self.baseline])

    @cached_property
    def finished(self) -> dict[str, list[Outcome]]:
        """The runs that did not diverge, by label; a label may have none."""
        return {label: [o for o in group if not o.diverged] for label, group in self.outcomes.items()}

    @property
    def diverged(self) -> dict[str, list[list[Row]]]:
        """The histories of the runs that diverged, as far as they were recorded, by label."""
        groups = {label: [o.history for o in group if o.diverged] for label, group in self.outcomes.items()}
        return {label: group for label, group in groups.items() if group}

    @property
    def histories(self) -> dict[str, list[list[Row]]]:
        """The histories of the finished runs, by label, without labels that have none."""
        return {label: [o.history for o in group] for label, group in self.finished.items() if group}

    @property
    def datasets(self) -> list[str]:
        """The names of the data that the runs used."""
        return list(dict.fromkeys(o.summary["data"] for group in self.finished.values() for o in group))

    @property
    def measured(self) -> str:
        """A sentence on the data that the runs were measured on."""
        summaries = {label: [o.summary for o in group] for label, group in self.finished.items() if group}
        return " ".join([tables.measured_in_all(summaries), *tables.untrained_in_all(summaries)])

    @property
    def best(self) -> str:
        """The label with the best mean of the measure, among those that have it in every seed."""
        means = {row[self.kind]: sign_of(self.measure) * row[self.measure] for row in self.rows if self.measure in row}
        if not means:
            raise FedstrataError(f"No method has {self.measure} in every seed, so none is the best.")
        return str(max(means, key=lambda label: means[label]))

    @cached_property
    def rows(self) -> list[Row]:
        """One row per label: mean and standard deviation over seeds at the end of the runs, and ``values`` per seed.

        A method of which a run diverged, or has no value, has no mean: the mean of the others would flatter it.
        """
        rows = []
        for label, group in self.outcomes.items():
            failed = sum(o.diverged for o in group)
            row: Row = {self.kind: label, "seeds": len(group), "diverged": failed}
            names = dict.fromkeys(name for o in group for name in o.final or {})
            for name in names:
                values = final_values(group, name)
                if len(values) == len(group):
                    row[name] = statistics.fmean(values)
                    row[f"{name}_std"] = statistics.stdev(values) if len(values) > 1 else 0.0
            row["values"] = {name: [(o.final or {}).get(name) for o in group] for name in names}
            row["errors"] = [o.error for o in group if o.error is not None]
            rows.append(row)
        return rows

    def differences(self, measure: str | None = None) -> dict[str, Difference | str]:
        """Compare every method with the baseline in a measure; a method without a verdict has a sentence instead."""
        if measure is not None:
            self._check_measured(measure)
        return differences(self.outcomes, self.baseline, measure or self.measure)

    @cached_property
    def verdicts(self) -> list[str]:
        """A sentence on each method, compared with the baseline."""
        return [d if isinstance(d, str) else d.words for d in self.differences().values()]

    @property
    def conditions(self) -> str:
        """A sentence on how the verdicts were reached."""
        judged = [d for d in self.differences().values() if isinstance(d, Difference) and d.low is not None]
        what, where = about(self.measure).phrase, " on the training data" if self.on_training_data else ""
        kind = "training rows" if self.on_training_data else "test rows"
        rows = f" and {kind}" if judged and all(d.over_rows for d in judged) else ""
        correction = "; Holm's correction of p-values" if len(judged) > 1 else ""
        if len(self.outcomes) == 1:
            text = f"A single method: nothing is compared. The measure is {what}{where}."
        elif self.seeds == 1:
            text = f"Gains in {what}{where} of a single seed: no intervals, and no verdicts."
        elif not judged:
            text = f"No verdicts: the measure is {what}{where}."
        else:
            text = f"Gains in {what}{where} with 95 % intervals over {self.seeds} seeds{rows}{correction}."
        if self.on_training_data:
            text += (
                " There are no test data for it: how the methods do on new rows is unknown. Hold some out (holdout)."
            )
        return text

    @property
    def on_training_data(self) -> bool:
        """Whether the measure of some models is that of the rows they were trained on, for want of test data."""
        models = [o for group in self.finished.values() for o in group if o.loss]
        rows = about(self.measure).rows
        return any("training" in str(o.summary.get("measured_on", {}).get(rows, "")) for o in models)

    def frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per method, seed and evaluation; needs ``fedstrata[frames]``."""
        rows = [
            {self.kind: label, "seed": outcome.seed, "diverged": outcome.diverged, **row}
            for label, group in self.outcomes.items()
            for outcome in group
            for row in outcome.history
        ]
        return frame(rows)

    def table(self, form: Literal["markdown", "latex", "csv"] = "markdown", measures: Sequence[str] = ()) -> str:
        """Return the results as a table in Markdown, LaTeX or CSV: all measures, or those that are named.

        CSV has numbers in full: the mean, the standard deviation, and the ends of the 95 % interval over seeds.
        """
        self._check_measured(*measures)
        return tables.formatted(self.rows, form, measures or self.columns())

    def _check_measured(self, *measures: str) -> None:
        """Raise if no run has one of these measures."""
        measured = {name for row in self.rows for name in row["values"]}
        for name in measures:
            if name not in measured:
                raise unknown("measure", name, measured)

    def columns(self, measures: Sequence[str] | None = None) -> list[str]:
        """Return the measures of a table, by default the main ones: first what the verdicts are about."""
        return list(dict.fromkeys([self.measure, *(measures or tables.columns_of(self.rows))]))

    def plot(self, path: str | Path = "compare.png", **options: Any) -> Path:
        """Plot the measures over rounds, or another ``axis``; see :func:`fedstrata.training.plots.plot`."""
        return plots.plot(self.histories, path, diverged=self.diverged, **options)

    def plot_ranking(self, path: str | Path = "ranking.png") -> Path:
        """Plot the methods in the order of the measure, with intervals, and the differences from the baseline."""
        judged = self.differences()
        rows = []
        for label, group in self.outcomes.items():
            values, failed = final_values(group, self.measure), sum(o.diverged for o in group)
            bounds, missing = interval(values).bounds if values else None, len(group) - failed - len(values)
            rows.append(plots.Ranked(label, values, bounds, failed, *_shown(judged.get(label)), missing))
        return plots.plot_ranking(rows, path, self.baseline, measure=self.measure)

    @property
    def judgement(self) -> Row:
        """The verdicts, and what a reader needs to understand them."""
        verdicts = {"baseline": self.baseline, "measure": self.measure, "verdicts": self.verdicts}
        return verdicts | {"conditions": self.conditions, "warnings": list(self.warnings)}

    @property
    def is_ranked(self) -> bool:
        """Whether there is a ranking to plot: several methods, with several seeds."""
        return self.seeds > 1 and len(self.outcomes) > 1

    def write(self, folder: Path, measures: Sequence[str] | None, form: str = "png") -> None:
        """Write compare.json, verdicts.json, table.md and the ranking, if there is one."""
        make_folder(folder)
        judged = [d if isinstance(d, str) else {**vars(d), "verdict": d.verdict} for d in self.differences().values()]
        write_atomically(folder / "compare.json", json.dumps(self.rows, indent=2).encode())
        write_atomically(
            folder / "verdicts.json", json.dumps({**self.judgement, "differences": judged}, indent=2).encode()
        )
        words = "".join(f"- {sentence}\n" for sentence in self.verdicts) + "\n" * bool(self.verdicts)
        table = tables.as_markdown(self.rows, self.columns(measures))
        text = f"{table}\n{self.measured}\n\n{words}{self.conditions}\n"
        text += "".join(f"\n{warning}\n" for warning in self.warnings)
        write_atomically(folder / "table.md", text.encode())
        if self.is_ranked:
            self.plot_ranking(folder / f"ranking.{form}")


def _shown(versus: Difference | str | None) -> tuple[float | None, tuple[float, float] | None, float | None]:
    """Return what a plot shows of a difference: its mean, as values and not as gains, its interval and p-value."""
    if not isinstance(versus, Difference):
        return None, None, None
    sign = sign_of(versus.measure)
    if versus.low is None or versus.high is None:
        return sign * versus.gain, None, versus.p
    low, high = sorted((sign * versus.low, sign * versus.high))
    return sign * versus.gain, (low, high), versus.p

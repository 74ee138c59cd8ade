"""Tuning methods, and the result of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedstrata.algorithms.algorithm import Algorithm
from fedstrata.core.errors import listed, unknown
from fedstrata.core.files import Row, write_atomically
from fedstrata.core.frames import frame
from fedstrata.data.federated import FederatedData
from fedstrata.experiments import tables
from fedstrata.experiments.compare import compare_in, seeds_of
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.influence import marks_of
from fedstrata.experiments.methods import Method, Trial
from fedstrata.experiments.overlay import Tables, slug
from fedstrata.experiments.pool import Say
from fedstrata.experiments.schema import TuneTable
from fedstrata.experiments.search import Space, joined
from fedstrata.experiments.trials import Tried, claim
from fedstrata.experiments.tuner import Tuner
from fedstrata.training import plots
from fedstrata.training.callbacks import Callback
from fedstrata.training.fingerprint import digest_of
from fedstrata.training.metrics.catalogue import VALIDATION

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of a search.

    kind:     what a label stands for: "algorithm", "variant" or "method".
    methods:  the methods that were tuned.
    trials:   the trials of each method, best first.
    spaces:   what was searched, and ``extended`` what was added beyond the edges.
    measure:  the measure on validation data that ranked them.
    notes:    the budget of each method, and warnings about the result.
    trial_seeds: the seeds that trials used.
    failed:   the methods of which every trial failed: they have no best settings, and are not compared.
    """

    kind: str
    methods: dict[str, Method]
    trials: dict[str, list[Tried]]
    spaces: dict[str, Space]
    extended: dict[str, Space]
    measure: str
    notes: list[str]
    trial_seeds: range
    failed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        best = ", ".join(f"{label} {self.trials[label][0].value(self.measure):.4g}" for label in self.options)
        return f"<Tuned: {self.measure} {best}>"

    @property
    def options(self) -> dict[str, Tables]:
        """The hyperparameters of the best trial of each method, as in a configuration file."""
        return {label: trials[0].options for label, trials in self.trials.items() if label not in self.failed}

    @property
    def best(self) -> dict[str, Algorithm]:
        """The algorithm of each method with its best hyperparameters."""
        return {label: method.algorithm for label, method in self.tuned_methods.items()}

    @property
    def warnings(self) -> list[str]:
        """The notes that a reader must not miss."""
        return [note for note in self.notes if note.startswith("Warning")]

    @property
    def rows(self) -> list[Row]:
        """One row per trial, best first within a method."""
        return [trial.row(self.kind, self.measure) for trials in self.trials.values() for trial in trials]

    def frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame with one row per trial; needs ``fedstrata[frames]``."""
        return frame([{k: v for k, v in row.items() if k != "options"} | row["options"] for row in self.rows])

    def table(self, form: Literal["markdown", "latex", "csv"] = "markdown") -> str:
        """Return the best trial of each method as a table in Markdown, LaTeX or CSV."""
        if form == "csv":
            return tables.as_csv(self._numbers())
        head = [self.kind, "hyperparameters", f"{self.measure} (validation)", "trials", "failed"]
        body = []
        for label, trials in self.trials.items():
            best = None if label in self.failed else trials[0]
            shown = "–" if best is None else ", ".join(f"{name} = {value}" for name, value in best.options.items())
            reached = None if best is None else best.value(self.measure)
            value = "–" if reached is None else tables.number(reached)
            body.append([label, shown, value, str(len(trials)), str(_failures(trials))])
        return tables.formatted_cells([head, *body], form)

    def _numbers(self) -> list[list[tables.Cell]]:
        """Return the best trial of each method as numbers, with a head; each hyperparameter has a column."""
        best = {label: trials[0] for label, trials in self.trials.items() if label not in self.failed}
        names = list(dict.fromkeys(name for trial in best.values() for name in trial.numbers))
        lines: list[list[tables.Cell]] = [[self.kind, *names, f"{VALIDATION}{self.measure}", "trials", "failed"]]
        for label, trial in best.items():
            counts = [len(self.trials[label]), _failures(self.trials[label])]
            lines.append([label, *(trial.numbers.get(n) for n in names), trial.value(self.measure), *counts])
        return lines

    def plot(self, path: str | Path = "search.png") -> Path:
        """Plot the best value so far against the number of trials, for each method."""
        trials = {label: sorted(group, key=lambda trial: trial.number) for label, group in self.trials.items()}
        shown = {label: [self._shown(trial) for trial in group] for label, group in trials.items()}
        return plots.plot_search(shown, path, measure=self.measure)

    def _shown(self, trial: Tried) -> plots.Trial:
        full = trial.rounds == self.methods[trial.label].settings.rounds
        return plots.Trial(trial.numbers, trial.value(self.measure), full or trial.diverged > 0)

    def plot_response(self, label: str, path: str | Path = "response.png") -> Path:
        """Plot the measure against each hyperparameter of a method."""
        if label not in self.spaces:
            raise unknown(self.kind, label, self.spaces)
        space = self.spaces[label]
        extended = {name: r for name, r in self.searched(label).items() if r != space[name]}
        searched, grown = ({name: (r.low, r.high) for name, r in one.items()} for one in (space, extended))
        complete = [trial for trial in self.trials[label] if space.keys() <= trial.numbers.keys()]
        trials = [self._shown(trial) for trial in complete]
        return plots.plot_response(trials, path, searched, grown, measure=self.measure, title=label)

    @property
    def tuned_methods(self) -> dict[str, Method]:
        """The methods with their best hyperparameters."""
        return {label: self.methods[label].with_options(options) for label, options in self.options.items()}

    def compare(
        self,
        seeds: int | Sequence[int] = 5,
        *,
        baseline: str | None = None,
        measure: str | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        jobs: int = 1,
        callbacks: Sequence[Callback] = (),
    ) -> Comparison:
        """Run every method with its best hyperparameters on the test data; the arguments are those of ``fs.compare``.

        seeds: how many, counted from the first seed that no trial has used, or the seeds themselves.
        """
        final = seeds_of(seeds, self.trial_seeds.stop)
        how: dict[str, Any] = {"baseline": baseline, "measure": measure or self.measure, "jobs": jobs}
        how |= {"callbacks": callbacks, "warnings": [*self.warnings, *self.seen(final)]}
        return compare_in(self.kind, self.tuned_methods, final, out, resume, **how)

    def seen(self, seeds: Sequence[int]) -> list[str]:
        """Warn if trials have used these seeds, or rows that are test rows with the first of them."""
        warnings, used = [], [str(seed) for seed in seeds if seed in self.trial_seeds]
        if used:
            warnings.append(
                f"Warning: seed{'s' * (len(used) > 1)} {listed(used)} had trials, from which the best were chosen, so "
                "the results are optimistic. Compare with other seeds."
            )
        labels_of: dict[str, list[str]] = {}
        data: dict[str, list[FederatedData]] = {}
        for label, method in self.methods.items():
            starts = [method.start(seed, Trial())[:2] for seed in (self.trial_seeds[0], seeds[0])]
            key = " ".join(digest_of(*start)["data"] for start in starts)
            labels_of.setdefault(key, []).append(label)
            data.setdefault(key, [own for _, own in starts])
        for key, labels in labels_of.items():
            count, of = seen_rows(*data[key])
            if count:
                warnings.append(
                    f"Warning: {listed(labels)}: {count:,} of {of:,} test rows of seed {seeds[0]} were rows of the "
                    "trials, since every seed splits the data anew. Hold the test rows out once, with the same seed "
                    "for all."
                )
        return warnings

    def searched(self, label: str) -> Space:
        """Return the ranges of a method, with what was added beyond their edges."""
        return joined(self.spaces[label], self.extended[label])

    def _ranges(self) -> list[str]:
        """Say what was searched for each method."""
        sentences = []
        for label in self.spaces:
            ranges = [f"{name} from {r.low:g} to {r.high:g}" for name, r in self.searched(label).items()]
            sentences.append(f"{label}: searched {', '.join(ranges) or 'nothing'}.")
        return sentences

    def write(self, folder: Path, form: str = "png") -> None:
        """Write trials.json, tune.md, and plots of the search and of the response to each method's hyperparameters."""
        write_atomically(folder / "trials.json", json.dumps(self.rows, indent=1).encode())
        notes = "".join(f"- {note}\n" for note in [*self.notes, *self._ranges()])
        write_atomically(folder / "tune.md", f"{self.table()}\n{notes}".encode())
        self.plot(folder / f"search.{form}")
        for label, space in self.spaces.items():
            if space and label not in self.failed:
                self.plot_response(label, folder / f"response-{slug(label)}.{form}")


def files_of(labels: Iterable[str], form: str = "png") -> list[str]:
    """Return the names of the files that the search of these methods writes, besides its trials."""
    return ["trials.json", "tune.md", f"search.{form}", *(f"response-{slug(label)}.{form}" for label in labels)]


def seen_rows(trial: FederatedData, test: FederatedData) -> tuple[int, int]:
    """Return how many test rows of ``test`` are training rows of ``trial``, and of how many."""
    rows, before = _test_rows(test), _test_rows(trial)
    if np.array_equal(np.sort(rows), np.sort(before)):
        return 0, len(rows)  # the same split: rows that occur twice are the user's own
    return int(np.isin(rows, marks_of([a[trial.train.stored_rows] for a in trial.train.arrays])).sum()), len(rows)


def _test_rows(data: FederatedData) -> np.ndarray:
    """Return a number for each test row, pooled or of a client, that identifies it."""
    parts = [data.test] if data.test is not None else []
    if data.client_test is not None:
        parts.append(tuple(a[data.client_test.stored_rows] for a in data.client_test.arrays))
    return np.concatenate([np.empty(0, np.uint64), *map(marks_of, parts)])


def _failures(trials: Sequence[Tried]) -> int:
    return sum(trial.diverged > 0 for trial in trials)


def tune_methods(
    kind: str,
    methods: Mapping[str, Method],
    table: TuneTable,
    seed: int,
    *,
    folder: Path | None = None,
    identity: str = "",
    jobs: int = 1,
    callbacks: Sequence[Callback] = (),
    say: Say = lambda line: None,
) -> Tuned:
    """Search the hyperparameters of methods on validation data.

    With ``folder``, a search can be resumed by another one with the same ``identity``.
    """
    tuner = Tuner(methods, table, folder, jobs, callbacks, say, seed)
    if folder is not None:
        claim(folder, identity)
    trials = tuner.search()
    spaces, failed = (tuner.spaces, tuner.extended), tuple(tuner.failed)
    return Tuned(kind, dict(methods), trials, *spaces, tuner.ranking.measure, tuner.notes, tuner.seeds, failed)

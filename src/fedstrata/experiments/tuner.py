"""The search itself: which settings to try, in which order, and for how long."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedstrata.core.errors import FedstrataError, InputError, listed, unknown
from fedstrata.experiments.methods import Method, Trial, check_methods, default_measure, in_all
from fedstrata.experiments.notes import budget_in_words, warnings_of
from fedstrata.experiments.pool import Say, check_jobs
from fedstrata.experiments.ranking import Ranking, edges_of
from fedstrata.experiments.schema import TuneTable
from fedstrata.experiments.search import Point, Sampler, Space, as_options, defaults_of, joined, sampler_of, space_of
from fedstrata.experiments.trial_runs import TrialRuns
from fedstrata.experiments.trials import Store, Tried, number_of, rungs_of
from fedstrata.training.callbacks import Callback


class Tuner:
    """A search in progress; every finished run is a file in ``folder``, so that it can be resumed.

    spaces:   what is searched for each method; ``extended`` what was added beyond the edges.
    trials:   the trials of each method, in the order in which they were chosen.
    ranking:  how they are ranked; ``runs`` runs them.
    notes:    the budget of each method, and warnings about the result.
    failed:   the methods of which every trial failed.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        table: TuneTable,
        folder: Path | None,
        jobs: int,
        callbacks: Sequence[Callback],
        say: Say,
        seed: int,
    ) -> None:
        check_jobs(jobs)
        self.methods = {label: m.with_threads(1) if jobs > 1 else m for label, m in methods.items()}
        self.table, self.say, self.seed = table, say, seed
        self.seeds = range(seed, seed + table.seeds)
        for label in table.search:
            if label not in methods:
                raise unknown("method", label, methods, "[tune.search]")
        self.spaces = {label: space_of(method, table.search) for label, method in methods.items()}
        self.extended: dict[str, Space] = {label: {} for label in methods}
        self.rungs = {label: rungs_of(table, method.settings.rounds) for label, method in methods.items()}
        self.trials: dict[str, list[Tried]] = {label: self._given(label) for label in methods}
        first = {label: Trial(trials[0].options, None, table.share) for label, trials in self.trials.items()}
        check_methods(self.methods, self.seeds, first)
        self.ranking = Ranking(self._measure(first))
        shown = () if jobs > 1 else callbacks
        self.runs = TrialRuns(self.methods, self.seeds, table.share, Store(folder), self.ranking, jobs, shown, say)
        self.notes: list[str] = []
        self.failed: list[str] = []

    def _measure(self, first: Mapping[str, Trial]) -> str:
        """Return what to rank trials by: what the table names, or what all have on validation and on test data."""
        measured = {
            label: in_all([method.measures(seed, first[label]) for seed in self.seeds])
            for label, method in self.methods.items()
        }
        if self.table.measure is None:
            everywhere = list(measured.values())
            with suppress(InputError):  # if they cannot be measured on test data, a comparison says why
                everywhere += [method.measures(self.seed, Trial()) for method in self.methods.values()]
            return default_measure(everywhere)
        for label, names in measured.items():
            if self.table.measure not in names:
                raise unknown("measure", self.table.measure, names, f"tune.measure, {label}")
        return self.table.measure

    # --- what to try --------------------------------------------------------------------------------------------

    def _given(self, label: str) -> list[Tried]:
        """Return the trials that are always made: the method's own settings, and its algorithm's defaults."""
        method, space = self.methods[label], self.spaces[label]
        own = {name: value for name, value in method.current.items() if name in space}
        defaults = defaults_of(method, space)
        default_options = None if defaults is None else as_options(method, defaults)
        complete = {**(default_options or {}), **own}
        given = [Tried(label, 0, "file", complete)] if own or not default_options else []
        if default_options is not None and not (given and default_options == complete):
            given.append(Tried(label, len(given), "defaults", default_options, defaults))
        return given

    def _add(self, label: str, points: Sequence[Point], origin: str) -> list[Tried]:
        """Add points to the trials of a method, except those that were tried."""
        added = []
        for point in points:
            options = as_options(self.methods[label], point)
            trials = self.trials[label]
            if all(trial.options != options for trial in trials):
                trials.append(Tried(label, len(trials), origin, options, point))
                added.append(trials[-1])
        return added

    def first(self) -> list[Tried]:
        """Return all trials of a search whose points do not depend on results: what ``--trial`` numbers."""
        if self.table.sampler not in ("sobol", "latin") or self.table.halving is not None:
            raise InputError(
                "Single trials need points that do not depend on earlier ones: sampler = 'sobol' or 'latin', and no "
                "halving."
            )
        for label, space in self.spaces.items():
            if space:
                self._add(label, self._sampler(label, space).ask(self._budget(label)), "search")
        return [trial for trials in self.trials.values() for trial in trials]

    def _sampler(self, label: str, space: Space, extension: str = "") -> Sampler:
        return sampler_of(self.table.sampler, space, label + extension, self.seed)

    def _budget(self, label: str) -> int:
        return self.table.trials * len(self.spaces[label])

    # --- the search ---------------------------------------------------------------------------------------------

    def search(self) -> dict[str, list[Tried]]:
        """Run all trials; return those of each method, best first."""
        self._explore()
        self._rescue()
        if self.table.extend:
            self._extend()
            self._rescue()
        ordered = {label: self.ranking.sorted(trials) for label, trials in self.trials.items()}
        self.failed = [label for label, trials in ordered.items() if not self._complete(trials[0])]
        budgets = [budget_in_words(k, self.spaces[k], trials, self.table) for k, trials in self.trials.items()]
        self.notes = [*budgets, *self.notes]
        for label, trials in self.trials.items():
            if label in self.failed:
                self.notes.append(f"Warning: {self._failure(label)} It is left out of the comparison.")
                continue
            short = None if self.table.rounds is None else self.rungs[label][0][0]
            self.notes += warnings_of(label, trials, self.ranking, self.searched(label), short)
        if len(self.failed) == len(ordered):
            raise FedstrataError(" ".join(map(self._failure, self.failed)))
        return ordered

    def _failure(self, label: str) -> str:
        """Say why a method has no best trial."""
        trials = self.trials[label]
        if not any(trial.diverged for trial in trials):
            return f"No trial of {label} has {self.ranking.measure} in every seed."
        return (
            f"Every trial of {label} diverged in at least one seed. Search smaller learning rates: "
            f"[tune.search.{json.dumps(label)}]."
        )

    def _rescue(self) -> None:
        """For methods of which no trial has finished at full length, run the best of the shorter ones, one by one."""
        while True:
            todo = []
            for label, trials in self.trials.items():
                full = self.rungs[label][-1][0]
                waiting = [t for t in trials if full not in t.finals and self.ranking.value(t) is not None]
                if waiting and not any(self._complete(t) for t in trials):
                    todo.append((self.ranking.best(waiting), full))
            if not todo:
                return
            self.runs.run(todo)

    def _explore(self) -> None:
        """Try the given settings and the points of the samplers, a generation at a time."""
        samplers = {label: self._sampler(label, space) for label, space in self.spaces.items() if space}
        left = {label: self._budget(label) for label in samplers}
        stage = [trial for trials in self.trials.values() for trial in trials]
        while stage or any(left.values()):
            asked: list[tuple[str, Point]] = []
            for label, sampler in samplers.items():
                points = sampler.ask(left[label]) if left[label] else []
                left[label] -= len(points)
                asked += [(label, point) for point in points]
            for label, point in asked:
                stage += self._add(label, [point], "search")
            self._run(stage)
            for label, point in asked:
                options = as_options(self.methods[label], point)
                trial = next(trial for trial in self.trials[label] if trial.options == options)
                samplers[label].tell(point, self.ranking.gain(trial))
            stage = []

    def _extend(self) -> None:
        """Search once more beyond the edges at which winners lie."""
        stage: list[Tried] = []
        for label, space in self.spaces.items():
            best = self.ranking.best(self.trials[label])
            sides = edges_of(best, space, self.trials[label])
            if not sides or self.ranking.value(best) is None:
                continue
            self.extended[label] = {name: space[name].beyond(side) for name, side in sides.items()}
            chosen = {name: number_of(value) for name, value in best.options.items()}
            inner = {n: r.around(chosen[n]) if n in chosen else r for n, r in space.items()}
            near = inner | {name: inner[name].with_(beyond) for name, beyond in self.extended[label].items()}
            count, sampler = self.table.trials * len(sides), self._sampler(label, near, " beyond")
            points = sampler.ask(count)
            while len(points) < count:  # a sampler that learns returns a few at a time
                points += sampler.ask(count - len(points))
            added = self._add(label, points, "extension")
            stage += added
            self.notes.append(
                f"{label}: {len(added)} more trial{'s' * (len(added) != 1)} beyond the edge of {listed(list(sides))}, "
                "where the best one was."
            )
            self.say(f"{label}: the best {listed(list(sides))} is at an edge of its range; searching beyond it")
        self._run(stage)

    # --- running ------------------------------------------------------------------------------------------------

    def _run(self, stage: Sequence[Tried]) -> None:
        """Run trials: all of them short, then fewer of them longer, until those that are left have full length."""
        left = {label: [t for t in stage if t.label == label] for label in self.methods}
        for step in range(max(len(rungs) for rungs in self.rungs.values())):
            todo = []
            for label, trials in left.items():
                rounds, keep = self.rungs[label][min(step, len(self.rungs[label]) - 1)]
                todo += [(trial, rounds) for trial in trials if rounds not in trial.finals]
            self.runs.run(todo)
            for label, trials in left.items():
                rounds, keep = self.rungs[label][min(step, len(self.rungs[label]) - 1)]
                best = self.ranking.sorted(trials, rounds)[: keep(len(trials))]
                left[label] = [trial for trial in best if self.ranking.value(trial, rounds) is not None]

    def searched(self, label: str) -> Space:
        """Return the ranges of a method, with what was added beyond their edges."""
        return joined(self.spaces[label], self.extended[label])

    def _complete(self, trial: Tried) -> bool:
        """Whether a trial has run at full length in every seed."""
        return trial.rounds == self.rungs[trial.label][-1][0] and self.ranking.value(trial) is not None

"""The search itself: which settings to try, in which order, and for how long."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fedstrata.core.errors import FedstrataError, InputError, listed, unknown
from fedstrata.core.files import Row
from fedstrata.experiments.compare import Say, shared_measure
from fedstrata.experiments.methods import Method, Outcome, Trial, check_methods
from fedstrata.experiments.pool import check_jobs, run_all
from fedstrata.experiments.schema import TuneTable
from fedstrata.experiments.search import Point, Sampler, Space, as_options, defaults_of, sampler_of, space_of
from fedstrata.experiments.trials import CHECKED, Key, Store, Tried, number_of, rungs_of
from fedstrata.training.callbacks import Callback, Titled
from fedstrata.training.metrics.catalogue import RANKING
from fedstrata.training.metrics.catalogue import measure as about

_ORIGINS = {"file": "its own settings", "defaults": "the defaults", "search": "the search", "extension": "the search"}
"""Where a trial comes from, in words."""


class Tuner:
    """A search in progress; every finished run is a file in ``folder``, so that it can be resumed.

    spaces:   what is searched for each method; ``extended`` what was added beyond the edges.
    trials:   the trials of each method, in the order in which they were chosen.
    measure:  the measure that ranks them; None until the first stage has shown which all of them have.
    notes:    the budget of each method, and warnings about the result.
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
        self.callbacks = () if jobs > 1 else callbacks
        self.methods = {label: m.with_threads(1) if jobs > 1 else m for label, m in methods.items()}
        self.table, self.jobs, self.say, self.seed = table, jobs, say, seed
        self.seeds = range(seed, seed + table.seeds)
        for label in table.search:
            if label not in methods:
                raise unknown("method", label, methods, "[tune.search]")
        self.spaces = {label: space_of(method, table.search) for label, method in methods.items()}
        self.extended: dict[str, Space] = {label: {} for label in methods}
        self.rungs = {label: rungs_of(table, method.settings.rounds) for label, method in methods.items()}
        self.trials: dict[str, list[Tried]] = {label: self._given(label) for label in methods}
        self.store = Store(folder)
        self.measure = table.measure
        self.notes: list[str] = []
        first = {label: Trial(trials[0].options, None, table.share) for label, trials in self.trials.items()}
        check_methods(self.methods, self.seeds, first)
        for label, method in self.methods.items() if self.measure is not None else ():
            known = method.measures(seed, first[label])
            if self.measure not in known:
                raise unknown("measure", self.measure, known, f"tune.measure, {label}")

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
        self.notes = [self._budget_in_words(label) for label in self.methods]
        self._explore()
        if self.table.extend:
            self._extend()
        for label in self.methods:
            self.notes += self._warnings(label)
        ordered = {label: sorted(trials, key=self._order) for label, trials in self.trials.items()}
        failed = [label for label, trials in ordered.items() if not self._complete(trials[0])]
        if failed:
            tried = "Every trial" if all(len(self.rungs[label]) == 1 for label in failed) else "Every full-length trial"
            raise FedstrataError(
                f"{tried} of {listed(failed)} diverged in at least one seed. Search smaller learning rates: "
                f"[tune.search.{json.dumps(failed[0])}]."
            )
        return ordered

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
                samplers[label].tell(point, self._gain(trial))
            stage = []

    def _extend(self) -> None:
        """Search once more beyond the edges at which winners lie."""
        stage: list[Tried] = []
        for label, space in self.spaces.items():
            best = min(self.trials[label], key=self._order)
            sides = self._edges(best, space)
            if not sides or self._value(best) is None:
                continue
            self.extended[label] = {name: space[name].beyond(side) for name, side in sides.items()}
            chosen = {name: number_of(value) for name, value in best.options.items()}
            inner = {n: r.around(chosen[n]) if n in chosen else r for n, r in space.items()}
            near = inner | self.extended[label]
            points = self._sampler(label, near, " beyond").ask(self.table.trials * len(sides))
            stage += self._add(label, points, "extension")
            more = f"{len(points)} more trials beyond the edge of {listed(list(sides))}, where the best one was"
            self.notes.append(f"{label}: {more}.")
            self.say(f"{label}: the best {listed(list(sides))} is at an edge of its range; searching beyond it")
        self._run(stage)

    def _edges(self, trial: Tried, space: Space) -> dict[str, int]:
        """Return at which edge of its range each hyperparameter of a trial lies, for those at one."""
        values = {name: number_of(trial.options[name]) for name in space if name in trial.options}
        sides = {name: space[name].edge(value) for name, value in values.items()}
        return {name: side for name, side in sides.items() if side}

    def _warnings(self, label: str) -> list[str]:
        best, space = min(self.trials[label], key=self._order), self.spaces[label]
        whole = {n: r.with_(self.extended[label][n]) if n in self.extended[label] else r for n, r in space.items()}
        notes = []
        values = {name: number_of(best.options[name]) for name in space if name in best.options}
        for name in [name for name, value in values.items() if value > 0 and not whole[name].contains(value)]:
            notes.append(
                f"Warning: {label}: the best {name}, {values[name]:g}, is from {_ORIGINS[best.origin]} and outside of "
                f"what was searched ({whole[name].low:g} to {whole[name].high:g}): widen "
                f"[tune.search.{json.dumps(label)}]."
            )
        for name in self._edges(best, whole):
            low, high = whole[name].low, whole[name].high
            notes.append(
                f"Warning: {label}: the best {name}, {number_of(best.options[name]):g}, is at the edge of what was "
                f"searched ({low:g} to {high:g}), so a better one may lie beyond: widen "
                f"[tune.search.{json.dumps(label)}]."
            )
        short = self.rungs[label][0][0]
        if self.table.rounds is not None and short < best.rounds and self.measure is not None:
            leader = min(self.trials[label], key=partial(self._order, rounds=short))
            if leader is not best:
                notes.append(
                    f"Warning: {label}: the best setting after {short} rounds is not the best of {CHECKED} after "
                    f"{best.rounds}: short trials do not rank its settings reliably."
                )
        return notes

    def _budget_in_words(self, label: str) -> str:
        space, given = self.spaces[label], [trial.origin for trial in self.trials[label]]
        names = f"{len(space)} hyperparameter{'s' * (len(space) != 1)} ({', '.join(space) or 'none'})"
        also = f", and {' and '.join(_ORIGINS[o] for o in given)}"
        count = f"{self.table.trials} trial{'s' * (self.table.trials > 1)}"
        return f"{label}: {count} for each of {names}{also if given else ''}; {self.table.seeds} seeds each."

    # --- running ------------------------------------------------------------------------------------------------

    def _run(self, stage: Sequence[Tried]) -> None:
        """Run trials: all of them short, then fewer of them longer, until those that are left have full length."""
        left = {label: [t for t in stage if t.label == label] for label in self.methods}
        for step in range(max(len(rungs) for rungs in self.rungs.values())):
            todo = []
            for label, trials in left.items():
                rounds, keep = self.rungs[label][min(step, len(self.rungs[label]) - 1)]
                todo += [(trial, rounds) for trial in trials if rounds not in trial.finals]
            self.run_trials(todo)
            for label, trials in left.items():
                rounds, keep = self.rungs[label][min(step, len(self.rungs[label]) - 1)]
                best = sorted(trials, key=partial(self._order, rounds=rounds))[: keep(len(trials))]
                left[label] = [trial for trial in best if self._value(trial, rounds) is not None]

    def run_trials(self, todo: Sequence[tuple[Tried, int]]) -> None:
        """Run trials for numbers of rounds, with every seed; results that are stored are read."""
        missing = []
        results: dict[Key, Row | None] = {}
        for trial, rounds in todo:
            for seed in self.seeds:
                key = trial.label, trial.number, rounds, seed
                stored = self.store.read(key, trial.options)
                if stored is None:
                    missing.append((trial, rounds, seed))
                else:
                    results[key] = stored["final"]
        waiting = {(t.label, t.number, r): sum(m[0] is t and m[1] == r for m in missing) for t, r in todo}

        def done(number: int, outcome: Outcome) -> None:
            trial, rounds, seed = missing[number]
            key = trial.label, trial.number, rounds, seed
            results[key] = outcome.final
            self.store.write(key, trial.options, outcome)
            waiting[key[:3]] -= 1
            if not waiting[key[:3]]:
                self._finish(trial, rounds, results)
                self._report(trial, rounds)

        for label in dict.fromkeys(trial.label for trial, _, _ in missing) if self.jobs > 1 else ():
            for seed in self.seeds:
                self.methods[label].prepare(seed, Trial(None, None, self.table.share))
        run_all([partial(self._task, trial, rounds, seed) for trial, rounds, seed in missing], self.jobs, done)
        for trial, rounds in todo:
            self._finish(trial, rounds, results)
        finals = [final for trial, rounds in todo for final in trial.finals[rounds] if final is not None]
        if self.measure is None and finals:
            self.measure = shared_measure(finals)

    def _task(self, trial: Tried, rounds: int, seed: int) -> Outcome:
        change = Trial(trial.options, rounds, self.table.share)
        title = f"{trial.label} trial {trial.number}, seed {seed}"
        listeners = [Titled(callback, title) for callback in self.callbacks]
        return self.methods[trial.label].run(seed, change, None, listeners).without_run()

    def _finish(self, trial: Tried, rounds: int, results: Mapping[Key, Row | None]) -> None:
        trial.finals[rounds] = [results[trial.label, trial.number, rounds, seed] for seed in self.seeds]

    def _report(self, trial: Tried, rounds: int) -> None:
        seeds = trial.finals[rounds]
        values = [(name, trial.value(name, rounds)) for name in ((self.measure,) if self.measure else RANKING)]
        failed = f"diverged in {sum(f is None for f in seeds)} of {len(seeds)} seeds"
        result = next((f"{name} {value:.4f}" for name, value in values if value is not None), failed)
        shown = ", ".join(f"{k} = {v}" for k, v in trial.options.items()) or "its own settings"
        length = f" ({rounds} rounds)" if len(self.rungs[trial.label]) > 1 else ""
        self.say(f"{trial.label} trial {trial.number}{length}: {shown} -> {result}")

    # --- ranking ------------------------------------------------------------------------------------------------

    def _value(self, trial: Tried, rounds: int | None = None) -> float | None:
        return None if self.measure is None else trial.value(self.measure, rounds)

    def _gain(self, trial: Tried) -> float | None:
        """Return the value of a trial, larger is better."""
        value = self._value(trial)
        sign = 1 if about(self.measure or "loss").higher_is_better else -1
        return None if value is None else sign * value

    def _order(self, trial: Tried, rounds: int | None = None) -> tuple[float, float, int]:
        """Return the key that sorts trials: longest first, then best first, failures last."""
        value = self._value(trial, rounds)
        sign = -1 if about(self.measure or "loss").higher_is_better else 1
        length = 0.0 if rounds is not None else -float(trial.rounds)
        return (math.inf, 0.0, trial.number) if value is None else (length, sign * value, trial.number)

    def _complete(self, trial: Tried) -> bool:
        """Whether a trial has run at full length in every seed."""
        return trial.rounds == self.rungs[trial.label][-1][0] and self._value(trial) is not None

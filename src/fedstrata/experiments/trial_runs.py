"""The runs of trials: with every seed, side by side, each stored as soon as it has finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fedstrata.core.files import Row
from fedstrata.experiments import tables
from fedstrata.experiments.methods import Method, Outcome, Trial
from fedstrata.experiments.pool import Say, run_all
from fedstrata.experiments.ranking import Ranking
from fedstrata.experiments.trials import Key, Store, Tried
from fedstrata.training.callbacks import Callback, Titled


@dataclass(frozen=True)
class TrialRuns:
    """Runs trials, and fills in their ``finals``.

    share: the fraction of each client's training rows that trials are judged on.
    store: where results are kept; those that are there are not run again.
    """

    methods: Mapping[str, Method]
    seeds: Sequence[int]
    share: float
    store: Store
    ranking: Ranking
    jobs: int
    callbacks: Sequence[Callback]
    say: Say

    def run(self, todo: Sequence[tuple[Tried, int]]) -> None:
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
                self.methods[label].prepare(seed, Trial(None, None, self.share))
        run_all([partial(self._task, trial, rounds, seed) for trial, rounds, seed in missing], self.jobs, done)
        for trial, rounds in todo:
            self._finish(trial, rounds, results)

    def _task(self, trial: Tried, rounds: int, seed: int) -> Outcome:
        change = Trial(trial.options, rounds, self.share)
        title = f"{trial.label} trial {trial.number}, seed {seed}"
        listeners = [Titled(callback, title) for callback in self.callbacks]
        return self.methods[trial.label].run(seed, change, None, listeners).without_run()

    def _finish(self, trial: Tried, rounds: int, results: Mapping[Key, Row | None]) -> None:
        trial.finals[rounds] = [results[trial.label, trial.number, rounds, seed] for seed in self.seeds]

    def _report(self, trial: Tried, rounds: int) -> None:
        seeds, measure = trial.finals[rounds], self.ranking.measure
        value, lost = self.ranking.value(trial, rounds), sum(final is None for final in seeds)
        failed = f"diverged in {lost} of {len(seeds)} seeds" if lost else f"has no {measure} in some seed"
        result = failed if value is None else f"{measure} {tables.number(value)}"
        shown = ", ".join(f"{k} = {v}" for k, v in trial.options.items()) or "its own settings"
        length = f" ({rounds} rounds)" if rounds < self.methods[trial.label].settings.rounds else ""
        self.say(f"{trial.label} trial {trial.number}{length}: {shown} -> {result}")

"""What a search says about itself: the budget of each method, and warnings about the result."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedstrata.experiments.ranking import Ranking, edges_of
from fedstrata.experiments.schema import TuneTable
from fedstrata.experiments.search import Space
from fedstrata.experiments.trials import CHECKED, Tried, number_of

_ORIGINS = {"file": "its own settings", "defaults": "the defaults", "search": "the search", "extension": "the search"}
"""Where a trial comes from, in words."""


def budget_in_words(label: str, space: Space, trials: Sequence[Tried], table: TuneTable) -> str:
    """Say how many trials a method had; those that would have repeated another one were not run."""
    names = f"{len(space)} hyperparameter{'s' * (len(space) != 1)} ({', '.join(space) or 'none'})"
    given = [_ORIGINS[trial.origin] for trial in trials if trial.origin in ("file", "defaults")]
    also = f", and {' and '.join(given)}" if given else ""
    count, made = table.trials * len(space), sum(trial.origin == "search" for trial in trials)
    same = f" ({count - made} of them the same as another, and not repeated)" if made < count else ""
    each = f"{table.trials} trial{'s' * (table.trials > 1)} for each of {names}{same}"
    return f"{label}: {each}{also}; {table.seeds} seed{'s' * (table.seeds > 1)} each."


def warnings_of(label: str, trials: Sequence[Tried], ranking: Ranking, searched: Space, short: int | None) -> list[str]:
    """Return warnings about the best trial of a method.

    searched: the ranges, with what was added beyond their edges.
    short:    the length of shorter trials, if the best of them were run at full length.
    """
    best, widen = ranking.best(trials), f"widen [tune.search.{json.dumps(label)}]."
    notes = []
    if not searched:
        notes.append(
            f"Warning: {label}: nothing was searched, so it has its own settings, which may make it look worse than "
            f"methods that were tuned: add ranges to [tune.search.{json.dumps(label)}]."
        )
    values = {name: number_of(best.options[name]) for name in searched if name in best.options}
    for name in [name for name, value in values.items() if value > 0 and not searched[name].contains(value)]:
        notes.append(
            f"Warning: {label}: the best {name}, {values[name]:g}, is from {_ORIGINS[best.origin]} and outside of "
            f"what was searched ({searched[name].low:g} to {searched[name].high:g}): {widen}"
        )
    for name in edges_of(best, searched, trials):
        notes.append(
            f"Warning: {label}: the best {name}, {values[name]:g}, is at the edge of what was searched "
            f"({searched[name].low:g} to {searched[name].high:g}), so a better one may lie beyond: {widen}"
        )
    if short is not None and short < best.rounds and ranking.best(trials, short) is not best:
        notes.append(
            f"Warning: {label}: the best setting after {short} rounds is not the best of {CHECKED} after "
            f"{best.rounds}: short trials do not rank its settings reliably."
        )
    return notes

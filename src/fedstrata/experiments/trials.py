"""Trials of a search: one setting of a method each, how long they run, and where their results are stored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedstrata.core.errors import InputError, invalid, is_finite
from fedstrata.core.files import Row, flatten, make_folder, refuse_used, write_atomically
from fedstrata.experiments.methods import Outcome
from fedstrata.experiments.overlay import slug
from fedstrata.experiments.schema import TuneTable
from fedstrata.experiments.search import Point

RUNGS = 4
"""The most lengths that successive halving uses."""

CHECKED = 3
"""How many of the best short trials are run at full length."""

Key = tuple[str, int, int, int]
"""A run of a search: its label, trial, rounds and seed."""


@dataclass
class Tried:
    """One setting of a method that was tried.

    number:  its place in the search of its method.
    origin:  "file" for the method's own settings, "defaults", "search", or "extension" beyond the edge of a range.
    options: the hyperparameters that were set.
    point:   the values that were searched, if it is a point of the search.
    finals:  by number of rounds, the last row of each seed; None for a seed that diverged.
    """

    label: str
    number: int
    origin: str
    options: dict[str, Any]
    point: Point | None = None
    finals: dict[int, list[Row | None]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """The length of its longest runs."""
        return max(self.finals, default=0)

    @property
    def diverged(self) -> int:
        """How many seeds diverged in its longest runs."""
        return sum(final is None for final in self.finals.get(self.rounds, ()))

    def value(self, measure: str, rounds: int | None = None) -> float | None:
        """Return the mean of a measure over seeds; None if one of them diverged, or it was not run."""
        finals = self.finals.get(self.rounds if rounds is None else rounds)
        if not finals or any(final is None or measure not in final for final in finals):
            return None
        return math.fsum(final[measure] for final in finals if final is not None) / len(finals)

    @property
    def numbers(self) -> dict[str, float]:
        """The number of each hyperparameter that was set."""
        return {name: number_of(value) for name, value in self.options.items()}

    def row(self, kind: str, measure: str) -> Row:
        """Return the trial as a row of a table."""
        row: Row = {kind: self.label, "trial": self.number, "origin": self.origin, "options": self.options}
        values = [None if final is None else final.get(measure) for final in self.finals.get(self.rounds, ())]
        return row | {"rounds": self.rounds, measure: self.value(measure), "values": values, "diverged": self.diverged}


Keep = Callable[[int], int]
"""How many of so many trials are run longer."""


def rungs_of(table: TuneTable, rounds: int) -> list[tuple[int, Keep]]:
    """Return the lengths of trials, increasing, and how many are kept after each."""
    last: list[tuple[int, Keep]] = [(rounds, lambda n: n)]
    if table.rounds is not None:
        if table.rounds > rounds:
            raise invalid("key tune.rounds", table.rounds, f"at most train.rounds, {rounds}")
        return last if table.rounds == rounds else [(table.rounds, lambda n: min(n, CHECKED)), *last]
    if table.halving is None:
        return last
    factor, rungs = table.halving, last
    while rungs[0][0] >= factor and len(rungs) < RUNGS:
        rungs = [(rungs[0][0] // factor, lambda n: math.ceil(n / factor)), *rungs]
    return rungs


def number_of(value: Any) -> float:
    """Return the number of an option that was searched, which may be in a schedule."""
    if isinstance(value, Mapping):
        return float(value["k" if value.get("schedule") in ("cube_root", "power") else "value"])
    return float(value)


def _is_final(final: Any) -> bool:
    """Whether a stored value is the last row of a run, or None for one that diverged."""
    if final is None:
        return True
    return isinstance(final, dict) and bool(final) and all(map(is_finite, final.values()))


def _stored(key: Key, options: Mapping[str, Any], final: Row | None, error: str | None) -> Row:
    """Return what is stored of a run, with a checksum."""
    label, number, rounds, seed = key
    row = {"label": label, "trial": number, "rounds": rounds, "seed": seed, "options": dict(options)}
    row |= {"final": final, "error": error}
    check = blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8).hexdigest()
    return json.loads(json.dumps({**row, "check": check}))  # type: ignore[no-any-return]


class Store:
    """The results of trials, one file for each run, so that several processes can write them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def _path(self, key: Key) -> Path:
        assert self.folder is not None
        label, number, rounds, seed = key
        return self.folder / f"{slug(label)}-{number:04d}-rounds{rounds}-seed{seed}.json"

    def read(self, key: Key, options: Mapping[str, Any]) -> Row | None:
        """Return the stored result of a run with these options, if there is one."""
        if self.folder is None or not self._path(key).exists():
            return None
        try:
            stored = json.loads(self._path(key).read_text())
        except (ValueError, OSError, RecursionError):
            return None  # damaged: run it again
        if not isinstance(stored, dict) or not _is_final(stored.get("final", 0)):
            return None
        expected = _stored(key, options, stored["final"], stored.get("error"))
        return stored if stored == expected else None  # of another trial, or changed

    def write(self, key: Key, options: Mapping[str, Any], outcome: Outcome) -> None:
        """Store a result."""
        if self.folder is not None:
            row = _stored(key, options, outcome.final, outcome.error)
            write_atomically(self._path(key), json.dumps(row).encode(), durable=False)


def claim(folder: Path, settings: str) -> None:
    """Claim a new folder for a search with these settings; raise if it contains anything else."""
    file = folder / "config.json"
    if not file.exists():
        try:
            refuse_used(folder, "It has no search to resume. Choose another.")
        except InputError:
            if not file.exists():  # otherwise another trial of a job array has just claimed it
                raise
        else:
            make_folder(folder)
            write_atomically(file, settings.encode())
    try:
        same = file.read_bytes() == settings.encode()
    except OSError as error:
        raise InputError(f"The file {file} cannot be read: {error.strerror}. Choose another directory.") from None
    if not same:
        raise InputError(
            f"The directory {folder} has a search with different settings{_difference(file, settings)}. Nothing was "
            "overwritten. Choose another."
        )


def _difference(file: Path, settings: str) -> str:
    """Say in which setting a search differs from the one in a file; nothing if the file is damaged."""
    try:
        old, new = flatten(json.loads(file.read_bytes())), flatten(json.loads(settings))
    except (ValueError, AttributeError, RecursionError):
        return ""
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    key = next((key for key in changed if "digests" not in key), None)
    if key is None:
        return ": the data or the starting points are others" if changed else ""
    was, now = (shorten(repr(each.get(key)), 80) for each in (old, new))
    return f": {shorten(repr(key), 80)} was {was} and is now {now}"

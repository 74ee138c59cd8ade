"""Tables of numbers and categories: reading them from CSV files, and encoding them as inputs of a model."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.data.formats import read_text, unreadable


@dataclass(frozen=True)
class Table:
    """A table with ``numbers`` [n, p], categories ``words`` [n, q] and ``targets`` [n], 0 or 1."""

    numbers: np.ndarray
    words: np.ndarray
    targets: np.ndarray

    def take(self, rows: np.ndarray) -> Table:
        """Return a table of these rows."""
        return Table(self.numbers[rows], self.words[rows], self.targets[rows])


def read_cells(path: Path, delimiter: str, quote: str) -> list[list[str]]:
    """Read a CSV file without its blank lines."""
    lines = read_text(path).splitlines()
    try:
        return [row for row in csv.reader(lines, delimiter=delimiter, quotechar=quote, skipinitialspace=True) if row]
    except csv.Error as error:
        raise unreadable(path, str(error)) from error


def table_of(
    path: Path, rows: list[list[str]], width: int, numbers: Sequence[int], negative: str, positive: str
) -> Table:
    """Build a table from rows whose last cell is the label and whose columns ``numbers`` are numbers."""
    if not rows:
        raise unreadable(path, "it has no rows")
    for number, row in enumerate(rows, start=1):
        if len(row) != width:
            raise unreadable(path, f"row {number} has {len(row)} fields instead of {width}")
        if row[-1] not in (negative, positive):
            raise unreadable(path, f"row {number} has label {row[-1]!r} instead of {negative!r} or {positive!r}")
    cells = np.array(rows)
    columns = list(numbers)
    try:
        values = cells[:, columns].astype(np.float64)
    except ValueError as error:
        raise unreadable(path, f"a numeric column has an entry that is not a number ({error})") from error
    words = np.delete(cells[:, :-1], columns, axis=1)
    return Table(values, words, (cells[:, -1] == positive).astype(np.int64))


def encode(train: Table, test: Table) -> tuple[np.ndarray, np.ndarray]:
    """Turn two tables into float32 inputs, using statistics of the training table alone.

    Numbers are standardised; each column of categories becomes one 0/1 column per category, in alphabetical order.
    A category that occurs only in the test table becomes zeros.
    """
    train_parts, test_parts = ([part] for part in standardise(train.numbers, test.numbers))
    for column in range(train.words.shape[1]):
        categories = np.unique(train.words[:, column])
        for table, parts in ((train, train_parts), (test, test_parts)):
            parts.append((table.words[:, column, None] == categories).astype(np.float32))
    return np.concatenate(train_parts, axis=1), np.concatenate(test_parts, axis=1)


def standardise(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale each column to mean 0 and variance 1 in the training part; float32.

    A column that is constant in the training part is only shifted.
    """
    mean, std = train.mean(axis=0), train.std(axis=0)
    std[std == 0] = 1
    return ((train - mean) / std).astype(np.float32), ((test - mean) / std).astype(np.float32)

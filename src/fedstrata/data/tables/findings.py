"""Findings: what is wrong or doubtful in a site's table, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedstrata.core.errors import DataError, listed
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.converting import Problem

MOST = 20
"""An error lists at most so many findings."""

FEW = 5
"""A finding names at most so many rows."""

_OR_MISSING = "Correct the cells, or list them under missing_values of the column."

WHAT = {
    "text": ("not a number", _OR_MISSING),
    "infinite": ("not a finite number", _OR_MISSING),
    "date": ("not a date", "Correct the cells, set the column's format, or list them under missing_values."),
    "category": ("unknown category", "Correct the cells, or list them under categories or missing_values."),
    "target": ("not a class of the target", "Correct the cells, or list them under positive or negative."),
    "class": ("not a class of the target", "Correct the cells, or list them under the target's classes."),
    "fraction": ("not a class of the target", 'A flag has cells such as 0 and 1. A number has kind = "numeric".'),
    "number": ("the target is not a number", "Correct the cells, or leave these rows out."),
    "no target": ("the target is missing", 'Leave these rows out, or set missing = "drop" for the target.'),
    "no site": ("the name of the site is missing", "Fill the cells in, or leave these rows out."),
}
"""What is wrong with cells, by the kind of a problem, and the remedy."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong (an error) or doubtful (a warning) in the table of a site.

    site:     the site; empty for what concerns all.
    count:    how many cells or rows it concerns; 0 if it is about a column or a file.
    rows:     the first of them: lines of a text file from 1, rows of a frame or a Parquet file from 0.
    unit:     "line" or "row".
    examples: some cells, quoted.
    told:     what is wrong, in words for those who must not see rows or small counts; by default ``what``.
    """

    site: str
    column: str | None
    kind: str
    severity: Literal["error", "warning"]
    what: str
    remedy: str = ""
    count: int = 0
    rows: tuple[int, ...] = ()
    unit: str = "line"
    examples: tuple[str, ...] = ()
    told: str = ""

    def __str__(self) -> str:
        column = "" if self.column is None else f"column {shown(self.column)}"
        where = ", ".join(part for part in (self.site, column, self._rows()) if part)
        examples = f"{'' if self.what.endswith('?') else ':'} {', '.join(self.examples)}" if self.examples else ""
        end = "" if not examples and self.what.endswith("?") else "."
        return f"{where}{': ' * bool(where)}{self.what}{examples}{end}{f' {self.remedy}' if self.remedy else ''}"

    def _rows(self) -> str:
        if not self.rows:
            return f"{self.count} {self.unit}s" if self.count > 1 else ""
        more = f" and {self.count - len(self.rows):,} more" if self.count > len(self.rows) else ""
        return f"{self.unit}{'s' * (self.count > 1)} {listed(list(map(str, self.rows)))}{more}"

    def public(self, minimum: int) -> Finding:
        """Return it without rows, cells and counts, unless the minimum is 1."""
        return self if minimum <= 1 else replace(self, what=self.told or self.what, count=0, rows=(), examples=())

    def as_json(self) -> dict[str, Any]:
        """Return it for a JSON file."""
        table = {"site": self.site, "column": self.column, "kind": self.kind, "severity": self.severity}
        table |= {"what": self.what, "remedy": self.remedy}
        return table | ({"count": self.count, "rows": list(self.rows), "unit": self.unit} if self.count else {})


def finding_of(problem: Problem, site: str, lines: np.ndarray, unit: str, severity: str = "error") -> Finding:
    """Return the finding for cells without a raw value; ``lines`` are those of the table's rows."""
    what, remedy = WHAT[problem.kind]
    rows = tuple(int(line) for line in lines[problem.rows[:FEW]])
    return Finding(
        site, problem.column, problem.kind, "warning" if severity == "warning" else "error",
        what, remedy, len(problem.rows), rows, unit, problem.examples,
    )  # fmt: skip


def raise_if_errors(findings: Iterable[Finding]) -> None:
    """Raise one error that lists what is wrong, if anything is."""
    errors = [finding for finding in findings if finding.severity == "error"]
    errors = errors if len(errors) <= MOST else together(errors)
    if errors:
        raise DataError(_message(errors), _message([finding.public(2) for finding in errors]))


def _message(errors: Sequence[Finding]) -> str:
    if len(errors) == 1:
        return f"The tables do not fit. {errors[0]}"
    more = f"\n... and {len(errors) - MOST:,} more." if len(errors) > MOST else ""
    lines = "".join(f"\n- {finding}" for finding in errors[:MOST])
    return f"The tables do not fit, in {len(errors):,} places:{lines}{more}"


def warnings_of(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are only doubtful."""
    return [finding for finding in findings if finding.severity == "warning"]


def together(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings with those of several sites that say the same as one."""
    groups: dict[tuple[Any, ...], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.column, f.kind, f.severity, f.what, f.remedy), []).append(f)
    return [
        group[0] if len(group) == 1 else replace(
            group[0], site=f"{len(group)} sites ({listed([f.site for f in group], 3)})",
            count=sum(f.count for f in group), rows=(),
            examples=tuple(dict.fromkeys(e for f in group for e in f.examples))[:3],
        )
        for group in groups.values()
    ]  # fmt: skip

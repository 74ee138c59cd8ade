"""Tables of sites that do not fit their schema: what is wrong, in which column, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas

COLUMNS = [
    {"name": "age", "kind": "numeric", "range": [0.0, 120.0], "step": 1.0},
    {"name": "pressure", "kind": "numeric", "missing": "mean"},
    {"name": "sex", "kind": "flag", "categories": ["f", "m"]},
    {"name": "region", "kind": "category", "categories": ["a", "b", "c"]},
    {"name": "seen", "kind": "date", "missing": "mean"},
    {"name": "rare", "kind": "numeric", "missing": "mean", "optional": True},
]
SCHEMA = {"version": 1, "target": {"name": "died"}, "columns": COLUMNS}


def frames(sizes: tuple[int, ...]) -> dict[str, pandas.DataFrame]:
    """Good tables, with missing cells and rare categories."""
    rng, made = np.random.default_rng(0), {}
    for k, n in enumerate(sizes):
        frame = pandas.DataFrame(
            {
                "age": rng.integers(30, 90, n).astype(float),
                "pressure": rng.normal(120 + 5 * k, 10, n).round(3),
                "sex": rng.choice(["f", "m"], n),
                "region": rng.choice(["a", "b", "c"], n, p=(0.6, 0.33, 0.07)),
                "seen": (pandas.Timestamp("2020-01-01") + pandas.to_timedelta(rng.integers(0, 900, n), "D")).date,
                "rare": np.where(rng.random(n) < 0.08, rng.normal(size=n).round(4), np.nan),
            }
        )
        for name in ("age", "pressure", "sex", "region"):
            frame.loc[rng.random(n) < (0.05 if name == "age" else 0.2), name] = None
        frame["died"] = rng.integers(0, 10, n) == 0
        made[f"site{k}"] = frame
    return made


@dataclass(frozen=True)
class Broken:
    """A way to break the text of a table, and what an error must say.

    column: the column that is wrong, if it is one.
    """

    change: Callable[[str], str | bytes]
    what: str
    remedy: str
    column: str | None = None

    def bytes_of(self, text: str) -> bytes:
        content = self.change(text)
        return content if isinstance(content, bytes) else content.encode()

    def is_said_in(self, message: str, site: str) -> bool:
        """Whether a message says what is wrong at a site, where, and what to do."""
        text = " ".join(message.split())
        column = "" if self.column is None else f"column '{self.column}'"
        return all(part in text for part in (site, column, self.what, self.remedy))


BROKEN: dict[str, Broken] = {
    "missing column": Broken(
        lambda t: t.replace("pressure", "presure"), "missing from the file", "Add it to the file, or set", "pressure"
    ),
    "extra column": Broken(
        lambda t: t.replace("\n", ",9\n").replace("died,9", "died,ward", 1), "not in the schema",
        "Add it to the schema: as a column, or under drop", "ward",
    ),
    "text in a number": Broken(
        lambda t: re.sub(r"\n[^,]*,", "\nsecret,", t, count=1), "not a number",
        "Correct the cells, or list them under missing_values", "age",
    ),
    "unknown category": Broken(
        lambda t: re.sub(",[fm],", ",secret,", t, count=1), "unknown category",
        "Correct the cells, or list them under categories or missing_values", "sex",
    ),
    "a date of another form": Broken(
        lambda t: re.sub(r"\d{4}-\d\d-\d\d", "secret", t, count=1), "not a date", "set the column's format", "seen"
    ),
    "empty file": Broken(lambda t: "", "it is empty", "Export it again, or leave the site out"),
    "header only": Broken(lambda t: t.splitlines()[0] + "\n", "no rows", "Export it again"),
    "wrong delimiter": Broken(
        lambda t: t.replace(",", "#"), "its first line has a single cell", "Say which character separates cells"
    ),
    "wrong encoding": Broken(
        lambda t: t.replace(",f,", ",f\xe9,").encode("latin-1"), "is not UTF-8 text", "Say which encoding it has"
    ),
    "UTF-16": Broken(lambda t: t.encode("utf-16"), "NUL byte", 'say encoding = "utf-16"'),
    "duplicated header": Broken(
        lambda t: t.replace("sex", "age", 1), "columns 1 and 3 of its header", "Rename or remove one of them"
    ),
    "all missing": Broken(
        lambda t: re.sub(r"\n[^,]*,", "\n,", t), "all its cells are missing",
        "Set optional = true if the site does not measure it, or move it to drop", "age",
    ),
    "no target": Broken(
        lambda t: t.replace("died", "dyed", 1), "the target is missing from the file",
        "Add the column to predict to the file", "died",
    ),
    "a row without a target": Broken(
        lambda t: re.sub(",(True|False)\n", ",\n", t, count=1), "the target is missing",
        'Leave these rows out, or set missing = "drop"', "died",
    ),
    "another class": Broken(
        lambda t: re.sub(",(True|False)\n", ",secret\n", t, count=1), "not a class of the target",
        "Correct the cells, or list them under positive or negative", "died",
    ),
    "another unit": Broken(
        lambda t: re.sub(r"\n(\d+)\.0,", lambda m: f"\n{365 * int(m[1])},", t),
        "of the values are outside 0 to 120: is it another unit?", "Convert the column, or correct the range", "age",
    ),
    "ragged rows": Broken(
        lambda t: t.replace("\n", "\n1,", 3), "more or fewer cells than the 7 columns", "say which character separates"
    ),
    "no header": Broken(
        lambda t: t.partition("\n")[2], "none of the columns of the schema", "say the names of the columns"
    ),
    "an open quote": Broken(
        lambda t: re.sub(r"\n[^,]*,", '\n"secret,', t, count=1), "a quote in line 2 is never closed", "Close it"
    ),
    "a workbook": Broken(
        lambda t: b"PK\x03\x04" + t.encode(), "it is a zip archive or an Excel workbook", "Export the table as CSV"
    ),
    "a field without an end": Broken(
        lambda t: t + "1," + "9" * (1 << 21), "has more than a million bytes", "Look for a quote that is not closed"
    ),
}  # fmt: skip

"""A first schema, guessed from the sites' tables, for a person to edit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedstrata.core.errors import InputError, listed, unknown
from fedstrata.data.tables.cells import is_number, is_plain, key_of, shown
from fedstrata.data.tables.checking import check
from fedstrata.data.tables.columns import LONGEST_NAME, NO, YES, Column, Target
from fedstrata.data.tables.findings import Finding, raise_if_errors, warnings_of
from fedstrata.data.tables.profiles import MOST_DISTINCT, Profile, profiles_of
from fedstrata.data.tables.reading import SiteTable, read_sites
from fedstrata.data.tables.schema import FileFormat, Schema
from fedstrata.data.tables.sources import in_order, sites_of

MOST_CODES, MOST_WORDS, MOST_CLASSES = 6, 300, 20
"""So many distinct whole numbers, or texts, are taken as categories or as classes of the target."""

POSITIVE = {*YES, "y", "t", "died", "dead", "death", "deceased", "expired", "event", "case", "positive", "pos", "sick"}
POSITIVE |= {"disease", "abnormal", "malignant", "present"}
NEGATIVE = {*NO, "n", "f", "alive", "survived", "no event", "control", "negative", "neg", "healthy", "normal", "benign"}
NEGATIVE |= {"absent", "none", "never", "-1"}
"""Cells that tell which of two is yes, and which is no."""

ORDERS = (
    ("i", "ii", "iii", "iv", "v", "vi"),
    ("none", "very low", "low", "mild", "medium", "moderate", "high", "severe", "very high", "critical"),
    ("poor", "fair", "good", "very good", "excellent"),
    ("small", "medium", "large"),
    ("never", "rarely", "sometimes", "often", "always"),
)
"""Words that are in an order."""

CODES = (-1.0, -9.0, -99.0, -999.0, -9999.0, 0.0, 9.0, 99.0, 999.0, 9999.0, 99999.0)
"""Numbers that often stand for missing."""

DATES = ("", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d")

HEAD = (
    "A draft by fedstrata describe from what is in {sites}. Edit it: kinds, units, ranges,",
    "categories, and what is missing. Every site's table is checked against it. See docs/tables.md.",
)

CODED = "Columns of few whole numbers are taken as categories. Are they in order: ordinal. Are they amounts: numeric."


class Draft(NamedTuple):
    """A schema, and comments for its file: at its head, and on its columns."""

    schema: Schema
    head: list[str]
    notes: dict[str, list[str]]

    @property
    def text(self) -> str:
        """The file."""
        return self.schema.text(self.notes, self.head)


def draft(
    source: Any,
    target: str,
    *,
    site: str | None = None,
    form: FileFormat | None = None,
    positive: Sequence[str] = (),
    features: Sequence[str] = (),
    drop: Sequence[str] = (),
) -> Draft:
    """Guess the schema of the sites' tables.

    target:   the column to predict.
    site:     the column that names the site, if one table has the rows of all.
    positive: the cells of the target that are class 1; by default guessed.
    features: the columns to use; by default all but those in ``drop``, and those that look like identifiers.
    """
    form, sites = form or FileFormat(), sites_of(source)
    profiles = profiles_of(sites, form, [target])
    if form.decimal == "." and any(2 * p.commas > p.count for p in profiles.values()):
        form = form.replace(decimal=",")
        profiles = profiles_of(sites, form, [target])
    for name in (target, *([site] if site else []), *features, *drop):
        if name not in profiles:
            raise unknown("column", name, profiles)
    goal, about = _target(profiles[target], positive)
    columns, dropped = [], [name for name in drop if name not in (target, site)]
    head, notes = [line.format(sites=_count(len(sites), "table")) for line in HEAD], {}
    for name, profile in profiles.items():
        if name in (target, site) or name in drop:
            continue
        column, lines = _column(profile, [s.name for s in sites if s.name not in profile.rows])
        if column is None and name in features:
            raise InputError(f"The column {shown(name)} is no feature: {lines[0]}. Leave it out of the features.")
        if column is None or (features and name not in features):
            dropped.append(name)
            head += [f"Dropped: {shown(name)}, {lines[0]}."] if column is None else []
        else:
            columns.append(column)
            notes[name] = lines
    if not columns:
        raise InputError(f"No column is left to predict {shown(target)} from. There are {listed(list(profiles))}.")
    if any(column.kind == "category" and all(map(is_number, column.categories)) for column in columns):
        head.append(CODED)
    head += [f"Target: {line}." for line in about]
    return Draft(Schema(target=goal, columns=columns, site=site, drop=dropped, file=form), head, notes)


def draft_and_read(source: Any, target: str, **hints: Any) -> tuple[Draft, list[SiteTable], list[Finding]]:
    """Draft a schema, and read and check the sites' tables with it; raise what is wrong, return what is doubtful.

    A column that has no value at some site becomes optional. ``hints`` are those of :func:`draft`.
    """
    drafted = draft(source, target, **hints)
    tables = read_sites(source, drafted.schema)
    findings = check(tables, drafted.schema)
    empty = {f.column for f in findings if f.kind == "empty" and f.severity == "error" and f.site}
    if empty:
        columns = [c.replace(optional=True) if c.name in empty else c for c in drafted.schema.features]
        drafted = drafted._replace(schema=drafted.schema.replace(columns=columns))
        findings = check(tables, drafted.schema)
    raise_if_errors(findings)
    return drafted, tables, warnings_of(findings)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _column(profile: Profile, lacking: Sequence[str]) -> tuple[Column | None, list[str]]:
    """Return a column and notes on it, or None and the reason why it is dropped."""
    count, distinct = profile.count, f"{MOST_DISTINCT:,} or more" if profile.many else f"{len(profile.cells):,}"
    if not count:
        return None, ["it has no values"]
    if len(profile.cells) == 1:
        return None, [f"all its values are {shown(profile.texts[0])}"]
    notes = _notes_on_missing(profile, lacking)
    more: dict[str, Any] = {"name": profile.name}
    if lacking or not all(profile.present.values()):
        more["optional"] = True
    if profile.numbers == count:
        return _of_numbers(profile, more, notes)
    form = _date_format(profile)
    if form is not None:
        return Column(kind="date", format=form, **more), notes
    if profile.numbers >= 0.9 * count and len(profile.words) <= 3 and all(map(_is_cell, profile.words)):
        words = listed([shown(word) for word in profile.words])
        return _of_numbers(
            profile, more | {"missing_values": profile.words}, [*notes, f"{words} are taken as missing."]
        )
    rare = len(profile.cells) > 50 and count < 5 * len(profile.cells)
    if profile.many or rare or len(profile.cells) > MOST_WORDS or not all(map(_is_cell, profile.texts)):
        return None, [f"it looks like an identifier or free text: {distinct} different cells"]
    if profile.unique == 1 and count >= 50:
        return None, ["it looks like an identifier: all its cells differ"]
    return _of_words(profile, more), notes


def _is_cell(text: str) -> bool:
    return is_plain(text) and len(text) <= LONGEST_NAME


def _notes_on_missing(profile: Profile, lacking: Sequence[str]) -> list[str]:
    missing = profile.total - profile.count
    notes = [f"{listed(lacking, 3)} {'has' if len(lacking) == 1 else 'have'} no such column."] if lacking else []
    if missing:
        share = {site: 1 - profile.present[site] / rows for site, rows in profile.rows.items()}
        worst = max(share, key=lambda site: share[site])
        at = f"; {_percent(share[worst])} at {worst}" if len(share) > 1 else ""
        notes.append(f"Missing: {_percent(missing / profile.total)}{at}.")
    return notes


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _of_numbers(profile: Profile, more: dict[str, Any], notes: list[str]) -> tuple[Column | None, list[str]]:
    texts = sorted(profile.amounts, key=_number)
    values = np.concatenate(profile.values)
    if profile.whole and profile.unique == 1 and profile.count >= 50:
        return None, ["it looks like an identifier: all its numbers are whole and differ"]
    codes = [text for text in texts if _number(text) < 0]
    if profile.whole and not profile.many and len(codes) == 1 and len(texts) > 2 and _number(codes[0]) in CODES:
        more["missing_values"] = [*more.get("missing_values", ()), codes[0]]
        notes.append(f"{codes[0]} is taken as missing: it is the only number below 0.")
        texts, values = texts[1:], values[values >= 0]
    if len(texts) == 2:
        return Column(kind="flag", categories=texts, **more), notes
    if profile.whole and not profile.many and len(texts) <= MOST_CODES:
        return Column(kind="category", categories=texts, **more), notes
    code, rest = _code_for_missing(values)
    if code is not None and code < 0 <= rest.min():
        more["missing_values"] = [*more.get("missing_values", ()), f"{code:g}"]
        notes.append(f"{code:g} is taken as missing: it is the only number below 0.")
        values = rest
    elif code is not None and f"{code:g}" not in more.get("missing_values", ()):
        notes.append(f"{code:g} lies far from the others. If it means missing: missing_values = [{code:g}]")
    low, middle, high = np.quantile(values, (0.01, 0.5, 0.99))
    notes.append(f"The median is {middle:.3g}; 98 % lie in:")
    notes.append(f"range = [{_rounded(low, math.floor)}, {_rounded(high, math.ceil)}]")
    return Column(kind="numeric", **more), notes


def _number(text: str) -> float:
    return float(text.replace(",", "."))


def _code_for_missing(values: np.ndarray) -> tuple[float | None, np.ndarray]:
    """Return a usual code for missing that is the only negative value, or far from all others; and the others."""
    for code in (float(values.min()), float(values.max())):
        rest = values[values != code]
        if code in CODES and len(rest) and len(values) - len(rest) >= max(3, 0.002 * len(values)):
            low, high = np.quantile(rest, (0.25, 0.75))
            if code < 0 <= rest.min() or min(abs(rest - code)) >= high - low > 0:
                return code, rest
    return None, values


def _rounded(value: float, to: Any) -> str:
    """Return a number rounded outwards to two digits."""
    if not value:
        return "0"
    digits = math.floor(math.log10(abs(value))) - 1
    scaled = to(round(value / 10.0**digits, 6))
    return f"{scaled * 10.0**digits:.12g}"


def _date_format(profile: Profile) -> str | None:
    """Return the format of dates that all kept cells have; None if they have none."""
    import pandas

    texts = pandas.Series(profile.texts, dtype=object)
    if not texts.str.match(r"[0-9]{1,4}[-./][0-9]{1,2}[-./][0-9]{1,4}").all():
        return None
    for form in DATES:
        iso = form or not texts.str.match(r"[0-9]{4}-").all()
        if form or not iso:
            dates = pandas.to_datetime(texts, format=form or "ISO8601", errors="coerce", utc=True)
            if not dates.isna().any():
                return form
    return None


def _of_words(profile: Profile, more: dict[str, Any]) -> Column:
    texts = sorted(profile.texts, key=lambda text: in_order(text.lower()))
    lower = [text.lower() for text in texts]
    if len(texts) == 2:
        return Column(kind="flag", categories=_no_and_yes(texts) or texts, **more)
    for order in ORDERS:
        if set(lower) <= set(order):
            ordered = sorted(texts, key=lambda text: order.index(text.lower()))
            return Column(kind="ordinal", categories=ordered, **more)
    return Column(kind="category", categories=texts, **more)


def _no_and_yes(texts: Sequence[str]) -> list[str] | None:
    """Return two cells as no and yes; None if they do not tell."""
    for no, yes in (texts, texts[::-1]):
        if no.lower() in NEGATIVE and yes.lower() not in NEGATIVE:
            return [no, yes]
        if yes.lower() in POSITIVE and no.lower() not in POSITIVE:
            return [no, yes]
    return None


def _target(profile: Profile, positive: Sequence[str]) -> tuple[Target, list[str]]:
    """Return the target, and notes on it."""
    name, texts = profile.name, sorted(profile.texts, key=in_order)
    notes: list[str] = []
    more: dict[str, Any] = {}
    if profile.count < profile.total:
        more["missing"] = "drop"
        notes.append(f"rows without it, {_percent(1 - profile.count / profile.total)}, are left out")
    if not texts:
        raise InputError(f"The target {shown(name)} has no values.")
    if positive:
        keys = {key_of(cell) for cell in profile.cells}
        lacking = [cell for cell in positive if key_of(cell) not in keys]
        if len(lacking) == len(positive):
            raise unknown("cell", lacking[0], texts[:MOST_CLASSES], f"target {shown(name)}")
        chosen = {key_of(cell) for cell in positive}
        others = [text for text in texts if key_of(text) not in chosen]
        if len(others) > MOST_CLASSES:
            raise InputError(
                f"The target {shown(name)} has {len(others)} other cells. Say which column has two classes."
            )
        return Target(name, positive=positive, negative=others or NO, **more), notes
    numbers = profile.numbers == profile.count
    if len(texts) <= 2:
        pair = _pair(texts, numbers)
        if pair is None:
            raise InputError(
                f"The target {shown(name)} has {' and '.join(map(shown, texts))}. Say which is class 1: positive."
            )
        usual = all(key_of(text) in map(key_of, cells) for text, cells in zip(pair, (NO, YES), strict=True))
        more |= {} if usual else {"negative": pair[:1], "positive": pair[1:]}
        return Target(name, **more), notes
    if not profile.many and len(texts) <= MOST_CLASSES and (profile.whole or not numbers):
        notes.append('it has several classes. For two, set kind = "flag", and positive = [...], those of class 1')
        return Target(name, kind="category", classes=texts, **more), notes
    if numbers:
        return Target(name, kind="numeric", **more), notes
    raise InputError(f"The target {shown(name)} has {len(texts)} different cells. Say which are class 1: positive.")


def _pair(texts: Sequence[str], numbers: bool) -> list[str] | None:
    """Return the cells of class 0 and class 1; None if they do not tell."""
    if len(texts) == 1:
        low = texts[0].lower()
        return [texts[0], "1"] if low in NEGATIVE else ["0", texts[0]] if low in POSITIVE or numbers else None
    return sorted(texts, key=_number) if numbers else _no_and_yes(texts)

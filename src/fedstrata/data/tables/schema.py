"""The schema of the sites' tables: columns with their kinds, units, ranges and categories, and how files are read.

It is a TOML file that ``fedstrata describe --draft`` proposes and a person edits. Every site's table is checked against
it. The raw values of a table are its columns as float64 [n, p], in the order of the schema: numbers as they are, codes
(positions in ``categories``) for categories, ordinals and flags, days since 1970-01-01 for dates, NaN for missing.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fedstrata.core.errors import InputError, invalid, listed, unknown
from fedstrata.core.files import read_toml, refuse_special, write_atomically
from fedstrata.core.options import Options, build, options_of, param
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.columns import RULES, Cell, Column, Target, cells_of, check_name, from_toml

VERSION = 1

MOST_COLUMNS = 10_000

MISSING = ("", "NA", "N/A", "NaN", "nan", "?", "NULL", "null")
"""Cells that are missing in every column, unless the schema says otherwise."""


class FileFormat(Options, owner="the file format"):
    """How the sites' text files are written. Parquet files and frames need none of it."""

    delimiter: str | None = param(None, "character between cells; by default comma, semicolon, tab or bar, as found")
    encoding: str = param("utf-8", "encoding of the text")
    decimal: Literal[".", ","] = param(".", "decimal point of numbers")
    names: Sequence[str] = param((), "names of the columns, in order, if the files have no header")
    missing: Sequence[Cell] = param(MISSING, "cells that are missing in every column")

    def __post_init__(self) -> None:
        object.__setattr__(self, "missing", cells_of(self.missing))
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise invalid("delimiter", self.delimiter, "a single character, such as ; or \\t")
        if self.delimiter == self.decimal:
            raise InputError(f"The delimiter and the decimal point are both {self.decimal!r}. Change one.")
        try:
            right = codecs.lookup(self.encoding)._is_text_encoding
        except (LookupError, ValueError):
            right = False
        if not right:
            raise invalid("encoding", self.encoding, "the name of a text encoding, such as utf-8 or latin-1")
        for name in self.names:
            check_name(name, "name in file.names")
        if len(set(self.names)) < len(self.names):
            raise InputError(f"The names of the columns must be distinct. Got {listed(sorted(self.names))}.")


class Schema(Options, owner="the schema"):
    """What the sites' tables must look like."""

    target: Target = param(..., "the column to predict")
    columns: Sequence[Column] = param(..., "the columns that a model may use")
    version: int = param(VERSION, "version of the form of this file", least=1)
    site: str | None = param(None, "column that names the site, if one table has the rows of all")
    drop: Sequence[str] = param((), "columns in the files that are ignored")
    file: FileFormat = param(FileFormat(), "how the files are written")

    def __post_init__(self) -> None:
        if self.version > VERSION:
            raise invalid("version of the schema", self.version, f"{VERSION}; this one is of a newer fedstrata")
        if not 0 < len(self.columns) <= MOST_COLUMNS:
            raise invalid("number of columns of the schema", len(self.columns), f"from 1 to {MOST_COLUMNS:,}")
        site = () if self.site is None else (self.site,)
        for name in (*site, *self.drop):
            check_name(name, "name of a column")
        names = (*(c.name for c in self.columns), self.target.name, *site, *self.drop)
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise InputError(
                    f"The column {shown(name)} is in the schema twice. Columns, target, site and drop "
                    "must not share a name."
                )
            seen.add(name)
        known = set(self.file.names)
        lacking = [name for name in (*(c.name for c in self.columns), self.target.name) if name not in known]
        if self.file.names and lacking:
            raise unknown("column", lacking[0], self.file.names, "file.names of the schema")

    @property
    def features(self) -> tuple[Column, ...]:
        """The columns that a model may use, in the order of the raw values."""
        return tuple(self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the schema with all its defaults."""
        return hashlib.sha256(_toml(self.to_table()).encode()).hexdigest()

    def select(self, features: Sequence[str] = (), drop: Sequence[str] = ()) -> Schema:
        """Return the schema with only these features, or all but those in ``drop``, ignoring the other columns."""
        for name in (*features, *drop):
            if name not in self.names and name not in self.drop:
                raise unknown("column", name, self.names, "the schema")
        kept = [c for c in self.columns if c.name not in drop and (not features or c.name in features)]
        names = {c.name for c in kept}
        left = [name for name in self.names if name not in names]
        if not kept:
            raise InputError(f"No column is left of the schema's {listed(self.names)}.")
        return self.replace(columns=kept, drop=(*self.drop, *left))

    @classmethod
    def read(cls, path: str | Path) -> Schema:
        """Read a schema file."""
        path = Path(path)
        refuse_special(path)
        schema: Schema = build(cls, from_toml(read_toml(path)), str(path), "")
        return schema

    def text(self, notes: Mapping[str, Sequence[str]] | None = None, head: Sequence[str] = ()) -> str:
        """Return the schema as TOML without what is the default.

        ``notes`` are comments on columns, by name, and ``head`` those at the beginning.
        """
        top = _changed(self, "target", "file", "columns")
        parts = [_comments(head)] if head else []
        parts += [_toml({"version": self.version} | top), f"[target]\n{_toml(_changed(self.target))}"]
        if _changed(self.file):
            parts.append(f"[file]\n{_toml(_changed(self.file))}")
        for column in self.columns:
            lines = _comments((notes or {}).get(column.name, ()))
            rule = {"missing": column.missing} if column.missing != RULES[column.kind][0] else {}
            table = {"name": column.name, "kind": column.kind} | _changed(column, "missing") | rule
            parts.append(f"[[columns]]\n{_toml(table)}{lines}")  # inside its table, so that a note can be uncommented
        return "\n".join(parts)

    def write(
        self, path: str | Path, notes: Mapping[str, Sequence[str]] | None = None, head: Sequence[str] = ()
    ) -> None:
        """Write a schema file; raise if the file exists, since a person may have edited it."""
        path = Path(path)
        if path.exists() or path.is_symlink():
            raise InputError(f"The file {path} exists. Nothing was overwritten. Choose another.")
        if not path.parent.is_dir():
            raise InputError(f"There is no directory {path.parent} to write {path.name} in.")
        write_atomically(path, self.text(notes, head).encode())


def _changed(options: Options, *without: str) -> dict[str, Any]:
    """Return the table of options without those that have their default."""
    defaults = {name: option.default for name, option in options_of(options).items()}
    table = options.to_table()
    return {k: v for k, v in table.items() if k not in without and getattr(options, k) != defaults[k]}


def _comments(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _toml(table: Mapping[str, Any]) -> str:
    """Return TOML with every list in one line."""
    return "".join(f"{key} = {_inline(value)}\n" for key, value in table.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_inline(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"_": value})[4:-1]

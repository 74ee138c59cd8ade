"""Where the sites' tables are: paths, patterns and frames, and the names of the sites."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstrata.core.errors import InputError, invalid
from fedstrata.data.tables.cells import shown
from fedstrata.data.tables.columns import check_name

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".csv", ".tsv", ".txt", ".data", ".parquet", ".pq", ".gz")
"""Endings of file names that are not part of a site's name."""

WANTED = "a path, a pattern such as sites/*.csv, a pandas or polars frame, a list of these, or a dict of them by site"


@dataclass(frozen=True)
class SiteFile:
    """The table of a site: a file, or a frame as a pyarrow table."""

    name: str
    table: Path | pyarrow.Table

    @property
    def place(self) -> str:
        """What messages call the table."""
        return str(self.table) if isinstance(self.table, Path) else f"the frame of {self.name}"


def need_arrow() -> None:
    """Raise unless the libraries that read tables are installed."""
    for name in ("pandas", "pyarrow"):  # found, not imported: pandas takes half a second, and is not always needed
        if find_spec(name) is None:
            raise InputError(f"{name} is not installed: pip install 'fedstrata[tables]'.")


def sites_of(source: Any) -> list[SiteFile]:
    """Return the tables of a source, in the order of their names; a single one may hold all sites."""
    need_arrow()
    if isinstance(source, SiteFile):
        return [source]
    if isinstance(source, Mapping):
        sites = [SiteFile(str(name), _table(value, f"site {shown(name)}")) for name, value in source.items()]
    elif isinstance(source, list | tuple) and not all(isinstance(s, str | os.PathLike) for s in source):
        sites = [SiteFile(f"site {i}", _table(value, f"site {i}")) for i, value in enumerate(source)]
    elif isinstance(source, str | os.PathLike | list | tuple):
        paths = list(dict.fromkeys(p for s in _listed(source) for p in _paths(s)))
        sites = [SiteFile(*pair) for pair in zip(_names(paths), paths, strict=True)]
        sites.sort(key=lambda site: in_order(site.name))
    else:
        sites = [SiteFile("table", _table(source, "the table"))]
    if not sites:
        raise invalid("source of the tables", source, WANTED)
    for site in sites:
        check_name(site.name, "name of a site")
    return sites


def in_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what sorts names as a person does: site 2 before site 10."""
    parts = re.findall(r"[0-9]{1,18}|[^0-9]+|[0-9]+", name)
    return tuple((0, int(p), "") if p.isdecimal() and len(p) <= 18 else (1, 0, p) for p in parts)


def _listed(source: Any) -> Sequence[str | os.PathLike[str]]:
    return source if isinstance(source, list | tuple) else [source]


def _paths(source: str | os.PathLike[str]) -> list[Path]:
    text = os.fspath(source)
    if not text or "\0" in text:
        raise invalid("path of a table", text, "the path of a file, or a pattern such as sites/*.csv")
    if isinstance(source, Path) or os.path.lexists(text) or not glob.has_magic(text):
        return [Path(text)]
    matches = sorted(Path(p) for p in glob.glob(text, recursive=True))  # noqa: PTH207 - also absolute patterns
    if not matches:
        raise InputError(f"No file matches the pattern {text}.")
    return matches


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for every file: its own, or with that of its folder if several are named alike."""
    stems = [_stem(path) for path in paths]
    if len(paths) > 1 and len(set(stems)) == 1:
        stems = [path.absolute().parent.name for path in paths]
    elif len(set(stems)) < len(stems):
        stems = [f"{path.absolute().parent.name}/{stem}" for path, stem in zip(paths, stems, strict=True)]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in paths]


def _stem(path: Path) -> str:
    name = path.name
    while (suffix := Path(name).suffix.lower()) in SUFFIXES and suffix:
        name = name[: -len(suffix)]
    return name


def _table(source: Any, what: str) -> Path | pyarrow.Table:
    import pyarrow as pa

    if isinstance(source, str | os.PathLike):
        paths = _paths(source)
        if len(paths) > 1:
            raise invalid(f"path of {what}", str(source), f"one file. It matches {len(paths)}")
        return paths[0]
    if isinstance(source, pa.Table):
        return _distinct(source, source.column_names, what)
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        names = [str(name).strip() for name in source.columns]
        arrays = [_column(source.iloc[:, i]) for i in range(len(names))]
        return _distinct(pa.table(arrays, names=[str(i) for i in range(len(names))]), names, what)
    try:
        table = source.to_arrow() if hasattr(source, "to_arrow") else pa.table(source)
    except (TypeError, ValueError, pa.ArrowException):
        raise invalid(what, type(source).__name__, WANTED) from None
    return _distinct(table, table.column_names, what)


def _column(series: Any) -> pyarrow.Array:
    """Return a column of a pandas frame; one of mixed values as text."""
    import pyarrow as pa

    try:
        return pa.array(series, from_pandas=True)
    except (TypeError, ValueError, pa.ArrowException):
        missing = series.isna().to_numpy()
        return pa.array([None if m else str(v) for v, m in zip(series, missing, strict=True)], pa.string())


def _distinct(table: pyarrow.Table, names: Iterable[str], what: str) -> pyarrow.Table:
    names = [name.strip() for name in names]
    check_distinct_names(names, what)
    return table.rename_columns(names)


def check_distinct_names(names: Sequence[str], what: str) -> None:
    """Raise if two columns have the same name."""
    first_at: dict[str, int] = {}
    for i, name in enumerate(names):
        if first_at.setdefault(name, i) != i:
            raise InputError(f"The columns {first_at[name]} and {i} of {what} are both {shown(name)}. Rename one.")

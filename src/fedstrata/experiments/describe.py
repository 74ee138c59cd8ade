"""Descriptions of all options, for ``fedstrata show`` and for the tables of docs/configuration.md."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedstrata.algorithms.algorithm import ALGORITHMS, Algorithm
from fedstrata.algorithms.sent import Sent, sent
from fedstrata.clients.channel import Channel
from fedstrata.clients.faults import Faults, Inject
from fedstrata.core.errors import FedstrataError, unknown
from fedstrata.core.options import Option, options_of, plain
from fedstrata.core.registry import Registry
from fedstrata.core.schedules import SCHEDULES
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.sets import SETS
from fedstrata.data.tables.preparation import Preparation
from fedstrata.experiments.schema import CompareTable, DataTable, FederationTable, PlotTable, PretrainTable, TuneTable
from fedstrata.models.augment import AUGMENTATIONS
from fedstrata.models.zoo import MODELS
from fedstrata.problems import PROBLEMS
from fedstrata.training.diagnostics import Diagnostics
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.settings import Settings

TABLES: dict[str, Any] = {
    "data": DataTable,
    "prepare": Preparation,
    "pretrain": PretrainTable,
    "train": Settings,
    "evaluate": Evaluation,
    "channel": Channel,
    "faults": Faults,
    "faults.inject": Inject,
    "federation": FederationTable,
    "diagnostics": Diagnostics,
    "tune": TuneTable,
    "compare": CompareTable,
    "plot": PlotTable,
}
"""The tables of a configuration file with fixed keys."""

KINDS: dict[str, Registry[Any]] = {
    "algorithms": ALGORITHMS,
    "problems": PROBLEMS,
    "datasets": SETS,
    "models": MODELS,
    "augmentations": AUGMENTATIONS,
    "partitions": PARTITIONS,
    "schedules": SCHEDULES,
}
"""Everything that a configuration file refers to by name, by kind."""


@dataclass(frozen=True)
class Description:
    """A description: a text, and the options that are keys of a file."""

    name: str
    text: str
    options: dict[str, Option]

    def as_json(self) -> dict[str, Any]:
        """Return the description as JSON, for scripts."""
        if self.name not in ALGORITHMS:
            defaults = {name: _default(option) for name, option in self.options.items()}
            return {"name": self.name, "text": self.text, "options": defaults}
        first = _sent_by_default(ALGORITHMS[self.name])
        about = {n: {"default": _default(o), "type": o.wants, "doc": o.doc} for n, o in self.options.items()}
        said = {"up": None, "down": None} if first is None else {"up": first.up, "down": first.down}
        return {"name": self.name, "text": self.text, "hyperparameters": about, **said}

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """The options as rows for display: name, default, accepted values, description."""
        return [(name, _shown(option), option.wants, option.doc) for name, option in self.options.items()]


def describe(name: str) -> Description:
    """Describe a table of a file, or anything that a file refers to by name."""
    if name in TABLES:
        text = f"The table [{name}] of a configuration file. {text_of(TABLES[name])}"
        return Description(name, text, keys_of(TABLES[name]))
    for registry in KINDS.values():
        if name in registry:
            target = registry.definition(registry[name])
            return Description(name, text_of(target), keys_of(target))
    raise unknown("name", name, [*TABLES, *(other for registry in KINDS.values() for other in registry)])


def text_of(target: Any) -> str:
    """Return the docstring of a class or function without its options; for an algorithm, that of its module.

    The file of a user's algorithm may have other things too; if it does not say what is sent, the class describes it.
    """
    if target in ALGORITHMS.values() and _sent_by_default(target) is not None:
        return inspect.getdoc(inspect.getmodule(target)) or ""
    return re.split(r"(?:^|\n\n)Options:\n", inspect.getdoc(target) or "", maxsplit=1)[0]


def line_of(target: Any) -> str:
    """Return the first line of the docstring of a class or function."""
    line = (inspect.getdoc(target) or "").split("\n")[0]
    return "" if line == "Options:" else line


def _sent_by_default(kind: type[Algorithm]) -> Sent | None:
    """Return what an algorithm sends with its default options; None if its file does not say."""
    try:
        return sent(kind)[0]
    except FedstrataError:
        return None


def keys_of(target: Any) -> dict[str, Option]:
    """Return the options of a class or function that are keys of its table in a file."""
    no_key = {PretrainTable: "options", Faults: "inject"}.get(target)  # stored next to the keys, or in its own table
    return {name: option for name, option in options_of(target).items() if option.in_file and name != no_key}


def _default(option: Option) -> Any:
    return None if option.required else plain(option.default)


def _shown(option: Option) -> str:
    value = _default(option)
    if value is None:
        return "required" if option.required else ""
    return json.dumps(value)


# --- docs/configuration.md --------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"(<!-- options: ([\w.]+) -->\n).*?(<!-- end -->)", re.S)


def with_option_tables(page: str) -> str:
    """Regenerate everything between ``<!-- options: NAME -->`` and ``<!-- end -->`` in a Markdown page.

    NAME is a key of ``TABLES`` or ``KINDS``.
    """

    def written(block: re.Match[str]) -> str:
        name = block[2]
        if name in TABLES:
            return f"{block[1]}\n{_keys_as_markdown(keys_of(TABLES[name]))}\n{block[3]}"
        if name in KINDS:
            return f"{block[1]}\n{_names_as_markdown(KINDS[name].definitions())}\n{block[3]}"
        raise unknown("table of options", name, [*TABLES, *KINDS])

    return _BLOCK.sub(written, page)


def _keys_as_markdown(options: Mapping[str, Option]) -> str:
    rows = [("key", "default", "takes", "meaning"), ("---",) * 4]
    for name, option in options.items():
        wants = re.sub(r"'([^']*)'", r'`"\1"`', option.wants.removesuffix(", or left out"))
        rows.append((f"`{name}`", f"`{_shown(option)}`" if _shown(option) else "", wants, option.doc))
    return _rows(rows)


def _names_as_markdown(group: Mapping[str, Callable[..., Any]]) -> str:
    rows = [("name", "options and defaults", "what it is"), ("---",) * 3]
    for name, target in group.items():
        shown = {n: "" if _default(o) is None else f" = {_shown(o)}" for n, o in keys_of(target).items()}
        line = re.sub(r"^(Build|Generate|Load) ", "", text_of(target).split("\n")[0]).replace("``", "`")
        rows.append((f"`{name}`", ", ".join(f"`{n}{default}`" for n, default in shown.items()), line))
    return _rows(rows)


def _rows(rows: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)

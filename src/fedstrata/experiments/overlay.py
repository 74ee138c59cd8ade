"""Merge tables of a configuration file before they are checked: presets, variants and single overrides."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.files import read_toml
from fedstrata.core.options import Options, options_of
from fedstrata.core.registry import Registry
from fedstrata.core.schedules import SCHEDULES
from fedstrata.data import SETS
from fedstrata.data.partitions import PARTITIONS
from fedstrata.experiments.schema import AlgorithmTable, DataTable, ModelTable, PretrainTable, ProblemTable, Tuning
from fedstrata.models import MODELS
from fedstrata.problems import PROBLEMS
from fedstrata.training.settings import Settings

Tables = dict[str, Any]

SHARED = ("lr", "dual_lr", "steps", "server_lr", "weight_decay")
"""Hyperparameters with the same meaning in every algorithm, which a comparison may share; Greek letters vary."""


NAMES = {"data": "name", "model": "name", "problem": "name", "algorithm": "name", "pretrain": "algorithm"}
"""The tables with the options of a named object, and the key of its name."""

_TABLES: dict[str, type[Options]] = {
    "data": DataTable,
    "model": ModelTable,
    "problem": ProblemTable,
    "algorithm": AlgorithmTable,
    "pretrain": PretrainTable,
}
_REGISTRIES: dict[str, Registry[Any]] = {
    "model": MODELS,
    "problem": PROBLEMS,
    "algorithm": ALGORITHMS,
    "pretrain": ALGORITHMS,
    "data.options": SETS,
    "data.partition": PARTITIONS,
}
"""Tables with the options of a registered object; any other table that names one is a schedule."""


def with_names(raw: Tables) -> Tables:
    """Return the tables with default names filled in, so that a change of name is detected."""
    names = {kind: {key: options_of(_TABLES[kind])[key].default} for kind, key in NAMES.items()}
    return {k: {**names[k], **v} if k in names and isinstance(v, dict) else v for k, v in raw.items()}


def applicable(kind: str, options: Tables, name: str) -> Tables:
    """Return the options of ``[algorithm]``, ``[problem]`` or ``[pretrain]`` that also apply to another ``name``.

    If the name is unknown, these are all of them, since the experiment will be refused.
    """
    if name not in (PROBLEMS if kind == "problem" else ALGORITHMS):
        return options
    if kind == "problem":
        kept: Iterable[str] = PROBLEMS[name].options
    else:
        kept = {*SHARED} & {*options_of(ALGORITHMS[name])} | ({"rounds"} if kind == "pretrain" else set())
    return {k: v for k, v in options.items() if k in kept}


def _rename(tables: Tables, kind: str, name: Any) -> Tables:
    """Return the tables with another name in ``[kind]``, and only the options that apply to it."""
    old, key = tables.get(kind), NAMES[kind]
    if not isinstance(old, dict) or not isinstance(name, str) or name == old.get(key):
        return tables
    return {**tables, kind: {**applicable(kind, old, name), key: name}}


def merge(base: Tables, over: Tables) -> Tables:
    """Merge ``over`` into ``base``: tables key by key, anything else replaced.

    A table with another ``name`` (or ``schedule``, for a rate) replaces the old one entirely, since the options of one
    model or partition do not apply to another.
    """
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(base[key], value) if tables and not _names_another(base[key], value) else value
    return merged


def _names_another(old: Tables, new: Tables) -> bool:
    return any(isinstance(new.get(key), str) and new[key] != old.get(key, new[key]) for key in ("name", "schedule"))


def merge_experiment(base: Tables, over: Tables) -> Tables:
    """Merge tables of an experiment; a new algorithm of ``[pretrain]`` keeps the rounds and the shared options."""
    new = over.get("pretrain")
    name = new.get("algorithm") if isinstance(new, dict) else None
    return merge(_rename(base, "pretrain", name), over)


# --- results of tuning ------------------------------------------------------------------------------------------------


def tuning_in(file: Any, path: Path) -> Tuning:
    """Read the file that the key ``tuned`` of the file ``path`` names."""
    if not isinstance(file, str) or not file:
        raise invalid("key tuned", file, "the path of a file that `fedstrata tune` wrote", str(path))
    where = path.parent / file
    return Tuning.from_table(read_toml(where), f"{where}, tuned in {path}", key="")


def with_tuned(raw: Tables, tuning: Tuning) -> Tables:
    """Return the tables with tuned options of variants and baselines, and with a seed that no trial has used.

    Options of variants that the experiment does not have are left out, so that several experiments can share a file.
    """
    variants, baselines, train = (raw.get(key, {}) for key in ("variants", "baselines", "train"))
    if not all(isinstance(table, dict) for table in (variants, baselines, train)):
        return raw
    best = {k: merge(old, tuning.variants.get(k, {})) for k, old in variants.items() if isinstance(old, dict)}
    tuned: Tables = {**raw, "variants": {**variants, **best}} if variants else {**raw}
    if tuning.baselines:
        tuned["baselines"] = merge(baselines, tuning.baselines)
    if train.get("seed", options_of(Settings)["seed"].default) in tuning.trial_seeds:
        tuned["train"] = {**train, "seed": max(tuning.trial_seeds) + 1}
    return tuned


# --- presets ----------------------------------------------------------------------------------------------------------


def presets_of(raw: Tables, where: str) -> dict[str, Tables]:
    """Return the presets of a file by name, in its order."""
    presets = raw.get("preset", {})
    if not isinstance(presets, dict) or not all(isinstance(p, dict) for p in presets.values()):
        raise invalid("key preset", presets, "tables such as [preset.cpu.train]", where)
    return presets


def split_preset(raw: Tables, preset: str | None, where: str) -> tuple[Tables, Tables]:
    """Return the tables of a file, and those of a preset to merge into them: the first if ``preset`` is None."""
    presets = presets_of(raw, where)
    rest = {k: v for k, v in raw.items() if k != "preset"}
    if not presets:
        if preset is not None:
            raise InputError(f"Unknown preset {preset!r}: the file has no [preset.NAME] tables. ({where})")
        return rest, {}
    name = next(iter(presets)) if preset is None else preset
    if name not in presets:
        raise unknown("preset", name, presets, where)
    if "preset" in presets[name]:
        raise InputError(f"A preset cannot contain presets. Got [preset.{name}.preset]. ({where})")
    return rest, presets[name]


# --- overrides from the command line ----------------------------------------------------------------------------------


def override(raw: Tables, text: str) -> Tables:
    """Return the tables with one setting changed, given as ``key=value``; the value is TOML, or else a string.

    It takes precedence over variants that set the same key, and over ``[algorithms.NAME]``. A variant that names
    another object gets it too, if that object has the option; an option that nothing has is an error. A new algorithm
    or problem keeps only the options that apply to it.
    """
    path, value = _parsed(text)
    raw = with_names(_put_over(raw, path, value, text))
    variants, algorithms = (raw[k] if isinstance(raw.get(k), dict) else {} for k in ("variants", "algorithms"))
    others = {k: v for k, v in variants.items() if _names_another_at(raw, v, path)}
    takers = {k: v for k, v in variants.items() if _sets(v, path) or (k in others and _takes(v, path))}
    option = path[1:] if path[0] == "algorithm" else []
    own = {k: v for k, v in algorithms.items() if option and _sets(v, option)}
    if not (takers or own or _takes(raw, path) or option in [[shared] for shared in SHARED]):
        raise _unknown_key([raw, *others.values()], path, text)
    if takers:
        raw["variants"] = variants | {k: _put_over(v, path, value, text) for k, v in takers.items()}
    if own:
        raw["algorithms"] = algorithms | {k: _put_over(v, option, value, text) for k, v in own.items()}
    return raw


def _parsed(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"An override must have the form key=value, e.g. algorithm.lr=0.1. Got {text!r}.")
    try:
        tables = tomllib.loads(f"value = {value.strip()}")
    except tomllib.TOMLDecodeError:
        return path, value.strip()
    if len(tables) > 1:
        raise InputError(f"An override must set one key. Got {text!r}.")
    return path, tables["value"]


def _at(tables: Any, path: list[str]) -> Any:
    """Return the value of a key; None if the tables have none."""
    for part in path:
        tables = tables.get(part) if isinstance(tables, dict) else None
    return tables


def _sets(tables: Any, path: list[str]) -> bool:
    """Whether the tables have a value for this key."""
    return _at(tables, path) is not None


def _name_at(tables: Any, path: list[str]) -> Any:
    """Return the name of the object that the table at ``path`` configures; None if it names none."""
    table = _at(tables, path)
    if not isinstance(table, dict):
        return None
    return table.get(NAMES.get(path[0])) if len(path) == 1 else table.get("schedule", table.get("name"))


def _names_another_at(base: Tables, over: Any, path: list[str]) -> bool:
    """Whether a table around this key names another object in ``over``, and so does not inherit the key."""
    return any(_name_at(over, path[:n]) not in (None, _name_at(base, path[:n])) for n in range(1, len(path)))


def _keys(tables: Tables, path: list[str]) -> set[str] | None:
    """Return the keys that the table at ``path`` may have; None if they do not depend on a known object."""
    where = ".".join(path)
    name = _name_at(tables, ["data"] if where == "data.options" else path)
    registry = _REGISTRIES.get(where, SCHEDULES)
    if not isinstance(name, str) or name not in registry:
        return None
    declared = options_of(registry.definition(registry[name]))
    own: dict[str, Iterable[str]] = {"data.options": (), "data.partition": ("name",)}
    own |= {kind: options_of(table).keys() - {"options"} for kind, table in _TABLES.items()}
    return {*own.get(where, ("schedule",)), *(key for key, option in declared.items() if option.in_file)}


def _takes(tables: Tables, path: list[str]) -> bool:
    """Whether the objects that the tables name have this option."""
    inside = path[:-1] == ["data", "options"] or isinstance(_at(tables, path[:-1]), dict)
    levels = ((_keys(tables, path[:n]), path[n]) for n in range(1, len(path)))
    return inside and all(keys is None or key in keys for keys, key in levels)


def _unknown_key(places: list[Tables], path: list[str], text: str) -> InputError:
    """Return the error for an option that no object has, in any of these tables."""
    n = next(n for n in range(1, len(path)) if not _takes(places[0], path[: n + 1]))
    known = {".".join([*path[:n], key]) for tables in places for key in _keys(tables, path[:n]) or ()}
    return unknown("key", ".".join(path[: n + 1]), known, f"--set {text}")


def _put_over(tables: Tables, path: list[str], value: Any, text: str) -> Tables:
    """Return the tables with a new value for a key; a new name keeps only the options that apply to it."""
    if path in (["algorithm", "name"], ["problem", "name"], ["pretrain", "algorithm"]):
        tables = _rename(tables, path[0], value)
    return _put(tables, path, value, text)


def _put(tables: Tables, path: list[str], value: Any, text: str) -> Tables:
    first, *rest = path
    if not rest:
        return {**tables, first: value}
    inner = tables.get(first, {})
    if not isinstance(inner, dict):
        raise InputError(f"Cannot apply the override {text!r}: {first} is not a table.")
    return {**tables, first: _put(inner, rest, value, text)}


# --- names of directories ---------------------------------------------------------------------------------------------


def slug(label: str) -> str:
    """Return a label as part of a file name: ``gamma = 0.1`` becomes ``gamma-0.1``."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-.")


LONGEST = 100
"""The most bytes of a label, which is part of the names of files."""


def check_labels(kind: str, labels: Iterable[str], where: str = "") -> None:
    """Raise if labels are not fit to print, do not have names of directories, or share one."""
    slugs: dict[str, str] = {}
    for label in labels:
        if any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in label):
            raise invalid(f"label of a {kind}", label, "one line without control characters", where)
        if len(label.encode()) > LONGEST:
            wants = f"at most {LONGEST} bytes long, since files are named after it"
            raise invalid(f"label of a {kind}", f"{label[:20]}... ({len(label.encode())} bytes)", wants, where)
        other = slugs.setdefault(slug(label), label)
        if other != label:
            raise invalid(f"label of a {kind}", label, f"distinct from {other!r} in its letters and digits", where)
        if not slug(label):
            raise invalid(f"label of a {kind}", label, "a name with letters or digits", where)

"""Merge tables of a configuration file before they are checked: presets, variants and single overrides."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from typing import Any

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.errors import InputError, invalid, unknown
from fedstrata.core.options import options_of
from fedstrata.problems import PROBLEMS

Tables = dict[str, Any]

SHARED = ("lr", "dual_lr", "steps", "server_lr", "weight_decay")
"""Hyperparameters with the same meaning in every algorithm, which a comparison may share; Greek letters vary."""


NAMES = {"data": "name", "model": "name", "problem": "name", "algorithm": "name", "pretrain": "algorithm"}
"""The tables with the options of a named object, and the key of its name."""


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

    It takes precedence over variants that set the same key, and over ``[algorithms.NAME]``. A new algorithm or problem
    keeps only the options that apply to it.
    """
    path, value = _parsed(text)
    raw = _put_over(raw, path, value, text)
    variants = raw.get("variants")
    if isinstance(variants, dict):
        own = {
            k: _put_over(v, path, value, text) for k, v in variants.items() if isinstance(v, dict) and _sets(v, path)
        }
        raw = {**raw, "variants": {**variants, **own}}
    algorithms = raw.get("algorithms")
    if path[0] == "algorithm" and len(path) > 1 and isinstance(algorithms, dict):
        own = {k: _put_over(v, path[1:], value, text) for k, v in algorithms.items() if _sets(v, path[1:])}
        raw = {**raw, "algorithms": {**algorithms, **own}}
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


def _sets(tables: Any, path: list[str]) -> bool:
    """Whether the tables have a value for this key."""
    for part in path:
        if not isinstance(tables, dict) or part not in tables:
            return False
        tables = tables[part]
    return True


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

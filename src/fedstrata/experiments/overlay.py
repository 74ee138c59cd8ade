"""Tables of a configuration file before they are validated: laid over each other, presets, single settings."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from fedstrata.core.errors import InputError, invalid, unknown

Tables = dict[str, Any]


def merge(base: Tables, over: Tables) -> Tables:
    """Return ``base`` with ``over`` laid on it: tables key by key, anything else replaced.

    A table that names another thing (``name``, or ``schedule`` of a rate) replaces the old one whole, because the
    options of one model or partition make no sense for another.
    """
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        tables = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(base[key], value) if tables and not _names_another(base[key], value) else value
    return merged


def _names_another(old: Tables, new: Tables) -> bool:
    return any(isinstance(new.get(key), str) and new[key] != old.get(key, new[key]) for key in ("name", "schedule"))


def presets_of(raw: Tables, where: str) -> dict[str, Tables]:
    """Return the presets of a file by name, in its order."""
    presets = raw.get("preset", {})
    if not isinstance(presets, dict) or not all(isinstance(p, dict) for p in presets.values()):
        raise invalid("key preset", presets, "tables such as [preset.cpu.train]", where)
    return presets


def split_preset(raw: Tables, preset: str | None, where: str) -> tuple[Tables, Tables]:
    """Return the tables of a file, and those of one of its presets to lay over them: the first when it is None."""
    presets = presets_of(raw, where)
    rest = {k: v for k, v in raw.items() if k != "preset"}
    if not presets:
        if preset is not None:
            raise InputError(f"There is no preset {preset!r}: the file has no [preset.NAME] tables. ({where})")
        return rest, {}
    name = next(iter(presets)) if preset is None else preset
    if name not in presets:
        raise unknown("preset", name, presets, where)
    if "preset" in presets[name]:
        raise InputError(f"A preset cannot hold presets. Got [preset.{name}.preset]. ({where})")
    return rest, presets[name]


def override(raw: Tables, text: str) -> None:
    """Change one setting in place, given as ``key=value``; the value is TOML, or else text."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"An override must look like key=value, e.g. algorithm.lr=0.1. Got {text!r}.")
    try:
        parsed = tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    table = raw
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"The override {text!r} does not fit: {part} is not a table.")
    table[path[-1]] = parsed


def slug(label: str) -> str:
    """Return a label as part of a file name: ``gamma = 0.1`` becomes ``gamma-0.1``."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-.")

"""Hostile input of every kind, made at random from a fixed seed: an error of ours or a result, never a traceback.

Each test takes 20 cases; with ``-m fuzz`` there are 1,000 of each. A case is a function of its number, so that the one
that an assertion names can be repeated alone.
"""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.algorithms import ALGORITHMS
from fedstrata.cli.app import COMMANDS, invoke
from fedstrata.core.errors import FedstrataError
from fedstrata.core.kinds import Place
from fedstrata.core.options import options_of
from fedstrata.data import intake
from fedstrata.experiments import describe
from fedstrata.models import MODELS
from fedstrata.problems import PROBLEMS
from fuzzing import CODES, COUNTS, NUMBERS, TEXTS, VALUES, changed, every_case, survives

pytestmark = [
    pytest.mark.untraced,
    pytest.mark.usefixtures("no_pictures"),
    pytest.mark.filterwarnings("ignore"),  # a command shows warnings
]

# --- configuration files ----------------------------------------------------------------------------------------------

SOLVERS = {
    "erm": [
        "fedavg",
        "scaffold",
        "fedadam",
        "fedprox",
        "fedlalr",
        "lafedopt",
        "qfedavg",
        "local_amsgrad",
        "local_sgdm_rl",
    ],
    "auc": ["fgda", "adafgda", "local_sgda", "coda", "codasca", "local_sgdam", "cdma"],
    "robust": ["local_scgd", "local_scgdm", "comfedl"],
    "compositional_auc": ["local_smcgdam"],
    "maml": ["local_moml", "mfcgd"],
    "fair": ["local_sgda", "fgda"],
    "agnostic": ["drfa", "afl"],
}
"""Problems, and algorithms that solve them."""

SLOW = ("steps", "rounds", "epoch", "batches", "retries", "timeout", "threads", "chunk", "compile", "clients", "inject")
"""Parts of the names of options whose large values take long, rightly."""

OWN = ("directory", "folder", "tables", "schema", "device")


def as_toml(value: Any) -> str:
    """A value as TOML, or something that is none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {as_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf") if value is not None else "x"


def option_of(table: str, tables: dict[str, dict[str, Any]], rng: random.Random) -> tuple[str, Any]:
    """The name of an option of a table, and often a value that it takes."""
    name = tables.get(table, {}).get("name")
    registry: Any = {"algorithm": ALGORITHMS, "problem": PROBLEMS, "model": MODELS}.get(table, {})
    options = options_of(registry.definitions()[name] if registry and name in registry else describe.TABLES[table])
    option = options[rng.choice([*options])] if options else None
    if option is None or option.name in OWN or rng.random() < 0.15:
        return rng.choice([*options, "x"]), rng.choice(VALUES)
    choices = option.kind.choices
    for _ in range(50):
        value = rng.choice(choices) if choices and rng.random() < 0.5 else rng.choice(VALUES)
        large = isinstance(value, int | float) and not value <= 3
        if large and any(part in option.name for part in SLOW):
            continue
        try:
            option.kind.take(value, Place(option.name))
        except FedstrataError:
            continue
        return option.name, value
    return option.name, rng.choice(VALUES)


def experiment(rng: random.Random) -> bytes:
    """A configuration file: a small experiment with some settings changed, and perhaps some bytes."""
    problem = rng.choice([*SOLVERS])
    data = "digits" if problem in ("erm", "fair", "agnostic", "maml") else "breast_cancer"
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": data, "subset": 60, "clients": 3},
        "model": {"name": rng.choice(["logreg", "mlp"])},
        "problem": {"name": problem},
        "algorithm": {"name": rng.choice(SOLVERS[problem])},
        "train": {"batch_size": 4},
    }
    for _ in range(rng.choice([1, 1, 2, 3])):
        table = rng.choice([*describe.TABLES, "algorithm", "algorithm", "problem", "model"])
        if table in ("pretrain", "tune", "compare"):
            continue
        name, value = option_of(table, tables, rng)
        tables.setdefault(table, {})[name] = value
    lines = [
        "[" + t + "]\n" + "".join(f"{json.dumps(k)} = {as_toml(v)}\n" for k, v in o.items()) for t, o in tables.items()
    ]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return changed(text, rng) if rng.random() < 0.1 else text


@COUNTS
def test_configuration_files(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(content: bytes) -> None:
        Path("experiment.toml").write_bytes(content)
        code = invoke(["run", "experiment.toml", "--quiet", "--set", "train.rounds=1", "--set", "train.threads=1"])
        assert code in CODES

    monkeypatch.chdir(tmp_path)
    run(b'data.name = "breast_cancer"\nproblem.name = "compositional_auc"\nalgorithm.name = "local_smcgdam"')  # imports
    every_case(count, "TOML", experiment, run)


PLAIN = "age,sex,died\n" + "".join(f"{40 + i},{'fm'[i % 2]},{i % 3 // 2}\n" for i in range(40))
"""A table without faults."""


# --- the command line -------------------------------------------------------------------------------------------------

LONG = ("reproduce", "tune", "compare")
"""Commands that take minutes if their arguments are right; they get no file that exists. The demo always does."""

OPTIONS = [
    *(
        "--out",
        "--set",
        "--preset",
        "--variant",
        "--resume",
        "--json",
        "--quiet",
        "--seeds",
        "--algorithms",
        "--target",
    ),
    *(
        "--schema",
        "--html",
        "--draft",
        "--minimum",
        "--measure",
        "--axis",
        "--range",
        "--keep",
        "--sensitivity",
        "--node",
    ),
    *("--host", "--port", "--app", "--server", "--ca", "--ca-key", "--tensorboard", "--import", "--version", "--list"),
]
SUBCOMMANDS = ["init", "app", "describe", "key", "renew", "node", "x"]


def command(rng: random.Random) -> list[str]:
    """The words of a command."""
    name = rng.choice([*(c for c in COMMANDS if c != "demo"), rng.choice(TEXTS)])
    files = [*TEXTS, *([] if name in LONG else ["e.toml", "run", "t.csv", "s.toml", "train.rounds=1"])]
    words = [name, *([rng.choice(SUBCOMMANDS)] if name == "federate" else [])]
    for _ in range(rng.randrange(6)):
        words.append(rng.choice([rng.choice(OPTIONS), rng.choice(files), rng.choice(files)]))
    if rng.random() < 0.1:
        words = ["--import", rng.choice(files), *words]
    return [word.replace("\ud800", "x") for word in words]  # the streams of a test cannot show it


@COUNTS
def test_command_lines(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: list[str]) -> None:
        assert invoke(words) in CODES

    def replaced(*_: object) -> None:
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", replaced)
    monkeypatch.setattr("fedstrata.cli.reproduce.run_comparison", lambda *_, **__: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("e.toml").write_text('[data]\nsubset = 60\nclients = 3\n[model]\nname = "logreg"\n[train]\nrounds = 1\n')
    Path("t.csv").write_text(PLAIN)
    assert invoke(["run", "e.toml", "--out", "run", "--quiet"]) == 0
    assert invoke(["describe", "t.csv", "--target", "died", "--draft", "s.toml"]) == 0
    every_case(count, "command", command, run)


# --- files of data ----------------------------------------------------------------------------------------------------

HEADERS = [
    *(
        f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({n}, 2), }}"
        for n in (-1, 10**9, 10**12, 10**30, "x", "True")
    ),
    *(
        f"{{'descr': {d}, 'fortran_order': False, 'shape': (4, 2), }}"
        for d in ("'|O'", "'<M8[s]'", "'1000000000f4'", "[]", "'x'")
    ),
    *("{}", "(" * 5000, "[" * 90 + "]" * 90, "{'descr': '<f4'}", "__import__('os')", "\xff", "{'shape': 1}"),
]


def archive(rng: random.Random) -> bytes:
    """An .npz file with changed bytes, or with a member that has another header."""
    buffer, pack = io.BytesIO(), rng.choice([np.savez, np.savez_compressed])
    pack(
        buffer,
        inputs=np.ones((4, 2), dtype=rng.choice(["f4", "f8", "i8", "?", ">f4", "c8", "U3"])),
        targets=np.arange(4),
    )
    if rng.random() < 0.6:
        return changed(buffer.getvalue(), rng)
    with zipfile.ZipFile(buffer, "a") as file:
        header = rng.choice(HEADERS).encode("latin-1")
        member = b"\x93NUMPY\x01\x00" + min(len(header), 65535).to_bytes(2, "little") + header + b"\0" * 32
        file.writestr(rng.choice(["inputs.npy", "inputs", "x.npy", "../x.npy", "test_inputs.npy", ""]) or "a/", member)
    return buffer.getvalue()


@COUNTS
def test_npz_files(count: int, tmp_path: Path) -> None:
    def run(content: bytes) -> None:
        path.write_bytes(content)
        survives(lambda: intake.checked(intake.read_parts(path, "test")["train"], str(path)))

    path = tmp_path / "site.npz"
    every_case(count, "npz", archive, run)


def table(rng: random.Random) -> bytes:
    """A CSV file with other cells, lines and bytes."""
    rows = [["age", "sex", "died"], *([str(40 + i), "fm"[i % 2], str(i % 3 // 2)] for i in range(30))]
    for _ in range(rng.choice([0, 1, 2, 5])):
        row = rng.choice(rows)
        which = rng.randrange(5)
        if which < 3 and row:
            row[rng.randrange(len(row))] = rng.choice([*TEXTS, *map(str, NUMBERS)])
        elif which == 3:
            row.append(rng.choice(TEXTS))
        else:
            del row[rng.randrange(len(row) + 1) :]
    text = "\n".join(rng.choice(",,,,,;\t|").join(row) if rng.random() < 0.02 else ",".join(row) for row in rows)
    content = text.encode(rng.choice(["utf-8", "utf-8", "utf-8", "utf-16", "latin-1"]), "replace")
    return changed(content, rng) if rng.random() < 0.4 else content


@COUNTS
def test_tables(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from fedstrata.data.tables import Schema
    from fedstrata.data.tables.checking import read_checked_alone
    from fedstrata.data.tables.sources import SiteFile

    def run(content: bytes) -> None:
        Path("t.csv").write_bytes(content)
        survives(lambda: read_checked_alone(SiteFile("t", Path("t.csv")), schema))
        if zlib.crc32(content) % 10 == 0:
            assert invoke(["describe", "t.csv", "--target", "died", "--json"]) in CODES

    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(PLAIN)
    assert invoke(["describe", "t.csv", "--target", "died", "--draft", "s.toml"]) == 0
    schema = Schema.read(Path("s.toml"))
    every_case(count, "CSV", table, run)

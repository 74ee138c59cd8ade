"""The description of the tables of a running federation: submit the question as a run, and wait for the answer."""

from __future__ import annotations

import json
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedstrata.core.errors import FedstrataError, InputError
from fedstrata.data.tables.describing import Description
from fedstrata.data.tables.schema import Schema
from fedstrata.experiments.build import schema_of
from fedstrata.experiments.config import parse
from fedstrata.federation import templates
from fedstrata.federation.deploy import app_settings, choose
from fedstrata.federation.experiment import experiment_text
from fedstrata.federation.processes import commands
from fedstrata.federation.server.tables import described_by
from fedstrata.federation.superlink import Flower

POLL = 0.5
"""Seconds between two looks at whether the answer is there."""

OFTEN = 20
"""The status of the run is asked for once in so many looks."""


def describe_federation(
    folder: Path,
    app: str,
    schema: Schema | None,
    nodes: Sequence[str],
    minimum: int,
    say: Callable[[str], None],
    flower: Flower | None = None,
) -> Description:
    """Return the description of the tables of a federation that runs.

    folder: the folder of the federation, as ``init`` wrote it.
    app:    the app whose experiment has the schema, unless there is another, ``schema``.
    nodes:  the names of those to describe; all if there are none.
    """
    commands()
    settings = app_settings(folder, app)
    config = parse(tomllib.loads(str(settings["experiment"])), f"the experiment of {folder / app}")
    if schema is not None:
        data = config.data.replace(schema=schema.to_table(), features=(), drop=())
        config = config.replace(data=data)
    if config.data.schema is None:
        raise InputError(f"The experiment of {folder / app} has no schema of a table. Name one: --schema schema.toml.")
    public = choose(json.loads(settings["nodes"]), nodes, folder)
    flower = flower or Flower((folder / "server" / "cli").resolve(), "federation")
    with tempfile.TemporaryDirectory(prefix="fedstrata-") as scratch:
        out = Path(scratch).resolve() / "told.json"
        text = templates.app_file(Path(scratch), out, None, "", public, experiment_text(config), describe=minimum)
        (Path(scratch) / "app").mkdir()
        (Path(scratch) / "app" / "pyproject.toml").write_text(text)
        say(f"Asking {', '.join(public)}.")
        return described_by(_answer(flower, Path(scratch) / "app", out), schema_of(config))


def _answer(flower: Flower, app: Path, out: Path) -> dict[str, Any]:
    """Submit the app and wait for the file that it writes."""
    run = flower.submit(app)
    try:
        look = 0
        while not out.exists():
            look += 1
            if look % OFTEN == 0 and flower.status(run).startswith("finished") and not out.exists():
                raise FedstrataError(f"The description failed.\n{flower.log(run)[-3000:]}")
            time.sleep(POLL)
    except KeyboardInterrupt:
        flower.stop(run)
        raise
    told: dict[str, Any] = json.loads(out.read_text())
    if "error" in told:
        raise (InputError if told["exit_code"] == InputError.exit_code else FedstrataError)(told["error"])
    return told

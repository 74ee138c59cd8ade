"""``fedstrata list`` and ``fedstrata show``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedstrata.algorithms import ALGORITHMS
from fedstrata.cli.console import echo
from fedstrata.cli.options import Json
from fedstrata.cli.printing import print_grid
from fedstrata.core.errors import unknown
from fedstrata.experiments.describe import KINDS, describe, line_of


def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="algorithms, problems, datasets, models, augmentations, partitions or schedules.",
            show_default="all kinds",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the names that a configuration file can use.

    KIND is algorithms, problems, datasets, models, augmentations, partitions or schedules.
    """
    if kind is None:
        names = {group: sorted(targets) for group, targets in KINDS.items()}
        print(json.dumps(names)) if as_json else print_grid((k, ", ".join(v)) for k, v in names.items())
        return
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    lines = {name: line_of(target) for name, target in sorted(KINDS[kind].definitions().items())}
    if as_json:
        print(json.dumps(lines))
    else:
        print_grid(lines.items())


def show(
    name: Annotated[str, typer.Argument(help="A name that fedstrata list prints, or a table such as train.")],
    as_json: Json = False,
) -> None:
    """Describe anything that a configuration file can name.

    NAME is one that fedstrata list prints, or a table: data, pretrain, train, evaluate, channel, faults, diagnostics,
    tune, compare or plot. The description of an algorithm has its equations, its hyperparameters and what it sends.
    """
    about = describe(name)
    if as_json:
        print(json.dumps(about.as_json()))
        return
    echo(about.text)
    if about.rows:
        echo()
        title = "Hyperparameters" if name in ALGORITHMS else "Options"
        print_grid(about.rows, ("name", "default", "takes", "description"), title)

"""The command ``fedstrata show``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedstrata.algorithms import ALGORITHMS
from fedstrata.cli.options import Json
from fedstrata.cli.printing import echo, print_grid
from fedstrata.experiments.describe import describe


def show(
    name: Annotated[str, typer.Argument(help="A name that fedstrata list prints, or a table such as train.")],
    as_json: Json = False,
) -> None:
    """Describe anything that a configuration file can name.

    NAME is one that fedstrata list prints, or a table: data, pretrain, train, evaluate, channel, faults, diagnostics,
    tune, compare or plot. An algorithm is described by its equations, its options and what it sends.
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

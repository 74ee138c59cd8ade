"""``fedstrata show``."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedstrata.algorithms.algorithm import ALGORITHMS, kind_of
from fedstrata.algorithms.sent import sent
from fedstrata.cli.options import Json
from fedstrata.cli.printing import echo, print_grid
from fedstrata.core.errors import unknown
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.sets import SETS
from fedstrata.models.zoo import MODELS
from fedstrata.problems import PROBLEMS


def show(
    name: Annotated[str, typer.Argument(help="Name of an algorithm, problem, data set, model or partition.")],
    as_json: Json = False,
) -> None:
    """Describe an algorithm, problem, data set, model or partition.

    NAME is one that fedstrata list prints. An algorithm is described by its equations, its hyperparameters and what it
    sends; anything else by its description and options.
    """
    if name not in ALGORITHMS:
        _show_options(name, as_json)
        return
    kind = ALGORITHMS[name]
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    params = {
        f.name: {"default": f.default, "type": kind_of(f), "doc": f.metadata.get("doc", "")}
        for f in dataclasses.fields(kind)  # type: ignore[arg-type]
        if f.init
    }
    if as_json:
        usual = sent(kind)[0]
        described = {"name": name, "text": text, "hyperparameters": params, "up": usual.up, "down": usual.down}
        print(json.dumps(described))
        return
    echo(text)
    echo()
    rows = [(option, str(about["default"]), about["doc"]) for option, about in params.items()]
    print_grid(rows, ("name", "default", "description"), "Hyperparameters")


def _show_options(name: str, as_json: bool) -> None:
    build: Callable[..., Any]
    if name in PROBLEMS:
        build, taken = PROBLEMS[name].build, PROBLEMS[name].options
    elif name in MODELS:
        build, taken = MODELS[name], tuple(inspect.signature(MODELS[name]).parameters)[2:]
    elif name in SETS or name in PARTITIONS:
        build = SETS[name] if name in SETS else PARTITIONS[name]
        own = ("data_dir", "progress")
        taken = tuple(option for option in inspect.signature(build).parameters if option not in own)
    else:
        raise unknown("name", name, [*ALGORITHMS, *PROBLEMS, *SETS, *MODELS, *PARTITIONS])
    text, known = inspect.getdoc(build) or "", inspect.signature(build).parameters
    options = {o: None if known[o].default is inspect.Parameter.empty else known[o].default for o in taken}
    if as_json:
        print(json.dumps({"name": name, "text": text, "options": options}))
        return
    echo(text)
    if options:
        echo()
        rows = [(option, "none" if default is None else str(default)) for option, default in options.items()]
        print_grid(rows, ("name", "default"), "Options")

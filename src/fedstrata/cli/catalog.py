"""``fedstrata list``."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.cli.options import Json
from fedstrata.cli.printing import print_grid
from fedstrata.core.errors import unknown
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.sets import SETS
from fedstrata.models.zoo import MODELS
from fedstrata.problems import PROBLEMS


def list_names(
    kind: Annotated[str, typer.Argument(help="algorithms, problems, datasets, models or partitions.")],
    as_json: Json = False,
) -> None:
    """List algorithms, problems, data sets, models or partitions.

    KIND is algorithms, problems, datasets, models or partitions.
    """
    kinds: dict[str, dict[str, Any]] = {
        "algorithms": ALGORITHMS,
        "problems": {n: p.build for n, p in PROBLEMS.items()},
        "datasets": SETS,
        "models": MODELS,
        "partitions": PARTITIONS,
    }
    if kind not in kinds:
        raise unknown("list", kind, kinds)
    lines = {name: (inspect.getdoc(thing) or "").split("\n")[0] for name, thing in sorted(kinds[kind].items())}
    if as_json:
        print(json.dumps(lines))
    else:
        print_grid(lines.items())

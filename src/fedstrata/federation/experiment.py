"""What of an experiment a federation can run, and what of it reaches the nodes."""

from __future__ import annotations

from typing import Any

import tomli_w

from fedstrata.clients.cohort import cohort_size
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import check
from fedstrata.experiments.build import build_algorithm, named_problem
from fedstrata.experiments.config import Config
from fedstrata.models import MODELS
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.preflight import check_passage


def check_config(config: Config, nodes: int) -> None:
    """Refuse what a federation of so many nodes cannot do, as far as that is known without their data."""
    named_problem(config)
    build_algorithm(config)
    check_passage(config.settings, nodes)
    check(MODELS.find(config.model.name), config.model.options)
    cohort_size(config.train.participation, nodes)
    if config.brings_data:
        raise InputError(f"The problem {config.problem.name} brings its own data, but a federation uses the nodes'.")
    if config.pretrain.rounds:
        raise InputError("A federation does not pre-train: leave out [pretrain].")
    default = Evaluation()
    if config.evaluate.clients == "train":
        raise invalid("key evaluate.clients", "train", "'auto', 'test' or 'none': a federation measures on test data")
    for name in ("adapt_steps", "adapt_lr", "adapt_rows", "stationarity"):
        if getattr(config.evaluate, name) != getattr(default, name):
            raise InputError(f"A federation does not support evaluate.{name}: leave it out.")


def split_of_nodes(config: Config) -> dict[str, Any]:
    """Return how nodes split their data: all of ``[data]`` that means something in a federation."""
    table = config.data
    seed = {} if table.seed is None else {"seed": table.seed}
    return {**{name: getattr(table, name) for name in ("holdout", "support") if getattr(table, name)}, **seed}


def experiment_text(config: Config) -> str:
    """Return the experiment as the TOML text that an app carries; of the data it says only how nodes split theirs."""
    tables = config.to_toml("compare", "plot", "pretrain", "tune", "variants")
    split = split_of_nodes(config)
    tables = {name: table for name, table in tables.items() if name != "data"} | ({"data": split} if split else {})
    text = tomli_w.dumps(tables)
    if '"""' in text or "\\" in text:
        raise InputError('The experiment must not contain backslashes or """: Flower carries it as one quoted text.')
    return text


def plain_evaluation(config: Config) -> Evaluation:
    """Return the evaluation of a model as it is, without adaptation, on one set of samples."""
    table = config.evaluate
    return Evaluation("none", adapt_steps=0, attack_radius=table.attack_radius, attack_steps=table.attack_steps)

"""Experiments in a federation: which ones it can run, and how they are passed to the nodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w

from fedstrata.algorithms import ALGORITHMS
from fedstrata.clients.cohort import cohort_size
from fedstrata.core.errors import InputError, invalid
from fedstrata.core.registry import Registry
from fedstrata.experiments.build import build_algorithm, check_model, named_problem, schema_of
from fedstrata.experiments.config import OF_SEVERAL_RUNS, Config, import_file
from fedstrata.federation.secure import exclusions
from fedstrata.models import MODELS
from fedstrata.models.augment import AUGMENTATIONS
from fedstrata.problems import PROBLEMS
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.preflight import check_channel_and_faults


def check_config(config: Config, nodes: int) -> None:
    """Raise if a federation of this many nodes cannot run the experiment, as far as can be checked without data."""
    named_problem(config)
    build_algorithm(config)
    check_model(config)
    check_channel_and_faults(config.settings, nodes)
    cohort_size(config.train.participation, nodes)
    if config.brings_data:
        raise InputError(f"The problem {config.problem.name} brings its own data, which a federation cannot use.")
    if config.pretrain.rounds:
        raise InputError("A federation does not pre-train: leave out [pretrain].")
    if config.data.sites != "federated":
        raise invalid("key data.sites", config.data.sites, "'federated' in a federation: data stay on their nodes")
    default = Evaluation()
    if config.evaluate.clients == "train":
        raise invalid("key evaluate.clients", "train", "'auto', 'test' or 'none': a federation measures on test data")
    for name in ("adapt_steps", "adapt_lr", "adapt_rows", "stationarity"):
        if getattr(config.evaluate, name) != getattr(default, name):
            raise InputError(f"A federation does not support evaluate.{name}: leave it out.")
    if config.federation.secure:
        exclusions.check_experiment(config, cohort_size(config.train.participation, nodes))


def check_registered(config: Config) -> None:
    """Raise if the experiment names something that is not registered on this node, such as the user's own."""
    augment = [entry if isinstance(entry, str) else entry.get("name") for entry in config.model.augment]
    names: list[tuple[Registry[Any], list[Any]]] = [
        (PROBLEMS, [config.problem.name]),
        (ALGORITHMS, [config.algorithm.name]),
        (MODELS, [config.model.name]),
        (AUGMENTATIONS, augment),
    ]
    for registry, used in names:
        for name in used:
            if name not in registry:
                raise InputError(
                    f"The node has no {registry.kind} {name!r}. If it is your own, its file must be on the node, and "
                    "node.toml must name it: import = '/path/mine.py'."
                )


def tables_for_nodes(config: Config) -> dict[str, Any]:
    """Return the tables of the experiment that apply in a federation; ``[data]`` says only how nodes split data."""
    data = config.data
    split: dict[str, Any] = {name: getattr(data, name) for name in ("holdout", "support") if getattr(data, name)}
    if data.seed is not None:
        split["seed"] = data.seed
    if data.schema is not None:
        split["schema"] = schema_of(config).to_table()
    tables = config.to_toml(*OF_SEVERAL_RUNS, "data", "pretrain")
    return tables | ({"data": split} if split else {})


def experiment_text(config: Config) -> str:
    """Return the experiment as the TOML text that an app contains."""
    text = tomli_w.dumps(tables_for_nodes(config))
    if '"""' in text or "\\" in text:
        raise InputError('The experiment must not contain backslashes or """: an app stores it as one quoted string.')
    return text


def plain_evaluation(config: Config) -> Evaluation:
    """Return the evaluation of one model, without adaptation, on one set of samples."""
    table = config.evaluate
    return Evaluation("none", adapt_steps=0, attack_radius=table.attack_radius, attack_steps=table.attack_steps)


def error_file(out: Path) -> Path:
    """Return the file next to a run directory in which the server writes why a run failed."""
    return out.with_name(out.name + ".error.txt")


def module_list(modules: Iterable[Path]) -> str:
    """Return Python files as one setting, for :func:`import_modules`."""
    return ":".join(str(path.resolve()) for path in modules)


def import_modules(setting: Any) -> None:
    """Import the user's Python files that a setting lists, separated by ':'."""
    for module in filter(None, str(setting).split(":")):
        import_file(Path(module))

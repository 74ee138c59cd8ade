"""Build the data, model, problem and algorithm that a configuration describes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from fedstrata.algorithms import Algorithm, algorithm
from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.core.errors import InputError, unknown, within
from fedstrata.core.named import build_named
from fedstrata.core.options import check, options_of
from fedstrata.data import SETS, Dataset, FederatedData, load
from fedstrata.data.partitions import PARTITIONS
from fedstrata.data.tables.preparation import Plan
from fedstrata.data.tables.schema import Schema
from fedstrata.experiments.config import Config
from fedstrata.experiments.schema import DataTable, ModelTable
from fedstrata.models import zoo
from fedstrata.models.augment import AUGMENTATIONS
from fedstrata.problems import PROBLEMS, ProblemKind
from fedstrata.problems.problem import Problem

if TYPE_CHECKING:
    from fedstrata.training.run import Run


class Experiment:
    """The ``data``, ``problem``, ``algorithm``, ``settings`` and ``evaluation`` of a configuration.

    model:      the model of the problem; None if the problem takes none.
    pretrainer: the algorithm of ``[pretrain]``.
    pretrained: the run whose model the problem starts from, set by :meth:`start_from`.
    """

    def __init__(self, config: Config, data: FederatedData | None = None) -> None:
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config)
        self.pretrainer = build_pretrainer(config)
        self.pretrained: Run | None = None
        self.model: torch.nn.Module | None = None
        self.problem: Problem
        self.evaluation = config.evaluate
        self.settings = config.settings
        kind = named_problem(config)
        _check_tables(config, kind)
        if kind.brings_data:
            seed, options = config.train.seed, dict(config.problem.options)
            self.problem, self.data = kind.with_data(options.pop("seed", seed), **options)
        else:
            self.data = build_data(config) if data is None else data
            if config.data.sites == "pooled":
                self.settings = config.settings.for_pooled(self.data.clients)
                self.data = self.data.pooled()
            self.model = build_model(config, self.data) if kind.takes_model else None
            self.problem = self.problem_on(self.data)

    def problem_on(self, data: FederatedData) -> Problem:
        """Build the problem for these data."""
        return PROBLEMS[self.config.problem.name].on(self.model, data, **self.config.problem.options)

    def start_from(self, run: Run) -> None:
        """Rebuild the problem to start from the model of a previous run."""
        kind = PROBLEMS[self.config.problem.name]
        self.problem = kind.on(run.model(), self.data, **self.config.problem.options)
        self.pretrained = run


def named_problem(config: Config) -> ProblemKind:
    """Return the problem that ``[problem]`` names, after checking its options."""
    kind = PROBLEMS.find(config.problem.name)
    check(kind.build, config.problem.options)
    return kind


def _check_tables(config: Config, kind: ProblemKind) -> None:
    """Raise if there are tables that do not apply to the problem."""
    name = config.problem.name
    if kind.brings_data and (config.data != DataTable() or config.model != ModelTable()):
        raise InputError(f"The problem {name} brings its own data: leave out [data] and [model].")
    if not kind.takes_model and config.model != ModelTable():
        raise InputError(f"The problem {name} takes no model: leave out [model].")
    if not kind.takes_model and config.pretrain.rounds:
        raise InputError(f"The problem {name} has no model to pre-train: leave out [pretrain], or set rounds = 0.")
    if config.data.sites == "local" and config.pretrain.rounds:
        raise InputError("Clients that are trained alone cannot be pre-trained together: leave out [pretrain].")


def check_model(config: Config) -> None:
    """Raise if ``[model]`` names no model, or has wrong options."""
    check(zoo.MODELS.find(config.model.name), config.model.options)
    for entry in config.model.augment:
        build_named(AUGMENTATIONS, entry, "key model.augment")


def build_algorithm(config: Config) -> Algorithm:
    """Build the algorithm that ``[algorithm]`` names."""
    for name in config.algorithms:
        ALGORITHMS.find(name, "[algorithms]")
    return algorithm(config.algorithm.name, config.options_of(config.algorithm.name))


def build_pretrainer(config: Config) -> Algorithm:
    """Build the algorithm that ``[pretrain]`` names, even for 0 rounds, to check its options."""
    name, options = config.pretrain.algorithm, config.pretrain.options
    keys = [f"pretrain.{k}" for k in ("rounds", "algorithm", *options_of(ALGORITHMS.find(name, "[pretrain]")))]
    for option in options:
        if f"pretrain.{option}" not in keys:
            raise unknown("key", f"pretrain.{option}", keys)
    with within("[pretrain]"):
        return algorithm(name, options)


_loaded: dict[tuple[object, str | None, str], Dataset] = {}


def _load(table: DataTable) -> Dataset:
    """Load a data set, or reuse the last one, since the runs of a comparison share it."""
    registered = SETS.find(table.name)  # a user's file, imported again, may load other data under the same name
    key = (registered, table.directory, repr(sorted(table.options.items())))
    if key not in _loaded:
        check(registered, table.options)
        _loaded.clear()
        _loaded[key] = load(table.name, table.directory, lambda line: print(line, file=sys.stderr), **table.options)
    return _loaded[key]


def build_data(config: Config) -> FederatedData:
    """Load the data that ``[data]`` names and partition them across the clients."""
    table, seed = config.data, config.data_seed
    if table.own:
        return _own_data(config)
    dataset = _load(table)
    if table.subset is not None:
        dataset = dataset.subset(table.subset, seed)
    if table.imbalance is not None:
        dataset = dataset.imbalance(table.imbalance, seed, table.positives)
    return dataset.split(
        build_named(PARTITIONS, table.partition, "key data.partition"),
        clients=table.clients,
        seed=seed,
        holdout=table.holdout,
        support=table.support,
        auxiliary=table.auxiliary,
    )


def _own_data(config: Config) -> FederatedData:
    """Read the user's own data: a folder of arrays, or tables."""
    table, default = config.data, DataTable()
    unused = [k for k in options_of(DataTable) if k not in table.own and getattr(table, k) != getattr(default, k)]
    if unused:
        raise InputError(f"data.{table.own[0]} has one file per client: leave out data.{', data.'.join(unused)}.")
    if table.folder is not None:
        return FederatedData.from_folder(table.folder).reserve(table.holdout, table.support, config.data_seed)
    return FederatedData.from_tables(
        table.tables if isinstance(table.tables, str) else list(table.tables or ()),
        schema_of(config),
        prepare=config.prepare,
        holdout=table.holdout,
        support=table.support,
        seed=config.data_seed,
    )


def schema_of(config: Config) -> Schema:
    """Return the schema of ``[data]``, from its file or its table, with the columns to use."""
    table = config.data
    if isinstance(table.schema, str):
        schema = Schema.read(table.schema)
    else:
        schema = Schema.from_table(table.schema or {}, "data.schema", key="data.schema")
    return schema.select(table.features, table.drop) if table.features or table.drop else schema


def plan_of(config: Config) -> Plan | None:
    """Return how the columns of tables become inputs; None if the data are no tables."""
    return None if config.data.schema is None else Plan(schema_of(config), config.prepare)


def build_model(config: Config, data: FederatedData) -> torch.nn.Module:
    """Build the model that ``[model]`` names for the shape of the data."""
    targets = data.train.arrays[-1]
    width = 1 if targets.dim() == 1 else targets.shape[1]
    one_per_target = config.problem.options.get("loss") in ("binary_cross_entropy", "squared")
    outputs = width if one_per_target else data.classes or width
    outputs = PROBLEMS[config.problem.name].outputs or outputs
    name, options = config.model.name, config.model.options
    check_model(config)  # checked first: an option called seed would clash with the argument
    return zoo.model(name, data.shape, outputs, seed=config.train.seed, augment=config.model.augment, **options)

"""Configuration: a TOML file, validated, and turned into data, problem and algorithm."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstrata import models
from fedstrata.algorithms import Algorithm, algorithm
from fedstrata.algorithms.base import ALGORITHMS
from fedstrata.data import Dataset, FederatedData, load
from fedstrata.data.partition import partition_named
from fedstrata.errors import InputError, unknown
from fedstrata.metrics import Evaluation
from fedstrata.problem import Problem
from fedstrata.problems import PROBLEMS
from fedstrata.rundir import read_toml


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Named(BaseModel):
    """A thing by name, with its own options beside it."""

    model_config = ConfigDict(extra="allow", strict=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the name."""
        return dict(self.model_extra or {})


class ModelTable(_Named):
    """Which model, with its options."""

    name: str = "mlp"


class ProblemTable(_Named):
    """Which problem, with its options."""

    name: str = "erm"


class AlgorithmTable(_Named):
    """Which algorithm, with its hyperparameters."""

    name: str = "fedavg"


class DataTable(_Table):
    """Which data, and how they are spread over clients."""

    name: str = "digits"
    folder: str | None = None
    directory: str | None = None
    options: dict[str, Any] = {}
    clients: int = Field(10, ge=1)
    partition: str | dict[str, Any] = "iid"
    imbalance: float | None = Field(None, gt=0, lt=1)
    subset: int | None = Field(None, ge=1)
    holdout: float = Field(0.0, ge=0, lt=1)
    support: float = Field(0.0, ge=0, lt=1)
    seed: int | None = Field(None, ge=0)


class TrainTable(_Table):
    """How to train: the keyword arguments of ``fs.train``."""

    rounds: int = Field(100, ge=1)
    batch_size: int | None = Field(None, ge=1)
    participation: int | float = 1.0
    weighting: Literal["uniform", "samples"] = "uniform"
    sampling: str = "uniform"
    seed: int = Field(0, ge=0)
    chunk: int | str = "auto"
    threads: int | None = Field(None, ge=1)
    device: str = "cpu"
    eval_every: int | None = Field(None, ge=1)
    checkpoint_every: int = Field(1, ge=1)
    state_memory: int = Field(4 << 30, ge=1)


class EvaluateTable(_Table):
    """What to measure."""

    clients: Literal["auto", "test", "train", "none"] = "auto"


class TuneTable(_Table):
    """How ``fedstrata tune`` searches: the same number of trials for every algorithm."""

    trials: int = Field(8, ge=1)
    measure: str | None = None
    share: float = Field(0.2, gt=0, lt=1)
    search: dict[str, dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]]] = {}


class Config(_Table):
    """One experiment."""

    data: DataTable = DataTable()
    model: ModelTable = ModelTable()
    problem: ProblemTable = ProblemTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    algorithms: dict[str, dict[str, Any]] = {}
    train: TrainTable = TrainTable()
    evaluate: EvaluateTable = EvaluateTable()
    tune: TuneTable = TuneTable()
    digest: dict[str, str] = {}

    def to_toml(self) -> dict[str, Any]:
        """Return the resolved configuration as TOML tables, enough to run again."""
        tables = self.model_dump(exclude_none=True, exclude={"digest"})
        if self.data.folder is not None:
            used = ("folder", "holdout", "support", "seed")
            tables["data"] = {k: v for k, v in tables["data"].items() if k in used}
        if self.brings_data:
            del tables["data"], tables["model"]
        return tables

    @property
    def brings_data(self) -> bool:
        """Whether the problem comes with data of its own, so that [data] and [model] have no part in it."""
        return self.problem.name in PROBLEMS and PROBLEMS[self.problem.name].data is not None

    def options_of(self, name: str) -> dict[str, Any]:
        """Return an algorithm's options.

        For the algorithm of ``[algorithm]`` that table wins over ``[algorithms.NAME]``. Another algorithm takes what
        ``[algorithm]`` says where it has an option of that name, and ``[algorithms.NAME]`` wins.
        """
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
        own = self.algorithms.get(name, {})
        if name == self.algorithm.name:
            return own | self.algorithm.options
        mine = set(ALGORITHMS[name].__dataclass_fields__)  # type: ignore[attr-defined]
        return {k: v for k, v in self.algorithm.options.items() if k in mine} | own

    def with_algorithm(self, name: str, options: dict[str, Any] | None = None) -> Config:
        """Return the same experiment with another algorithm, all its options in ``[algorithm]``."""
        chosen = self.options_of(name) | (options or {})
        if "name" in chosen:
            raise unknown(f"hyperparameter of {name}", "name", ALGORITHMS[name].__dataclass_fields__)  # type: ignore[attr-defined]
        return self.model_copy(update={"algorithm": AlgorithmTable(name=name, **chosen)})

    def with_seed(self, seed: int) -> Config:
        """Return the same experiment with another seed."""
        return self.model_copy(update={"train": self.train.model_copy(update={"seed": seed})})


class Experiment:
    """What a configuration stands for: ``data``, ``problem``, ``algorithm``, ``evaluation``."""

    def __init__(self, config: Config, data: FederatedData | None = None) -> None:
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config)
        self.evaluation = Evaluation(config.evaluate.clients)
        kind = config.problem.name
        if kind not in PROBLEMS:
            raise unknown("problem", kind, PROBLEMS)
        builder = PROBLEMS[kind]
        for option in config.problem.options:
            if option not in builder.options:
                raise unknown(f"option of the problem {kind}", option, builder.options)
        if builder.data is None:
            self.data = build_data(config) if data is None else data
            self.problem: Problem = builder.build(build_model(config, self.data), **config.problem.options)
        else:
            for table, default in ((config.data, DataTable()), (config.model, ModelTable())):
                if table != default:
                    raise InputError(f"The problem {kind} brings its own data: leave out [data] and [model].")
            self.problem, self.data = builder.data(**{"seed": config.train.seed, **config.problem.options})


def build_algorithm(config: Config) -> Algorithm:
    """Build the algorithm that ``[algorithm]`` names."""
    for name in config.algorithms:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS, "[algorithms]")
    return algorithm(config.algorithm.name, config.options_of(config.algorithm.name))


_loaded: dict[tuple[str, str | None, str], Dataset] = {}


def _load(table: DataTable) -> Dataset:
    """Load a data set, or take it from the last time: comparisons load the same one again and again."""
    key = (table.name, table.directory, repr(sorted(table.options.items())))
    if key not in _loaded:
        for option in table.options:
            if option in ("name", "data_dir", "progress"):
                raise unknown(f"option of the data set {table.name}", option, ())
        _loaded.clear()
        _loaded[key] = load(table.name, table.directory, lambda line: print(line, file=sys.stderr), **table.options)
    return _loaded[key]


def build_data(config: Config) -> FederatedData:
    """Load the data that ``[data]`` names and spread them over the clients."""
    table = config.data
    if table.folder is not None:
        kept = ("folder", "directory", "seed", "holdout", "support")
        unused = [k for k, v in DataTable() if k not in kept and getattr(table, k) != v]
        if unused:
            raise InputError(f"data.folder holds clients as they are: leave out data.{', data.'.join(unused)}.")
        seed = config.train.seed if table.seed is None else table.seed
        data = FederatedData.from_folder(table.folder)
        data = data.with_holdout(table.holdout, seed) if table.holdout else data
        return data.with_support(table.support, seed) if table.support else data
    dataset = _load(table)
    seed = config.train.seed if table.seed is None else table.seed
    if table.subset is not None:
        dataset = dataset.subset(table.subset, seed)
    if table.imbalance is not None:
        dataset = dataset.imbalance(table.imbalance, seed)
    named = {"name": table.partition} if isinstance(table.partition, str) else dict(table.partition)
    if not isinstance(named.get("name"), str):
        raise InputError("The table data.partition must have a name, e.g. {name = 'dirichlet', alpha = 0.3}.")
    split = partition_named(**named)
    return dataset.split(split, clients=table.clients, seed=seed, holdout=table.holdout, support=table.support)


def build_model(config: Config, data: FederatedData) -> torch.nn.Module:
    """Build the model that ``[model]`` names, for the shape of the data."""
    inputs, targets = data.train.arrays
    outputs = data.classes or (1 if targets.dim() == 1 else targets.shape[1])
    if config.problem.options.get("loss") == "binary_cross_entropy":
        outputs = 1
    name, options = config.model.name, config.model.options
    models.check_options(name, options)
    return models.model(name, tuple(inputs.shape[1:]), outputs, seed=config.train.seed, **options)


def read(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration file and apply ``key=value`` overrides."""
    raw = read_toml(Path(path))
    for override in overrides or []:
        _override(raw, override)
    return parse(raw, str(path))


def parse(raw: dict[str, Any], where: str) -> Config:
    """Validate a configuration; the error names the key, what it got and what it wants."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, where) from None


def _override(raw: dict[str, Any], text: str) -> None:
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


def _explain(error: ValidationError, where: str) -> InputError:
    first = error.errors()[0]
    place = [str(p) for p in first["loc"] if not _is_branch(p)]
    key = ".".join(place)
    if first["type"] == "extra_forbidden":
        table: Any = Config
        for part in place[:-1]:
            table = table.model_fields[part].annotation
        return unknown("key", key, (".".join([*place[:-1], n]) for n in table.model_fields), where)
    wants = first["msg"].removeprefix("Input should be ")
    return InputError(f"The key {key} must be {wants}. Got {first['input']!r}. ({where})")


def _is_branch(part: object) -> bool:
    """Whether pydantic added this to a location to say which type of a union it tried."""
    return isinstance(part, str) and (part in ("int", "float", "str") or part.startswith(("dict[", "tuple[", "list[")))

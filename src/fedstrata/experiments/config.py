"""Configuration: a TOML file, validated, and turned into data, problem and algorithm."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from pydantic import Field, ValidationError

from fedstrata.algorithms import Algorithm, algorithm
from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.clients.channel import Channel
from fedstrata.clients.faults import Faults, Inject
from fedstrata.core.errors import FedstrataError, InputError, invalid, unknown
from fedstrata.core.files import flatten, read_toml
from fedstrata.data import Dataset, FederatedData, load
from fedstrata.data.partitions import partition_named
from fedstrata.experiments.overlay import Tables, merge, override, presets_of, slug, split_preset
from fedstrata.experiments.schema import (
    AlgorithmTable,
    ChannelTable,
    CompareTable,
    DataTable,
    DiagnosticsTable,
    EvaluateTable,
    FaultsTable,
    ModelTable,
    Named,
    PlotTable,
    PretrainTable,
    ProblemTable,
    Table,
    TrainTable,
    TuneTable,
)
from fedstrata.models import zoo
from fedstrata.problems import PROBLEMS, ProblemKind
from fedstrata.problems.problem import Problem
from fedstrata.training.metrics.evaluation import MEASURES, Evaluation

if TYPE_CHECKING:
    from fedstrata.training.train import Run

SHARED = ("lr", "dual_lr", "steps", "server_lr", "weight_decay")
"""The hyperparameters that mean the same in every algorithm: a comparison may share them. Greek letters do not."""


def shared_options(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return which of one algorithm's options another one, ``name``, takes over."""
    mine = ALGORITHMS[name].__dataclass_fields__  # type: ignore[attr-defined]
    return {k: v for k, v in options.items() if k in SHARED and k in mine}


class Config(Table):
    """One experiment."""

    label: str | None = None
    data: DataTable = DataTable()
    model: ModelTable = ModelTable()
    problem: ProblemTable = ProblemTable()
    pretrain: PretrainTable = PretrainTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    algorithms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    train: TrainTable = TrainTable()
    evaluate: EvaluateTable = EvaluateTable()
    channel: ChannelTable = ChannelTable()
    faults: FaultsTable | None = None
    diagnostics: DiagnosticsTable = DiagnosticsTable()
    tune: TuneTable = TuneTable()
    compare: CompareTable = CompareTable()
    plot: PlotTable = PlotTable()
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    digest: dict[str, str] = Field(default_factory=dict)
    written_by: dict[str, str | int] = Field(default_factory=dict)

    def to_toml(self, *without: str) -> dict[str, Any]:
        """Return the resolved configuration as TOML tables, enough to run again, without the tables named."""
        plain = {
            k
            for k in ("channel", "compare", "diagnostics", "plot", "pretrain", "variants")
            if getattr(self, k) == getattr(Config(), k)
        }
        tables = self.model_dump(exclude_none=True, exclude={"digest", "written_by", *plain, *without})
        if self.data.folder is not None:
            used = ("folder", "holdout", "support", "seed")
            tables["data"] = {k: v for k, v in tables["data"].items() if k in used}
        if self.brings_data:
            del tables["data"], tables["model"]
        return tables

    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of ``fs.train`` that the file sets: [train], [channel] and [faults]."""
        faults = None
        if self.faults is not None:
            table = self.faults.model_dump(exclude={"inject"})
            inject = None if self.faults.inject is None else Inject(**self.faults.inject.model_dump())
            faults = Faults(**table, inject=inject)
        return {**self.train.model_dump(), "channel": Channel(**self.channel.model_dump()), "faults": faults}

    @property
    def brings_data(self) -> bool:
        """Whether the problem comes with data of its own, so that [data] and [model] have no part in it."""
        return self.problem.name in PROBLEMS and PROBLEMS[self.problem.name].data is not None

    def options_of(self, name: str) -> dict[str, Any]:
        """Return an algorithm's options.

        For the algorithm of ``[algorithm]`` that table wins over ``[algorithms.NAME]``. Another algorithm takes from
        ``[algorithm]`` only what means the same everywhere (``SHARED``), and ``[algorithms.NAME]`` wins.
        """
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
        own = self.algorithms.get(name, {})
        if name == self.algorithm.name:
            return own | self.algorithm.options
        return shared_options(self.algorithm.options, name) | own

    def problem_options_of(self, name: str) -> dict[str, Any]:
        """Return the options of ``[problem]`` that a problem has."""
        if name not in PROBLEMS:
            raise unknown("problem", name, PROBLEMS)
        return {k: v for k, v in self.problem.options.items() if k in PROBLEMS[name].options}

    def with_algorithm(self, name: str, options: dict[str, Any] | None = None) -> Config:
        """Return the same experiment with another algorithm, all its options in ``[algorithm]``."""
        chosen = self.options_of(name) | (options or {})
        if "name" in chosen:
            raise unknown(f"hyperparameter of {name}", "name", ALGORITHMS[name].__dataclass_fields__)  # type: ignore[attr-defined]
        return self.model_copy(update={"algorithm": AlgorithmTable(name=name, **chosen)})

    def with_seed(self, seed: int) -> Config:
        """Return the same experiment with another seed."""
        return self.model_copy(update={"train": self.train.model_copy(update={"seed": seed})})

    def variant(self, label: str) -> Config:
        """Return the experiment with the overrides of ``[variants.LABEL]``, without variants and with that label.

        The overrides are merged (:func:`fedstrata.experiments.overlay.merge`). Another algorithm keeps what
        :meth:`options_of` says, another problem keeps the options that it has too, another algorithm of ``[pretrain]``
        what is shared.
        """
        if label not in self.variants:
            raise unknown("variant", label, self.variants)
        return _variant(self, label, f"variant {label!r}")


_OF_THE_WHOLE = ("algorithms", "compare", "label", "plot", "preset", "train.seed", "tune", "variants")
"""What a variant cannot change: its options are in ``[algorithm]``, and the seeds are those of all variants."""


def _variant(config: Config, label: str, where: str) -> Config:
    over = config.variants[label]
    for key in [*over, *flatten(over)]:
        if key in _OF_THE_WHOLE:
            raise InputError(f"A variant cannot change {key}, which belongs to the experiment as a whole. ({where})")
    tables = config.model_dump(exclude_none=True, exclude={"variants", "digest", "written_by"})
    for kind, surviving in (("algorithm", config.options_of), ("problem", config.problem_options_of)):
        name = over[kind].get("name") if isinstance(over.get(kind), dict) else None
        if isinstance(name, str) and name != tables[kind]["name"]:
            with within(where):
                tables[kind] = {"name": name, **surviving(name)}
    return parse(merge(_for_pretrain_of(over, tables), {**over, "label": label}), where)


def _for_pretrain_of(over: Tables, base: Tables) -> Tables:
    """Return ``base`` for ``over`` to be laid on: another algorithm of [pretrain] keeps rounds and what is shared."""
    old, new = base.get("pretrain"), over.get("pretrain")
    name = new.get("algorithm") if isinstance(new, dict) else None
    if not isinstance(old, dict) or not isinstance(name, str) or name not in ALGORITHMS:
        return base
    if name == old.get("algorithm", PretrainTable().algorithm):
        return base
    rounds = {k: v for k, v in old.items() if k == "rounds"}
    return {**base, "pretrain": {**rounds, "algorithm": name, **shared_options(old, name)}}


@contextmanager
def within(where: str, kind: type[FedstrataError] = InputError) -> Iterator[None]:
    """Add to the message of every refusal in the block, or other ``kind`` of error, where it comes from."""
    try:
        yield
    except kind as error:
        raise type(error)(f"{error} ({where})") from None


class Experiment:
    """What a configuration stands for: ``data``, ``problem``, ``algorithm``, ``evaluation``.

    model:      what the problem is built from; None when it brings its own data.
    pretrainer: the algorithm of ``[pretrain]``.
    pretrained: the run whose model the problem starts from, once there is one: :meth:`start_from`.
    """

    def __init__(self, config: Config, data: FederatedData | None = None) -> None:
        self.config = config
        self.algorithm: Algorithm = build_algorithm(config)
        self.pretrainer = build_pretrainer(config)
        self.pretrained: Run | None = None
        self.model: torch.nn.Module | None = None
        self.evaluation = Evaluation(**config.evaluate.model_dump())
        kind = config.problem.name
        builder = named_problem(config)
        if builder.data is None:
            self.data = build_data(config) if data is None else data
            self.model = build_model(config, self.data)
            self.problem: Problem = builder.on(self.model, self.data, **config.problem.options)
        else:
            for table, default in ((config.data, DataTable()), (config.model, ModelTable())):
                if table != default:
                    raise InputError(f"The problem {kind} brings its own data: leave out [data] and [model].")
            if config.pretrain.rounds:
                raise InputError(f"The problem {kind} has no model to pre-train: leave out [pretrain], or rounds = 0.")
            self.problem, self.data = builder.data(**{"seed": config.train.seed, **config.problem.options})

    def start_from(self, run: Run) -> None:
        """Build the problem anew, from the model of a run that came before it."""
        builder = PROBLEMS[self.config.problem.name]
        self.problem = builder.on(run.model(), self.data, **self.config.problem.options)
        self.pretrained = run


def import_file(path: Path) -> None:
    """Run a Python file of the user's, so that the algorithms it defines are known by name."""
    spec = importlib.util.spec_from_file_location(f"fedstrata_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"--import wants a Python file. Got {str(path)!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def named_problem(config: Config) -> ProblemKind:
    """Return what builds the problem that ``[problem]`` names, with options that it has."""
    kind = config.problem.name
    if kind not in PROBLEMS:
        raise unknown("problem", kind, PROBLEMS)
    for option in config.problem.options:
        if option not in PROBLEMS[kind].options:
            raise unknown(f"option of the problem {kind}", option, PROBLEMS[kind].options)
    return PROBLEMS[kind]


def build_algorithm(config: Config) -> Algorithm:
    """Build the algorithm that ``[algorithm]`` names."""
    for name in config.algorithms:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS, "[algorithms]")
    return algorithm(config.algorithm.name, config.options_of(config.algorithm.name))


def build_pretrainer(config: Config) -> Algorithm:
    """Build the algorithm that ``[pretrain]`` names, also where it has no rounds to do: a wrong key is refused."""
    name, options = config.pretrain.algorithm, config.pretrain.options
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS, "[pretrain]")
    known = [f"pretrain.{k}" for k in (*PretrainTable.model_fields, *ALGORITHMS[name].__dataclass_fields__)]  # type: ignore[attr-defined]
    for option in options:
        if f"pretrain.{option}" not in known:
            raise unknown("key", f"pretrain.{option}", known)
    with within("[pretrain]"):
        return algorithm(name, options)


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
    options: dict[str, Any] = {k: getattr(table, k) for k in ("clients", "holdout", "support", "auxiliary")}
    return dataset.split(split, seed=seed, **options)


def build_model(config: Config, data: FederatedData) -> torch.nn.Module:
    """Build the model that ``[model]`` names, for the shape of the data."""
    inputs, targets = data.train.arrays
    width = 1 if targets.dim() == 1 else targets.shape[1]
    one_per_target = config.problem.options.get("loss") in ("binary_cross_entropy", "squared")
    outputs = width if one_per_target else data.classes or width
    outputs = PROBLEMS[config.problem.name].outputs or outputs
    name, options = config.model.name, config.model.options
    zoo.check_options(name, options)
    return zoo.model(name, tuple(inputs.shape[1:]), outputs, seed=config.train.seed, **options)


def read(path: str | Path, overrides: list[str] | None = None, preset: str | None = None) -> Config:
    """Read a configuration file with one of its presets, the first by default, and apply ``key=value`` overrides."""
    raw, over = split_preset(_with_names(read_toml(Path(path))), preset, str(path))
    raw = merge(_for_pretrain_of(over, raw), over)
    for text in overrides or []:
        single: Tables = {}
        override(single, text)
        raw = _for_pretrain_of(single, raw)
        before = {kind: dict(raw.get(kind) or {}) for kind in ("algorithm", "problem")}
        override(raw, text)
        kind, _, option = text.partition("=")[0].strip().partition(".")
        if kind in before and option and isinstance(raw.get(kind), dict):
            _settle(raw, kind, option, before[kind])
    return parse(raw, str(path))


def _settle(raw: Tables, kind: str, option: str, before: Tables) -> None:
    """Draw the consequences of an option of the algorithm, or problem, that was set on the command line.

    Another name keeps only what fits it. Any other option wins over what variants and ``[algorithms.NAME]`` say.
    """
    name, value = raw[kind].get("name"), raw[kind].get(option)
    if option == "name":
        if kind == "algorithm" and name in ALGORITHMS and name != before.get("name"):
            raw[kind] = {"name": name, **shared_options(before, name)}
        elif kind == "problem" and name in PROBLEMS and name != before.get("name"):
            raw[kind] = {k: v for k, v in raw[kind].items() if k in ("name", *PROBLEMS[name].options)}
        return
    tables = [v.get(kind) for v in (raw.get("variants") or {}).values() if isinstance(v, dict)]
    tables += list((raw.get("algorithms") or {}).values()) if kind == "algorithm" else []
    for table in tables:
        if isinstance(table, dict) and option in table:
            table[option] = value


def presets(path: str | Path) -> list[str]:
    """Return the names of a configuration file's presets, in its order."""
    return list(presets_of(read_toml(Path(path)), str(path)))


def parse(raw: dict[str, Any], where: str) -> Config:
    """Validate a configuration and its variants; the error names the key, what it got and what it wants."""
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, where) from None
    for key, names in (
        ("plot.measures", config.plot.measures or []),
        ("plot.log", config.plot.log or []),
        ("tune.measure", [config.tune.measure] if config.tune.measure else []),
    ):
        for name in names:
            if name not in MEASURES:
                raise unknown("measure", name, MEASURES, f"{key}, {where}")
    slugs: dict[str, str] = {}
    for label in config.variants:
        _variant(config, label, f"variant {label!r} of {where}")
        other = slugs.setdefault(slug(label), label)
        if other != label:
            raise invalid("label of a variant", label, f"different from {other!r} in more than punctuation", where)
        if not slug(label):
            raise invalid("label of a variant", label, "a name with letters or digits", where)
    return config


def _with_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the tables with the names that they leave to the default, so that a preset can be told to change them."""
    names = {k: f.default.name for k, f in Config.model_fields.items() if isinstance(f.default, Named | DataTable)}
    return {k: {"name": names[k], **v} if k in names and isinstance(v, dict) else v for k, v in raw.items()}


def _explain(error: ValidationError, where: str) -> InputError:
    first = error.errors()[0]
    place = [str(p) for p in first["loc"] if not _is_branch(p)]
    key = ".".join(place)
    if first["type"] == "extra_forbidden":
        table: Any = Config
        for part in place[:-1]:
            kind = table.model_fields[part].annotation
            table = next((k for k in get_args(kind) if hasattr(k, "model_fields")), kind)
        return unknown("key", key, (".".join([*place[:-1], n]) for n in table.model_fields), where)
    wants = first["msg"].removeprefix("Input should be ")
    return InputError(f"The key {key} must be {wants}. Got {first['input']!r}. ({where})")


def _is_branch(part: object) -> bool:
    """Whether pydantic added this to a location to say which type of a union it tried."""
    return isinstance(part, str) and (part in ("int", "float", "str") or part.startswith(("dict[", "tuple[", "list[")))

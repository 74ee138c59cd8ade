"""Configurations of experiments: read from files, checked, and varied."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedstrata.algorithms.algorithm import ALGORITHMS
from fedstrata.clients.channel import PLAIN, Channel
from fedstrata.clients.faults import Faults
from fedstrata.core.errors import InputError, unknown, within
from fedstrata.core.files import flatten, read_toml
from fedstrata.core.options import Options, check, options_of, param
from fedstrata.core.registry import IMPORTED
from fedstrata.data.tables.preparation import Preparation
from fedstrata.experiments import overlay
from fedstrata.experiments.overlay import Tables, check_labels
from fedstrata.experiments.schema import (
    SITES,
    AlgorithmTable,
    CompareTable,
    DataTable,
    FederationTable,
    ModelTable,
    PlotTable,
    PretrainTable,
    ProblemTable,
    TuneTable,
    Tuning,
)
from fedstrata.problems import PROBLEMS
from fedstrata.training.diagnostics import Diagnostics
from fedstrata.training.metrics.catalogue import DECLARED, MEASURES, VALIDATION
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.settings import Settings
from fedstrata.training.stopping import costs_of

WRITTEN = ("digest", "written_by")
"""Tables that only the config.toml of a run has."""

OF_SEVERAL_RUNS = ("baselines", "compare", "plot", "tune", "variants")
"""Tables that a single run does not depend on."""

OPTIONAL = ("baselines", "channel", "compare", "diagnostics", "federation", "plot", "prepare", "pretrain", "variants")
"""Tables that the config.toml of a run omits if nothing in them is set."""


class Config(Options, owner="the configuration"):
    """One experiment: the tables of its file, each as the options of what it configures."""

    label: str | None = param(None, "label of the run in plots; by default the algorithm's name")
    data: DataTable = param(DataTable(), "the data, and how they are partitioned across clients")
    prepare: Preparation = param(Preparation(), "how the columns of tables become inputs of the model")
    model: ModelTable = param(ModelTable(), "the model")
    problem: ProblemTable = param(ProblemTable(), "the problem")
    pretrain: PretrainTable = param(PretrainTable(), "plain federated learning before the run")
    algorithm: AlgorithmTable = param(AlgorithmTable(), "the algorithm")
    algorithms: dict[str, dict[str, Any]] = param({}, "options of individual algorithms, by name")
    train: Settings = param(Settings(), "how to train")
    evaluate: Evaluation = param(Evaluation(), "what to measure")
    channel: Channel = param(PLAIN, "clipping, noise and compression of the clients' answers")
    faults: Faults | None = param(None, "how to handle clients that fail")
    federation: FederationTable = param(FederationTable(), "what the server of a federation can see")
    diagnostics: dict[str, Any] = param({}, "what to record about local steps")
    tune: TuneTable = param(TuneTable(), "how to search for hyperparameters")
    compare: CompareTable = param(CompareTable(), "how to repeat runs")
    baselines: dict[str, dict[str, Any]] = param({}, "the algorithm of a baseline, local or pooled, if not the first")
    plot: PlotTable = param(PlotTable(), "what to plot")
    variants: dict[str, dict[str, Any]] = param({}, "changes to the experiment, by label")
    digest: dict[str, str] = param({}, "digests of the data and the starting point, in the config.toml of a run")
    written_by: dict[str, Any] = param({}, "version that wrote the config.toml of a run, and its format")

    def to_toml(self, *without: str) -> Tables:
        """Return the resolved configuration as TOML tables, complete enough to run again, without the named tables."""
        default = Config()
        unset = [name for name in OPTIONAL if getattr(self, name) == getattr(default, name)]
        tables = {k: v for k, v in self.to_table().items() if k not in (*WRITTEN, *unset, *without)}
        if self.data.own and "data" in tables:
            tables["data"] = {k: v for k, v in tables["data"].items() if k in self.data.own}
        kind = PROBLEMS.get(self.problem.name)
        if kind is not None and not kind.takes_model:
            tables.pop("model", None)
        if self.brings_data:
            tables.pop("data", None)
        return tables

    @property
    def settings(self) -> Settings:
        """The settings of a run: [train], [channel] and [faults]."""
        return self.train.replace(channel=self.channel, faults=self.faults)

    @property
    def data_seed(self) -> int:
        """The seed of partitions and splits: ``data.seed``, or else ``train.seed``."""
        return self.train.seed if self.data.seed is None else self.data.seed

    @property
    def brings_data(self) -> bool:
        """Whether the problem comes with its own data, so that [data] and [model] do not apply."""
        return self.problem.name in PROBLEMS and PROBLEMS[self.problem.name].brings_data

    def options_of(self, name: str) -> dict[str, Any]:
        """Return an algorithm's options.

        For the algorithm of ``[algorithm]``, that table overrides ``[algorithms.NAME]``. Any other algorithm takes
        from ``[algorithm]`` only the options in ``overlay.SHARED``, and ``[algorithms.NAME]`` overrides them.
        """
        ALGORITHMS.find(name)
        own = self.algorithms.get(name, {})
        if name == self.algorithm.name:
            return own | self.algorithm.options
        return overlay.applicable("algorithm", self.algorithm.options, name) | own

    def problem_options_of(self, name: str) -> dict[str, Any]:
        """Return the options of ``[problem]`` that another problem also has."""
        PROBLEMS.find(name)
        return overlay.applicable("problem", self.problem.options, name)

    def with_algorithm(self, name: str, options: dict[str, Any] | None = None) -> Config:
        """Return the same experiment with another algorithm, with all of its options in ``[algorithm]``."""
        chosen = self.options_of(name) | (options or {})
        if "name" in chosen:
            raise unknown(f"option of {name}", "name", options_of(ALGORITHMS[name]))
        return self.replace(algorithm=AlgorithmTable(name=name, options=chosen))

    def with_seed(self, seed: int) -> Config:
        """Return the same experiment with another seed."""
        return self.replace(train=self.train.replace(seed=seed))

    def with_data_seed(self, seed: int) -> Config:
        """Return the experiment with this seed of the data, also in variants with other data; not if it has one."""
        fixed = self.data.seed is not None or self.brings_data
        config = self if fixed else self.replace(data=self.data.replace(seed=seed))
        variants = {label: config.variant(label) for label in config.variants}
        unfixed = [label for label, one in variants.items() if one.data.seed is None and not one.brings_data]
        fixed_too = {k: overlay.merge(config.variants[k], {"data": {"seed": seed}}) for k in unfixed}
        return config.replace(variants={**config.variants, **fixed_too})

    def as_baseline(self, sites: str) -> Config:
        """Return the experiment with each client alone, or all data in one place, and the baseline's own algorithm."""
        table = {"name": self.algorithm.name, **self.baselines.get(sites, {})}
        own = AlgorithmTable.from_table(table, key=f"baselines.{sites}")
        config = self.with_algorithm(own.name, own.options)
        return config.replace(data=self.data.replace(sites=sites), label=None)

    def variant(self, label: str) -> Config:
        """Return the experiment with the overrides of ``[variants.LABEL]``, without variants and with that label.

        Tables are merged key by key (:func:`fedstrata.experiments.overlay.merge`). A new algorithm gets the options of
        :meth:`options_of`, a new problem those that apply to it, a new algorithm of ``[pretrain]`` the shared ones.
        """
        if label not in self.variants:
            raise unknown("variant", label, self.variants)
        return _variant(self, label, f"variant {label!r}")


_NOT_IN_VARIANTS = (*OF_SEVERAL_RUNS, "algorithms", "label", "preset", "train.seed")
"""Keys that a variant cannot set. Its options belong in ``[algorithm]``, and all variants use the same seeds."""


def _variant(config: Config, label: str, where: str) -> Config:
    over = config.variants[label]
    for key in [*over, *flatten(over)]:
        if key in _NOT_IN_VARIANTS:
            raise InputError(f"A variant cannot change {key}, which belongs to the experiment as a whole. ({where})")
    tables = {k: v for k, v in config.to_table().items() if k not in ("variants", *WRITTEN)}
    for kind, surviving in (("algorithm", config.options_of), ("problem", config.problem_options_of)):
        name = over[kind].get("name") if isinstance(over.get(kind), dict) else None
        if isinstance(name, str) and name != tables[kind]["name"]:
            with within(where):
                tables[kind] = {"name": name, **surviving(name)}
    return parse(overlay.merge_experiment(tables, {**over, "label": label}), where)


def read(
    path: str | Path, overrides: list[str] | None = None, preset: str | None = None, *, tuned: bool = True
) -> Config:
    """Read a configuration file with one of its presets, the first by default, and apply ``key=value`` overrides.

    tuned: whether it takes the options, and the seeds, in the file that the key ``tuned`` names.
    """
    raw = read_toml(Path(path))
    file = raw.pop("tuned", None)
    tuning = Tuning() if file is None or not tuned else overlay.tuning_in(file, Path(path))
    raw = overlay.with_tuned(raw, tuning)
    raw, over = overlay.split_preset(overlay.with_names(raw), preset, str(path))
    raw = overlay.merge_experiment(raw, over)
    for text in overrides or []:
        raw = overlay.override(raw, text)
    config = parse(raw, str(path))
    return config if tuning.data_seed is None else config.with_data_seed(tuning.data_seed)


def presets(path: str | Path) -> list[str]:
    """Return the names of a configuration file's presets, in its order."""
    return list(overlay.presets_of(read_toml(Path(path)), str(path)))


def parse(raw: Tables, where: str) -> Config:
    """Check a configuration and its variants; an error names the key, the value and what is expected."""
    config = Config.from_table(raw, where, key="")
    diagnostics = check(Diagnostics, config.diagnostics, where, key="diagnostics")
    declared = options_of(Diagnostics)
    config = config.replace(diagnostics={k: v for k, v in diagnostics.items() if v != declared[k].default})
    for key, names in (
        ("plot.measures", config.plot.measures or ()),
        ("plot.log", config.plot.log),
        ("tune.measure", (config.tune.measure,) if config.tune.measure else ()),
        ("compare.measure", (config.compare.measure,) if config.compare.measure else ()),
        ("train.watch", (config.train.watch,) if config.train.watch else ()),
    ):
        for name in names:
            counted = key == "compare.measure" and name in costs_of(config.settings)
            if name.removeprefix(VALIDATION) not in MEASURES | DECLARED and not counted:
                raise unknown("measure", name, MEASURES | DECLARED, f"{key}, {where}")
    for name in config.baselines:
        if name not in SITES:
            raise unknown("baseline", name, SITES, f"[baselines], {where}")
    for label in config.variants:
        _variant(config, label, f"variant {label!r} of {where}")
    check_labels("variant", config.variants, where)
    return config


def import_file(path: Path) -> None:
    """Run a user's Python file, to register the algorithms, problems, models and data sets it defines.

    What it contains is part of the identity of searches and comparisons, which are not resumed with another content.
    """
    if not path.exists():
        raise InputError(f"--import: there is no file {path}.")
    spec = importlib.util.spec_from_file_location(f"fedstrata_user_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"--import needs a Python file. Got {str(path)!r}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        IMPORTED[path.name] = blake2b(path.read_bytes(), digest_size=8).hexdigest()
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise InputError(f"{path}: {_line(error, path)}{type(error).__name__}: {error}") from error


def _line(error: BaseException, path: Path) -> str:
    """Return which line of the file raised an error, for a message; empty if none did."""
    frames, file = traceback.extract_tb(error.__traceback__), path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f"line {lines[-1]}, " if lines else ""

"""Tables that exist only in configuration files; the others are the options of what they configure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from fedstrata.core.errors import InputError, invalid
from fedstrata.core.options import Options, build, options_of, param
from fedstrata.data.dataset import AUXILIARY, HOLDOUT, IMBALANCE, POSITIVES, SUPPORT
from fedstrata.training.plots import AXES, RANGES

SITES = ("local", "pooled")
"""The baselines: each client alone, and all data in one place."""

SAMPLERS = ("sobol", "latin", "tpe", "gp")
"""How a search chooses points."""


MOST = 10_000
"""The most seeds of a comparison or a trial, and the most trials for a hyperparameter."""


class WithOptions(Options):
    """A table that names an object and has that object's ``options`` next to its own keys."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str = "", key: str | None = None) -> Self:
        """Build it from a table; keys that are not its own are options of the named object."""
        own = [name for name in options_of(cls) if name != "options"]
        rest = {k: v for k, v in table.items() if k not in own}
        built: Self = build(cls, {**{k: v for k, v in table.items() if k in own}, "options": rest}, where, key)
        return built

    def to_table(self) -> dict[str, Any]:
        """Return the table, with the options next to its own keys."""
        table = super().to_table()
        options: dict[str, Any] = table.pop("options")
        return table | options


_OPTIONS = param({}, "options of the named object")


class ModelTable(WithOptions, owner="the model table"):
    """A model and its options."""

    name: str = param("mlp", "a model from `fedstrata list models`")
    augment: Sequence[str | dict[str, Any]] = param(
        (), "random changes to inputs in training: names from `fedstrata list augmentations`, or tables with options"
    )
    options: dict[str, Any] = _OPTIONS


class ProblemTable(WithOptions, owner="the problem table"):
    """A problem and its options."""

    name: str = param("erm", "a problem from `fedstrata list problems`")
    options: dict[str, Any] = _OPTIONS


class AlgorithmTable(WithOptions, owner="the algorithm table"):
    """An algorithm and its hyperparameters."""

    name: str = param("fedavg", "an algorithm from `fedstrata list algorithms`")
    options: dict[str, Any] = _OPTIONS


class PretrainTable(WithOptions, owner="the pretrain table"):
    """Federated learning with cross-entropy before the run."""

    rounds: int = param(0, "rounds before the run; 0 for none", least=0)
    algorithm: str = param("fedavg", "an algorithm that solves erm; its hyperparameters go in the same table")
    options: dict[str, Any] = _OPTIONS


class DataTable(Options, owner="the data table"):
    """The data, and how they are partitioned across clients."""

    name: str = param("digits", "a data set from `fedstrata list datasets`")
    options: dict[str, Any] = param({}, "options of the data set, e.g. `{ length = 40 }` for shakespeare")
    directory: str | None = param(
        None, "data directory; by default the environment variable FEDSTRATA_DATA, else `~/.cache/fedstrata`"
    )
    folder: str | None = param(
        None,
        "your own data instead: a folder with one .npz per client (`inputs`, `targets`; optionally `test_inputs`, "
        "`test_targets`; further inputs of a model are `inputs_1`, `inputs_2`, ...), and optionally a pooled "
        "`test.npz`",
    )
    tables: str | Sequence[str] | None = param(
        None,
        'your own tables instead: a pattern such as `"sites/*.csv"`, or a list of CSV or Parquet files, one per site; '
        "or one file, if the schema names the column of the sites",
    )
    schema: str | dict[str, Any] | None = param(
        None, "the schema of the tables: a file that `fedstrata describe` drafts, or its content as a table"
    )
    features: Sequence[str] = param((), "columns of the tables to use; by default all of the schema")
    drop: Sequence[str] = param((), "columns of the schema to leave out")
    clients: int = param(10, "number of clients", least=1)
    partition: str | dict[str, Any] = param(
        "iid", 'a partition by name, or with its options: `{ name = "dirichlet", alpha = 0.3 }`'
    )
    imbalance: float | None = IMBALANCE
    positives: Sequence[int] | None = POSITIVES
    subset: int | None = param(None, "number of training rows to use; by default all", least=1)
    holdout: float = HOLDOUT
    support: float = SUPPORT
    auxiliary: int = AUXILIARY
    sites: Literal["federated", "pooled", "local"] = param(
        "federated",
        "how the clients' data are used: in a federation; pooled in one place, where a step takes as many samples as "
        "all clients together; or locally, each client alone with its own model",
    )
    seed: int | None = param(None, "random seed of the data; by default that of the run", least=0)

    def __post_init__(self) -> None:
        if self.positives is not None and self.imbalance is None:
            raise InputError(
                f"The key data.positives applies only with data.imbalance, the fraction of positives. "
                f"Got {list(self.positives)} without it."
            )
        if self.tables is None and (self.features or self.drop):
            raise InputError("The keys data.features and data.drop apply only with data.tables.")
        if self.tables is not None and self.schema is None:
            raise InputError(
                "The key data.tables needs data.schema, the file that says what the columns are: draft one with "
                "fedstrata describe TABLES --target COLUMN --draft schema.toml."
            )
        if self.tables is not None and self.folder is not None:
            raise InputError("The keys data.tables and data.folder both name your own data: set one of them.")

    @property
    def own(self) -> tuple[str, ...]:
        """The keys that apply if the data are the user's own; empty if they are a data set."""
        return WITH_FOLDER if self.folder is not None else WITH_TABLES if self.tables is not None else ()


WITH_FOLDER = ("folder", "directory", "holdout", "support", "sites", "seed")
"""The keys of ``[data]`` that apply to the user's own data, in ``data.folder``."""

WITH_TABLES = ("tables", "schema", "features", "drop", "directory", "holdout", "support", "sites", "seed")
"""The keys of ``[data]`` that apply to the user's own tables, in ``data.tables``."""


class FederationTable(Options, owner="the federation table"):
    """What the server of a federation can see; a simulation takes no notice of it."""

    secure: bool = param(
        False, "sum the answers of the nodes under masks, so that the server learns only means over nodes"
    )
    threshold: int | float = param(
        0.67,
        "fraction or number of a cohort's nodes that must stay to the end of a secure sum: more than half",
        only={"secure": (True,)},
    )
    bits: int = param(
        32,
        "binary places of the numbers in a secure sum: a mean is exact to 2^-bits, and larger numbers fit with fewer",
        least=1,
        most=48,
        only={"secure": (True,)},
    )

    def needed(self, cohort: int) -> int:
        """Return how many nodes of a cohort must stay to the end of a secure sum."""
        if isinstance(self.threshold, float):
            return math.ceil(round(self.threshold * cohort, 9))
        return min(self.threshold, cohort)


class CompareTable(Options, owner="the compare table"):
    """How ``fedstrata compare`` and ``fedstrata reproduce`` repeat runs, and judge the differences."""

    seeds: int | None = param(
        None,
        "runs of each algorithm or variant, with seeds counted from train.seed; by default 3",
        least=1,
        most=MOST,
    )
    baseline: str | None = param(
        None, "algorithm or variant that the others are compared with; by default the first one"
    )
    measure: str | None = param(
        None, "measure to judge by; by default the distance to the solution if it is known, else auc, accuracy or loss"
    )
    baselines: Sequence[str] = param(
        (),
        "also run the first algorithm or variant with each client alone (local), or with all data in one place "
        "(pooled), to see what a federation gains and costs",
        choices=SITES,
    )

    def __post_init__(self) -> None:
        if len(set(self.baselines)) < len(self.baselines):
            raise invalid("baselines", list(self.baselines), "'local', 'pooled' or both, once each")


class PlotTable(Options, owner="the plot table"):
    """What the plot of a comparison shows, and the format of its files."""

    measures: Sequence[str] | None = param(
        None, "measures in the panels of the plot and in the tables; by default up to three"
    )
    axis: str = param("round", "horizontal axis", choices=AXES)
    log: Sequence[str] = param((), "measures on a logarithmic scale")
    title: str | None = param(None, "title of the plot")
    range: str = param(
        "auto",
        "vertical axis: `auto` cuts off the start of the curves if it would squeeze the rest, `full` shows everything",
        choices=RANGES,
    )

    format: str | None = param(
        None, "format of the plots of a comparison or a search; by default png", choices=("png", "pdf", "svg")
    )

    def __post_init__(self) -> None:
        if self.measures == ():
            raise invalid("key plot.measures", [], "a list of at least one measure")

    @property
    def shown(self) -> dict[str, Any]:
        """The keyword arguments of :func:`fedstrata.training.plots.plot`."""
        return {name: value for name, value in self.to_table().items() if name != "format"}


class TuneTable(Options, owner="the tune table"):
    """How ``fedstrata tune`` searches, by the same rule for every algorithm or variant."""

    trials: int = param(
        8,
        "trials for each hyperparameter that is searched; the file's own settings and the algorithm's defaults are "
        "tried as well",
        least=1,
        most=MOST,
    )
    seeds: int = param(
        3, "seeds per trial, whose results are averaged; a trial fails if one of them diverges", least=1, most=MOST
    )
    measure: str | None = param(
        None,
        "measure on the validation data to rank trials by; by default as in [compare]",
    )
    share: float = param(0.2, "fraction of each client's training rows used for validation", above=0, below=1)
    sampler: str = param(
        "sobol",
        "how to choose points: scrambled Sobol points, a Latin hypercube, or Optuna's tpe or gp, which learn from "
        "earlier trials",
        choices=SAMPLERS,
    )
    rounds: int | None = param(
        None,
        "shorter trials: rounds of a trial; the best three are then run for train.rounds, and the best of these wins",
        least=1,
    )
    halving: int | None = param(
        None,
        "successive halving by a factor n: start with short trials, keep the best 1/n of them and run these n times as "
        "long, until they have train.rounds",
        least=2,
    )
    extend: bool = param(True, "if the best value lies at an edge of its range, search once more beyond the edge")
    baselines: bool = param(
        True, "also tune the baselines of [compare]; otherwise they take the best settings of the first method"
    )
    search: dict[str, dict[str, tuple[float, float]]] = param(
        {}, "`search.NAME.OPTION = [low, high]` replaces the search range of the algorithm or variant NAME"
    )

    def __post_init__(self) -> None:
        if self.rounds is not None and self.halving is not None:
            raise InputError("tune.rounds and tune.halving both shorten trials: set one of them.")
        if self.sampler in ("tpe", "gp") and (self.rounds is not None or self.halving is not None):
            raise InputError(
                f"The sampler {self.sampler} learns from trials of full length: leave out tune.rounds and tune.halving."
            )


class Tuning(Options, owner="the file of tuned settings"):
    """What ``fedstrata tune`` writes for variants."""

    variants: dict[str, dict[str, dict[str, Any]]] = param({}, "the best options, as [variants.LABEL.algorithm]")
    baselines: dict[str, dict[str, Any]] = param({}, "the algorithms of the baselines, with their best options")
    trial_seeds: tuple[int, ...] = param((), "the seeds of the trials, which a comparison does not use again", least=0)
    data_seed: int | None = param(
        None, "the seed of the data in every trial: with another one, test rows could be rows of the trials", least=0
    )

    def __post_init__(self) -> None:
        if not all([*tables] == ["algorithm"] for tables in self.variants.values()):
            raise InputError(
                "The variants of a file of tuned settings have tables such as [variants.fedavg.algorithm]."
            )

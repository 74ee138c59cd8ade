"""The tables of a configuration file: their keys, types and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Table(BaseModel):
    """A table without room for keys that mean nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)


class WithOptions(BaseModel):
    """A table with room for the options of what it names."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options, without the table's own keys."""
        return dict(self.model_extra or {})


class Named(WithOptions):
    """A thing by name, with its own options beside it."""

    name: str


class ModelTable(Named):
    """Which model, with its options."""

    name: str = "mlp"


class ProblemTable(Named):
    """Which problem, with its options."""

    name: str = "erm"


class AlgorithmTable(Named):
    """Which algorithm, with its hyperparameters."""

    name: str = "fedavg"


class PretrainTable(WithOptions):
    """Plain learning by cross-entropy before the run: for how many rounds, by which algorithm, with its options."""

    rounds: int = Field(0, ge=0)
    algorithm: str = "fedavg"


class DataTable(Table):
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
    auxiliary: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0)


class TrainTable(Table):
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


class EvaluateTable(Table):
    """What to measure: the keyword arguments of ``fs.Evaluation``."""

    clients: Literal["auto", "test", "train", "none"] = "auto"
    adapt_steps: int | None = Field(None, ge=0)
    adapt_lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    adapt_rows: int | None = Field(None, ge=1)
    stationarity: bool = False
    attack_radius: float | None = Field(None, gt=0, allow_inf_nan=False)
    attack_steps: int = Field(10, ge=0)


class ChannelTable(Table):
    """What answers go through: the keyword arguments of ``fs.Channel``."""

    compress: Literal["none", "top_k", "quantise"] = "none"
    top: float = 0.01
    clip: float | None = None
    bound: float | None = None
    reduce: Literal["mean", "median", "trimmed_mean"] = "mean"
    trim: float = 0.1
    noise: float = 0.0
    delta: float = 1e-5


class InjectTable(Table):
    """Faults made on purpose: the keyword arguments of ``fs.Inject``."""

    drop: float = 0.0
    delay: float = 0.0
    crash: float = 0.0
    nan: float = 0.0
    garbage: float = 0.0
    scale: float = 0.0
    seconds: float = 5.0
    factor: float = 1000.0
    clients: list[Annotated[int, Field(ge=0)]] = []
    seed: int = Field(0, ge=0)


class FaultsTable(Table):
    """How to deal with clients that fail: the keyword arguments of ``fs.Faults``."""

    quorum: int | float = 0.5
    retries: int = Field(2, ge=0)
    timeout: float = Field(600.0, gt=0)
    max_bytes: int | None = Field(None, ge=1)
    inject: InjectTable | None = None


class DiagnosticsTable(Table):
    """What to write down of local steps: the keyword arguments of ``fs.Diagnostics``."""

    norms: list[str] = []
    clients: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=0)]] = 2
    rounds: list[Annotated[int, Field(ge=1)]] | None = None
    rates: bool = False


class CompareTable(Table):
    """How ``fedstrata compare`` and ``fedstrata reproduce`` repeat runs."""

    seeds: int | None = Field(None, ge=1)


class PlotTable(Table):
    """What the picture of a comparison shows: the keyword arguments of :func:`fedstrata.training.plots.plot`."""

    measures: Annotated[list[str], Field(min_length=1)] | None = None
    axis: Literal["round", "steps", "samples", "bytes_up", "bytes_down", "seconds"] = "round"
    log: list[str] = []
    title: str | None = None


class TuneTable(Table):
    """How ``fedstrata tune`` searches: the same number of trials for every algorithm or variant."""

    trials: int = Field(8, ge=1)
    seeds: int = Field(1, ge=1)
    measure: str | None = None
    share: float = Field(0.2, gt=0, lt=1)
    search: dict[str, dict[str, Annotated[list[float], Field(min_length=2, max_length=2)]]] = {}

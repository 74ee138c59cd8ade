"""The public interface: what ``fedstrata`` exports, gathered in one place."""

from fedstrata import algorithms as _algorithms
from fedstrata import data, models, problems
from fedstrata.algorithms import *  # noqa: F403
from fedstrata.clients import Client, Clients, Variables, remote
from fedstrata.clients.channel import Channel
from fedstrata.clients.faults import Faults, Inject, QuorumError
from fedstrata.core import schedules
from fedstrata.core.errors import Diverged, FedstrataError, InputError, MissingData
from fedstrata.core.schedules import CubeRoot, Epochs, Interval, Power, RoundDecay, StepDecay
from fedstrata.data import Dataset, FederatedData
from fedstrata.data import partitions as partition
from fedstrata.experiments.comparison import Comparison
from fedstrata.experiments.python import compare, tune
from fedstrata.experiments.tune import Tuned
from fedstrata.problems import (
    Quadratic,
    adversarial,
    agnostic,
    auc,
    composition,
    compositional_auc,
    damaml,
    erm,
    fair,
    maml,
    multilevel,
    projections,
    quadratic,
    quadratic_saddle,
    risk_averse,
    robust,
    tower,
)
from fedstrata.problems.problem import Problem
from fedstrata.training import testing
from fedstrata.training.callbacks import Callback, ShowProgress, TensorBoard
from fedstrata.training.diagnostics import Diagnostics
from fedstrata.training.local import LocalRun, train_local
from fedstrata.training.metrics.catalogue import declare_measure
from fedstrata.training.metrics.evaluation import Evaluation
from fedstrata.training.run import Run
from fedstrata.training.train import train

__all__ = [
    *_algorithms.__all__,
    "Callback",
    "Channel",
    "Client",
    "Clients",
    "Comparison",
    "CubeRoot",
    "Dataset",
    "Diagnostics",
    "Diverged",
    "Epochs",
    "Evaluation",
    "Faults",
    "FederatedData",
    "FedstrataError",
    "Inject",
    "InputError",
    "Interval",
    "LocalRun",
    "MissingData",
    "Power",
    "Problem",
    "Quadratic",
    "QuorumError",
    "RoundDecay",
    "Run",
    "ShowProgress",
    "StepDecay",
    "TensorBoard",
    "Tuned",
    "Variables",
    "adversarial",
    "agnostic",
    "auc",
    "compare",
    "composition",
    "compositional_auc",
    "damaml",
    "data",
    "declare_measure",
    "erm",
    "fair",
    "maml",
    "models",
    "multilevel",
    "partition",
    "problems",
    "projections",
    "quadratic",
    "quadratic_saddle",
    "remote",
    "risk_averse",
    "robust",
    "schedules",
    "testing",
    "tower",
    "train",
    "train_local",
    "tune",
]

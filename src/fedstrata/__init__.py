"""fedstrata: federated learning for layered objectives."""

from fedstrata import data, models, partition, schedules
from fedstrata.algorithms import (
    AFL,
    DRFA,
    MFCGD,
    AdaMFCGD,
    Algorithm,
    ComFedL,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedNest,
    FedProx,
    FedYogi,
    LocalMOML,
    LocalSCGD,
    LocalSCGDM,
    QFedAvg,
    Scaffold,
    State,
    algorithm,
    param,
)
from fedstrata.callbacks import Callback, ShowProgress, TensorBoard
from fedstrata.clients import Client, Clients
from fedstrata.data import Dataset, FederatedData
from fedstrata.errors import Diverged, FedstrataError, InputError, MissingData
from fedstrata.metrics import Evaluation
from fedstrata.problem import Problem
from fedstrata.problems import Quadratic, agnostic, composition, damaml, erm, maml, quadratic, robust
from fedstrata.schedules import CubeRoot, Epochs, RoundDecay, StepDecay
from fedstrata.train import Run, train

__version__ = "0.1.0"

__all__ = [
    "AFL",
    "DRFA",
    "MFCGD",
    "AdaMFCGD",
    "Algorithm",
    "Callback",
    "Client",
    "Clients",
    "ComFedL",
    "CubeRoot",
    "Dataset",
    "Diverged",
    "Epochs",
    "Evaluation",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedNest",
    "FedProx",
    "FedYogi",
    "FederatedData",
    "FedstrataError",
    "InputError",
    "LocalMOML",
    "LocalSCGD",
    "LocalSCGDM",
    "MissingData",
    "Problem",
    "QFedAvg",
    "Quadratic",
    "RoundDecay",
    "Run",
    "Scaffold",
    "ShowProgress",
    "State",
    "StepDecay",
    "TensorBoard",
    "agnostic",
    "algorithm",
    "composition",
    "damaml",
    "data",
    "erm",
    "maml",
    "models",
    "param",
    "partition",
    "quadratic",
    "robust",
    "schedules",
    "train",
]

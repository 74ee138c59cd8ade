"""fedstrata: federated learning for layered objectives."""

from fedstrata import data, models, partition, schedules
from fedstrata.algorithms import (
    Algorithm,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedProx,
    FedYogi,
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
from fedstrata.problems import Quadratic, erm, quadratic
from fedstrata.schedules import CubeRoot, Epochs, RoundDecay, StepDecay
from fedstrata.train import Run, train

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Callback",
    "Client",
    "Clients",
    "CubeRoot",
    "Dataset",
    "Diverged",
    "Epochs",
    "Evaluation",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedYogi",
    "FederatedData",
    "FedstrataError",
    "InputError",
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
    "algorithm",
    "data",
    "erm",
    "models",
    "param",
    "partition",
    "quadratic",
    "schedules",
    "train",
]

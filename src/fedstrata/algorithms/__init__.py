"""The algorithms, one file each, named as on the command line."""

from fedstrata.algorithms.base import ALGORITHMS, Algorithm, State, algorithm, param
from fedstrata.algorithms.fedadagrad import FedAdagrad
from fedstrata.algorithms.fedadam import FedAdam
from fedstrata.algorithms.fedavg import FedAvg
from fedstrata.algorithms.fedprox import FedProx
from fedstrata.algorithms.fedyogi import FedYogi
from fedstrata.algorithms.qfedavg import QFedAvg
from fedstrata.algorithms.scaffold import Scaffold

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedYogi",
    "QFedAvg",
    "Scaffold",
    "State",
    "algorithm",
    "param",
]

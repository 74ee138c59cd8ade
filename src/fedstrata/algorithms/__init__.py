"""The algorithms, one file each, named as on the command line."""

from fedstrata.algorithms.adamfcgd import AdaMFCGD
from fedstrata.algorithms.afl import AFL
from fedstrata.algorithms.base import ALGORITHMS, Algorithm, State, algorithm, param
from fedstrata.algorithms.comfedl import ComFedL
from fedstrata.algorithms.drfa import DRFA
from fedstrata.algorithms.fedadagrad import FedAdagrad
from fedstrata.algorithms.fedadam import FedAdam
from fedstrata.algorithms.fedavg import FedAvg
from fedstrata.algorithms.fednest import FedNest
from fedstrata.algorithms.fedprox import FedProx
from fedstrata.algorithms.fedyogi import FedYogi
from fedstrata.algorithms.local_moml import LocalMOML
from fedstrata.algorithms.local_scgd import LocalSCGD
from fedstrata.algorithms.local_scgdm import LocalSCGDM
from fedstrata.algorithms.mfcgd import MFCGD
from fedstrata.algorithms.qfedavg import QFedAvg
from fedstrata.algorithms.scaffold import Scaffold

__all__ = [
    "AFL",
    "ALGORITHMS",
    "DRFA",
    "MFCGD",
    "AdaMFCGD",
    "Algorithm",
    "ComFedL",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedNest",
    "FedProx",
    "FedYogi",
    "LocalMOML",
    "LocalSCGD",
    "LocalSCGDM",
    "QFedAvg",
    "Scaffold",
    "State",
    "algorithm",
    "param",
]

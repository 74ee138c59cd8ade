"""The algorithms, one file per algorithm box of a paper, named as on the command line."""

from fedstrata.algorithms.afl import AFL
from fedstrata.algorithms.algorithm import ALGORITHMS, Algorithm, State, algorithm, param
from fedstrata.algorithms.cdma import CDMA
from fedstrata.algorithms.coda import CoDA
from fedstrata.algorithms.codasca import CODASCA
from fedstrata.algorithms.comfedl import ComFedL
from fedstrata.algorithms.drfa import DRFA
from fedstrata.algorithms.fedavg import FedAvg
from fedstrata.algorithms.fedlalr import FedLALR
from fedstrata.algorithms.fednest import FedNest
from fedstrata.algorithms.fedopt import FedAdagrad, FedAdam, FedAMS, FedYogi
from fedstrata.algorithms.fedprox import FedProx
from fedstrata.algorithms.fgda import FGDA, AdaFGDA
from fedstrata.algorithms.lafedopt import LaFedOPT
from fedstrata.algorithms.local_adaalter import LocalAdaAlter
from fedstrata.algorithms.local_amsgrad import LocalAMSGrad
from fedstrata.algorithms.local_moml import LocalMOML
from fedstrata.algorithms.local_scgd import LocalSCGD, LocalSCGDM
from fedstrata.algorithms.local_scgdam import LocalSCGDAM
from fedstrata.algorithms.local_sgda import LocalSGDA, LocalSGDAPlus
from fedstrata.algorithms.local_sgdam import LocalSGDAM, LocalSGDAMPlus
from fedstrata.algorithms.local_sgdm_rl import LocalSGDMRL
from fedstrata.algorithms.local_smcgdam import LocalSMCGDAM
from fedstrata.algorithms.mfcgd import MFCGD, AdaMFCGD
from fedstrata.algorithms.qfedavg import QFedAvg
from fedstrata.algorithms.sagda import SAGDA
from fedstrata.algorithms.scaffold import Scaffold

__all__ = [
    "AFL",
    "ALGORITHMS",
    "CDMA",
    "CODASCA",
    "DRFA",
    "FGDA",
    "MFCGD",
    "SAGDA",
    "AdaFGDA",
    "AdaMFCGD",
    "Algorithm",
    "CoDA",
    "ComFedL",
    "FedAMS",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedLALR",
    "FedNest",
    "FedProx",
    "FedYogi",
    "LaFedOPT",
    "LocalAMSGrad",
    "LocalAdaAlter",
    "LocalMOML",
    "LocalSCGD",
    "LocalSCGDAM",
    "LocalSCGDM",
    "LocalSGDA",
    "LocalSGDAM",
    "LocalSGDAMPlus",
    "LocalSGDAPlus",
    "LocalSGDMRL",
    "LocalSMCGDAM",
    "QFedAvg",
    "Scaffold",
    "State",
    "algorithm",
    "param",
]

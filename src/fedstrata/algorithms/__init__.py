"""The algorithms, one file per algorithm box of a paper. To add one, write its file and add one line here."""

from fedstrata.algorithms.afl import AFL as AFL
from fedstrata.algorithms.algorithm import ALGORITHMS as ALGORITHMS
from fedstrata.algorithms.algorithm import Algorithm as Algorithm
from fedstrata.algorithms.algorithm import State as State
from fedstrata.algorithms.algorithm import algorithm as algorithm
from fedstrata.algorithms.algorithm import param as param
from fedstrata.algorithms.cdma import CDMA as CDMA
from fedstrata.algorithms.coda import CoDA as CoDA
from fedstrata.algorithms.codasca import CODASCA as CODASCA
from fedstrata.algorithms.comfedl import ComFedL as ComFedL
from fedstrata.algorithms.drfa import DRFA as DRFA
from fedstrata.algorithms.fedavg import FedAvg as FedAvg
from fedstrata.algorithms.fedlalr import FedLALR as FedLALR
from fedstrata.algorithms.fednest import FedNest as FedNest
from fedstrata.algorithms.fedopt import FedAdagrad as FedAdagrad
from fedstrata.algorithms.fedopt import FedAdam as FedAdam
from fedstrata.algorithms.fedopt import FedAMS as FedAMS
from fedstrata.algorithms.fedopt import FedYogi as FedYogi
from fedstrata.algorithms.fedprox import FedProx as FedProx
from fedstrata.algorithms.fgda import FGDA as FGDA
from fedstrata.algorithms.fgda import AdaFGDA as AdaFGDA
from fedstrata.algorithms.lafedopt import LaFedOPT as LaFedOPT
from fedstrata.algorithms.local_adaalter import LocalAdaAlter as LocalAdaAlter
from fedstrata.algorithms.local_amsgrad import LocalAMSGrad as LocalAMSGrad
from fedstrata.algorithms.local_moml import LocalMOML as LocalMOML
from fedstrata.algorithms.local_scgd import LocalSCGD as LocalSCGD
from fedstrata.algorithms.local_scgd import LocalSCGDM as LocalSCGDM
from fedstrata.algorithms.local_scgdam import LocalSCGDAM as LocalSCGDAM
from fedstrata.algorithms.local_sgda import LocalSGDA as LocalSGDA
from fedstrata.algorithms.local_sgda import LocalSGDAPlus as LocalSGDAPlus
from fedstrata.algorithms.local_sgdam import LocalSGDAM as LocalSGDAM
from fedstrata.algorithms.local_sgdam import LocalSGDAMPlus as LocalSGDAMPlus
from fedstrata.algorithms.local_sgdm_rl import LocalSGDMRL as LocalSGDMRL
from fedstrata.algorithms.local_smcgdam import LocalSMCGDAM as LocalSMCGDAM
from fedstrata.algorithms.mfcgd import MFCGD as MFCGD
from fedstrata.algorithms.mfcgd import AdaMFCGD as AdaMFCGD
from fedstrata.algorithms.qfedavg import QFedAvg as QFedAvg
from fedstrata.algorithms.sagda import SAGDA as SAGDA
from fedstrata.algorithms.scaffold import Scaffold as Scaffold

__all__ = ["Algorithm", "State", "algorithm", "param", *sorted(k.__name__ for k in ALGORITHMS.values())]

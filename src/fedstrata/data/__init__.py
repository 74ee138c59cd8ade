"""Data sets, and data spread over clients."""

from fedstrata.data.dataset import Dataset
from fedstrata.data.federated import FederatedData, Part
from fedstrata.data.sets import SETS, load, register
from fedstrata.data.sets.images import cifar10, cifar100, digits, fashion_mnist, mnist, omniglot
from fedstrata.data.sets.medical import breastmnist, ham10000, pneumoniamnist
from fedstrata.data.sets.synthetic import sinusoid
from fedstrata.data.sets.tabular import a9a, adult, bank, breast_cancer, mammography, w8a
from fedstrata.data.sets.text import shakespeare

__all__ = [
    "SETS",
    "Dataset",
    "FederatedData",
    "Part",
    "a9a",
    "adult",
    "bank",
    "breast_cancer",
    "breastmnist",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "ham10000",
    "load",
    "mammography",
    "mnist",
    "omniglot",
    "pneumoniamnist",
    "register",
    "shakespeare",
    "sinusoid",
    "w8a",
]

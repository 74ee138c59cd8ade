"""Data sets, and how they are spread over clients."""

from fedstrata.data.dataset import Dataset
from fedstrata.data.federated import FederatedData, Part
from fedstrata.data.sets import (
    SETS,
    a9a,
    adult,
    bank,
    breast_cancer,
    breastmnist,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    ham10000,
    load,
    mammography,
    mnist,
    omniglot,
    pneumoniamnist,
    shakespeare,
    w8a,
)

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
    "shakespeare",
    "w8a",
]

"""Partitions by the name they have on the command line: ``fs.partition.dirichlet(0.3)``."""

from fedstrata.data.partition import (
    ByKey,
    ClassGroups,
    Dirichlet,
    Dominant,
    Iid,
    OneLarge,
    Partition,
    Shards,
)

iid = Iid
dirichlet = Dirichlet
dominant = Dominant
one_large = OneLarge
shards = Shards
class_groups = ClassGroups
by_key = ByKey

__all__ = ["Partition", "by_key", "class_groups", "dirichlet", "dominant", "iid", "one_large", "shards"]

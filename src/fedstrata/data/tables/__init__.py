"""Tables of sites: their schema, reading and checking them, and describing them without pooling a row."""

from fedstrata.data.tables.columns import Column, Target
from fedstrata.data.tables.schema import FileFormat, Schema

__all__ = ["Column", "FileFormat", "Schema", "Target"]

"""The version of the package and of its file formats."""

__version__ = "0.2.0"

FORMAT = 2
"""The format of run directories and checkpoints, increased when old and new versions cannot read each other's runs."""

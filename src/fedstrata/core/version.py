"""The version of the package, and of what it writes."""

__version__ = "0.2.0"

FORMAT = 2
"""The format of run directories and checkpoints. It grows when an older version could not read a newer run, or the
other way round."""

"""The command line."""

from fedstrata.cli.commands import main

__all__ = ["main"]

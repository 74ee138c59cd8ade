"""The command line."""

from fedstrata.cli.app import main

__all__ = ["main"]

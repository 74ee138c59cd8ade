"""Where commands print: results on stdout, messages and progress on stderr."""

from __future__ import annotations

import sys

from rich.console import Console

OUT = Console(width=None if sys.stdout.isatty() else 140)
ERR = Console(stderr=True)


def say(text: str) -> None:
    """Print a message to stderr."""
    ERR.print(text, highlight=False, markup=False, soft_wrap=True)


def echo(text: str = "", wrap: bool = False) -> None:
    """Print text to stdout; ``wrap`` breaks long lines between words."""
    OUT.print(text, highlight=False, markup=False, soft_wrap=not wrap)

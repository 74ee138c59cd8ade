"""The command ``fedstrata``: its commands, the options before a command, and the exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import typer

from fedstrata import __version__
from fedstrata.cli import federate
from fedstrata.cli.compare import compare, reproduce, tune
from fedstrata.cli.demo import demo
from fedstrata.cli.plot import partition, plot
from fedstrata.cli.printing import say
from fedstrata.cli.run import run
from fedstrata.cli.show import list_names, show
from fedstrata.clients.ranks import launched
from fedstrata.core.errors import FedstrataError, invalid
from fedstrata.experiments.config import import_file

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # rewraps the paragraphs of a docstring
    help="Federated learning for layered objectives. Start with: fedstrata demo",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedstrata {__version__}")
        raise typer.Exit


@app.callback()
def _before_command(
    context: typer.Context,
    modules: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", help="Python file that defines your own algorithms. Can be repeated."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand != "run" and launched():
        wants = "run, the only command that several processes can share"
        raise invalid("command under torchrun", context.invoked_subcommand, wants)
    context.obj = tuple(modules or ())
    for path in modules or ():
        import_file(path)


app.command()(demo)
app.command()(run)
app.command()(compare)
app.command()(tune)
app.command()(reproduce)
app.command("list")(list_names)
app.command()(show)
app.command()(plot)
app.command()(partition)
app.add_typer(federate.app, name="federate")


def main() -> None:
    """Run the command in ``sys.argv`` and exit with its code."""
    warnings.showwarning = lambda message, *_, **__: say(f"Warning: {message}")
    code = invoke()
    if launched():
        # Threads of the process group may outlive it, and abort a rank that has finished while Python shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0 for success, 2 for bad input, 1 for any other failure, 130 for an interrupt."""
    try:
        code = app(arguments, standalone_mode=False)
    except FedstrataError as error:
        say(f"Error: {error}")
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except OSError as error:
        say(f"Error: {error}")
        return 1
    if code == 130:
        say("Interrupted. A run with --out can be resumed from its last checkpoint: pass --resume.")
    return code if isinstance(code, int) else 0
